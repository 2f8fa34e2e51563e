"""Texts beyond the length that a model was trained with: whose tokens they have, and what a pass takes.

    python -m scripts.bench.far_positions
    python -m scripts.bench.far_positions --rotations longrope phi3 --repeats 15

A random model of each scaled rotation, in float32: trained with 512 positions, and stretched to 2,048 by its config.
Three greedy texts grow together through trees, each drafted by the model itself: one stays within the trained length,
one crosses it, one begins beyond. They are compared with transformers' own generate, each alone. Then passes of a tree
of 64 nodes a text are timed, over contexts of 256 and 1,536 tokens: two short texts, two long ones, one of each. A
rotation that depends on the length is made once for each length in a pass. Prints medians and a JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from edgespec import Engine, TreeSettings
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.pair.pair import open_pair
from edgespec.tree.token_tree import TokenTree
from tests.support.tiny_checkpoints import save_folder

TRAINED, STRETCHED = 512, 2048
HEAD_DIM = 64
SIZES = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FACTORS = {
    "short_factor": [1 + 0.05 * place for place in range(HEAD_DIM // 2)],
    "long_factor": [1 + 0.3 * place for place in range(HEAD_DIM // 2)],
}
# transformers' phi3 reads a text anew where it outgrows the first set of factors; others do not
ROTATIONS: dict[str, tuple[str, str]] = {
    "none": ("llama", "default"),
    "yarn": ("llama", "yarn"),
    "dynamic": ("llama", "dynamic"),
    "longrope": ("llama", "longrope"),
    "phi3": ("phi3", "longrope"),
}
PROMPTS = (TRAINED // 2, TRAINED - 8, 3 * TRAINED)  # tokens
NEW_TOKENS = 24
SHORT, LONG = TRAINED // 2, 3 * TRAINED
NODES = 64
SEED = 1


def write_model(folder: Path, name: str) -> Path:
    """A random model with this rotation; one without any is trained with all of the positions."""
    family, kind = ROTATIONS[name]
    rotation: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    rotation |= {} if kind == "default" else {"factor": STRETCHED / TRAINED}
    rotation |= FACTORS if kind == "longrope" else {}
    rotation |= {"original_max_position_embeddings": TRAINED} if kind in {"longrope", "yarn"} else {}
    trained = TRAINED if kind == "dynamic" else STRETCHED
    config = AutoConfig.for_model(
        family, **SIZES, max_position_embeddings=trained, original_max_position_embeddings=TRAINED,
        rope_parameters=rotation,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return save_folder(folder, model)


def prompt_of(tokens: int) -> list[int]:
    """Random tokens, others for each length."""
    return torch.randint(3, 256, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def num_equal(engine: Engine, folder: Path) -> int:
    """Return how many of the texts that grow together are those of transformers, each alone."""
    requests = [
        engine.request(prompt_of(count), max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, name=str(count))
        for count in PROMPTS
    ]
    handles = [engine.submit(request) for request in requests]
    found = [list(handle.result().token_ids) for handle in handles]
    expected = []
    for count in PROMPTS:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # it remembers its longest pass
        ids = model.generate(
            torch.tensor([prompt_of(count)]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        expected.append(ids[0, count:].tolist())
    return sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))


def tree() -> TokenTree:
    """A binary tree of random tokens."""
    parents = torch.tensor([-1, *((node - 1) // 2 for node in range(1, NODES))])
    ranks = torch.tensor([0, *((node - 1) % 2 for node in range(1, NODES))])
    tokens = torch.tensor(prompt_of(NODES))
    return TokenTree(
        tokens=tokens, parents=parents, ranks=ranks, draw="coupled", draft_rows=torch.full_like(parents, -1)
    )


def passes_ms(model: CausalModel, contexts: dict[str, tuple[int, ...]], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of a pass over texts of these lengths, which take turns."""
    texts = {name: [Target(model) for _ in lengths] for name, lengths in contexts.items()}
    for name, lengths in contexts.items():
        for text, length in zip(texts[name], lengths, strict=True):
            text.prefill(torch.tensor(prompt_of(length)))
    spent: dict[str, list[float]] = {name: [] for name in contexts}
    for _ in range(repeats):
        for name, of_pass in texts.items():
            began = time.perf_counter()
            model.read([text.tree_rows(tree()) for text in of_pass])
            spent[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in spent.items()}


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", nargs="+", default=list(ROTATIONS), choices=list(ROTATIONS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    contexts = {"two short": (SHORT, SHORT), "two long": (LONG, LONG), "one of each": (SHORT, LONG)}
    print(f"| rotation | texts equal | {', ms | '.join(contexts)}, ms |\n| --- | --- | --- | --- | --- |")
    rows = []
    for name in arguments.rotations:
        with tempfile.TemporaryDirectory() as work:
            folder = write_model(Path(work) / "model", name)
            with Engine.from_pair(
                open_pair(folder, folder), tree=TreeSettings(size=12, depth=5), dtype="float32", self_check=False,
                context_tokens=STRETCHED, parallel=len(PROMPTS),
            ) as engine:  # fmt: skip
                row = {
                    "rotation": name, "texts": len(PROMPTS), "equal": num_equal(engine, folder),
                    **passes_ms(engine.target_model, contexts, arguments.repeats),
                }  # fmt: skip
        rows.append(row)
        print(
            f"| {name} | {row['equal']} of {row['texts']} | {' | '.join(f'{row[key]:.1f}' for key in contexts)} |",
            flush=True,
        )
    print(json.dumps({"bench": "far_positions", "rows": rows}))
    return 0 if all(row["equal"] == row["texts"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
