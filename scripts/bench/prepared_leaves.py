"""How often a pass's accepted path ends at a leaf that a draft could have gone on from while the pass was under way.

    python -m scripts.bench.prepared_leaves                     the built-in draft, and the target's own copy
    python -m scripts.bench.prepared_leaves --drafts built-in --sizes 64 --texts 8

Drafting during a pass pays where its accepted path ends at a leaf of the tree, that leaf is one of the few that were
gone on from (the likeliest by their scores), and the token that the target puts after it is what the draft put there.
Trees and paths are those of greedy texts; the draft's token after a path is read anew. Shares of all passes:
"at a leaf", "of the k likeliest", and "and guessed", which is the share of passes whose next tree has a beginning.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.model.pass_rows import PassRows
from edgespec.model.target import Target
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.tree.token_tree import TokenTree
from profiles.measure import machine_facts
from scripts.situations import PROMPT_TOKENS, SEED, cut_texts, held_out_halves

BUILT_IN = "built-in"
PREPARED = (1, 2, 4, 8)  # leaves


def record_trees() -> list[TokenTree]:
    """Return the list to which the trees of all passes are added from now on."""
    trees: list[TokenTree] = []
    rows_of = Target.tree_rows

    def recorded(self: Target, tree: TokenTree) -> PassRows:
        trees.append(tree)
        return rows_of(self, tree)

    Target.tree_rows = recorded  # type: ignore[method-assign]
    return trees


def guesses(engine: Engine, text: list[int], token: int) -> bool:
    """Whether the draft's likeliest token after a text is this one."""
    assert engine.draft_model is not None
    logits = engine.draft_model.read_text(engine.draft_model.new_text(), torch.tensor(text))
    return int(logits.argmax()) == token


def measure(engine: Engine, trees: list[TokenTree], prompts: list[str], new_tokens: int) -> dict[str, float]:
    """Decode the prompts greedily, and return the shares of their passes."""
    counts = dict.fromkeys(
        ["passes", "at a leaf", *(f"{name} {k}" for k in PREPARED for name in ("likeliest", "guessed"))], 0
    )
    for prompt in prompts:
        trees.clear()
        engine.forget()
        result = engine.generate(prompt, max_new_tokens=new_tokens, temperature=0.0)
        text = engine.encode(prompt)
        passes = list(result.passes)
        text += result.token_ids[: len(result.token_ids) - sum(len(step.tokens) for step in passes)]
        for tree, step in zip(trees[-len(passes) :], passes, strict=True):
            text += step.tokens
            if step.finish is not None or tree.num_nodes == 1 or tree.scores is None:
                continue
            counts["passes"] += 1
            inner = set(tree.parents.tolist())
            end = step.path[-1] if step.path else 0
            if end in inner:
                continue
            counts["at a leaf"] += 1
            leaves = [node for node in range(tree.num_nodes) if node not in inner]
            rank = sorted(leaves, key=lambda node: -float(tree.scores[node])).index(end)  # type: ignore[index]
            is_guessed = guesses(engine, text[:-1], text[-1])
            for k in PREPARED:
                counts[f"likeliest {k}"] += rank < k
                counts[f"guessed {k}"] += rank < k and is_guessed
    return {name: count if name == "passes" else count / max(1, counts["passes"]) for name, count in counts.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--drafts", nargs="+", default=[BUILT_IN, "self:nf4"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[24, 48], help="of the drafts' trees, each its own")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("-n", "--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    prompts = cut_texts(held_out_halves()[1], count=arguments.texts, tokens=PROMPT_TOKENS, seed=SEED)
    trees, rows = record_trees(), []
    print(
        f"{'draft':<10}{'nodes':>6}{'passes':>8}{'at a leaf':>11}"
        + "".join(f"{f'of {k}':>8}{'guessed':>9}" for k in PREPARED)
    )
    for name, depth in zip(arguments.drafts, arguments.depths, strict=False):
        pair = open_pair(arguments.target, DEMO_FOLDER / "draft" if name == BUILT_IN else Path(name))
        largest = TreeSettings(size=max(arguments.sizes), depth=depth, lookup=False)
        limits = MemoryLimits(max_resident_layers=0)
        with Engine.from_pair(pair, tree=largest, dtype="bfloat16", context_tokens=1024, limits=limits) as engine:
            for size in arguments.sizes:
                engine.use_tree(dataclasses.replace(largest, size=size))
                found = measure(engine, trees, prompts, arguments.new_tokens)
                rows.append({"draft": name, "nodes": size, **found})
                shares = "".join(f"{found[f'likeliest {k}']:>8.1%}{found[f'guessed {k}']:>9.1%}" for k in PREPARED)
                print(f"{name:<10}{size:>6}{found['passes']:>8}{found['at a leaf']:>11.1%}{shares}", flush=True)
    facts = dataclasses.asdict(machine_facts(torch.device("cpu")))
    print(
        json.dumps({"machine": facts, "arguments": {**vars(arguments), "target": str(arguments.target)}, "rows": rows})
    )


if __name__ == "__main__":
    main()
