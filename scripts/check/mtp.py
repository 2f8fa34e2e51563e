"""A target's own multi-token-prediction layer drafts where no draft is named: what is read of it, and what it brings.

    python -m scripts.check.mtp                     tiny targets of each family, made here
    python -m scripts.check.mtp TARGET...           checkpoints with such a layer

The tiny targets are random, and hardly change a token's embedding from layer to layer: their layer guesses well, as a
trained one does. Greedy texts of both runs are compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from edgespec import Engine, TreeSettings
from edgespec.hub.names import NO_DRAFT
from edgespec.pair.pair import open_pair
from edgespec.text.results import GenerationResult
from tests.edgespec.draft.mtp_target import TYPES, write_target

SHARE = 0.01  # of what decoder layers add
LAYERS = 16  # so that one more is a small part, as it is of a large target
HELD = TreeSettings(size=16, lookup=False)
KIB = 1 << 10


def generated(engine: Engine, new_tokens: int) -> GenerationResult:
    """A greedy text."""
    return engine.generate("The quick brown fox", max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)


def tokens_per_pass(result: GenerationResult) -> float:
    """Tokens a pass after the prompt's own."""
    return round((len(result.token_ids) - 1) / sum(not step.is_prefill for step in result.steps), 2)


def report(folder: Path, new_tokens: int) -> dict[str, object]:
    """Generate without a draft that is named, and without any."""
    pair = open_pair(folder, None)
    assert pair.draft is not None, f"{folder} has no layer that is read"
    read = {entry.name: entry.num_bytes for entry in pair.draft.checkpoint.tensors.values()}
    all_bytes = sum(entry.num_bytes for entry in pair.target.checkpoint.tensors.values())
    with Engine.from_pair(pair, context_tokens=256, dtype="float32") as engine:
        drafts, found = engine.draft_model is not None, generated(engine, new_tokens)
        if drafts:
            engine.use_tree(HELD)
        held = generated(engine, new_tokens)
    with Engine.from_pair(open_pair(folder, NO_DRAFT), context_tokens=256, dtype="float32") as engine:
        plain = generated(engine, new_tokens)
    return {
        "model_type": pair.target.config.model_type,
        "drafts": drafts,
        "tensors": len(read),
        "layer_kib": round(sum(read.values()) / KIB, 1),
        "checkpoint_kib": round(all_bytes / KIB, 1),
        "tokens_per_pass": tokens_per_pass(found),  # of trees that tune themselves: few where none pays
        "held_tokens_per_pass": tokens_per_pass(held),  # of trees of 16 nodes
        "equal_texts": found.token_ids == held.token_ids == plain.token_ids,
    }


def main() -> None:
    """Print a row a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", type=Path)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        targets = arguments.targets or (
            write_target(Path(work) / name, name, share=SHARE, num_layers=LAYERS)[0] for name in TYPES
        )
        for folder in targets:
            rows.append(row := report(folder, arguments.new_tokens))
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
