"""Trees that a draft grows while the target's weights stream: tokens a second with and without them.

    python -m scripts.bench.prepared_trees                              the built-in target over a link of 0.5 GiB/s
    python -m scripts.bench.prepared_trees large --drafts self:nf4      an inflated checkpoint

While a pass waits for weights, copies of the draft's text go on from the likeliest leaves of the tree that is being
verified: each reads the path, takes the draft's own next token for the next root, and grows a tree below it. Where
verification ends at such a leaf with that token, the tree is there, and the step's growth takes no time. "ready" is the
share of passes after which that was so. Greedy; what is looked up is left out; repeats take both modes in turn, and
their texts must be equal. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.decode import accept, batch
from edgespec.decode.sequence import AcceptedPath
from edgespec.decode.sequence import Sequence as Text
from edgespec.draft.language_model import LanguageModelDrafter, expand_batched
from edgespec.errors import EdgespecError
from edgespec.grow.batched import grow_batched
from edgespec.grow.beam import Beam
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.tree.token_tree import TokenTree
from profiles.measure import machine_facts
from scripts.bench.lookup import Found
from scripts.bench.self_draft import BUILT_IN, measure
from scripts.situations import GIB, PROMPT_TOKENS, SEED, cut_texts, held_out_halves, throttle_edgespec

Outcome = tuple[tuple[int, ...], int]  # the nodes of a path, and the token after it


class PreparedTrees:
    """The trees that grow during one pass, in a thread of their own."""

    def __init__(self, text: Text, tree: TokenTree, *, leaves: int) -> None:
        self._text, self._paths = text, likeliest_paths(tree, leaves)
        self._tokens = tree.tokens.tolist()
        self.found: dict[Outcome, tuple[LanguageModelDrafter, TokenTree]] = {}
        self._is_over = False  # so that growth of what did not come to pass ends
        self._thread = threading.Thread(target=self._grow)
        self._thread.start()

    def take(self, outcome: Outcome) -> tuple[LanguageModelDrafter, TokenTree] | None:
        """Return the tree of what came to pass, and its draft, if it is one of those that grew."""
        self._is_over = outcome[0] not in self._paths
        self._thread.join()
        return self.found.get(outcome)

    @torch.no_grad()
    def _grow(self) -> None:
        text = self._text
        assert isinstance(text.drafter, LanguageModelDrafter)
        drafts = [self._copied(text.drafter, path) for path in self._paths]
        ends = [torch.tensor([self._tokens[path[-1]]]) for path in self._paths]
        no_row = torch.tensor([-1])
        read = expand_batched([(draft, end, no_row) for draft, end in zip(drafts, ends, strict=True)])
        guesses = []
        for draft, end, q in zip(drafts, ends, read, strict=True):
            assert isinstance(q, torch.Tensor)
            guesses.append(int(q[0].argmax()))
            draft.commit(int(end), [], [])
        growths = [
            dataclasses.replace(beam, root=guess, depth=max(0, min(beam.depth, text.num_left - len(path) - 2)))
            for guess, path in zip(guesses, self._paths, strict=True)
            if isinstance(beam := text.grow(guess, text.max_depth(text.num_left - 1)), Beam)
        ]
        trees = grow_batched(list(zip(growths, drafts, strict=True)), self._expand)
        for path, guess, draft, tree in zip(self._paths, guesses, drafts, trees, strict=True):
            if isinstance(tree, TokenTree):
                self.found[path, guess] = draft, tree

    def _expand(self, expansions: Sequence[Any]) -> Sequence[Any]:
        if self._is_over:
            return [EdgespecError("E_ENGINE", "is not needed any more.", "")] * len(expansions)
        return expand_batched(expansions)

    def _copied(self, draft: LanguageModelDrafter, path: tuple[int, ...]) -> LanguageModelDrafter:
        """A draft of the same text, which goes on to the end of a path without its last token."""
        count = len(draft.cache.ids)
        other = LanguageModelDrafter(
            draft.model, vocab=draft._vocab, sampling=draft.sampling, cache=draft.cache.copy(count)
        )
        other._pending = [*draft._pending, self._text.root, *(self._tokens[node] for node in path[:-1])]
        return other


def likeliest_paths(tree: TokenTree, count: int) -> list[tuple[int, ...]]:
    """The paths to the leaves of largest score."""
    assert tree.scores is not None
    parents, scores = tree.parents.tolist(), tree.scores.tolist()
    leaves = sorted(set(range(1, len(parents))) - set(parents), key=lambda node: -scores[node])[:count]
    paths = []
    for leaf in leaves:
        path = [leaf]
        while parents[path[-1]] > 0:
            path.append(parents[path[-1]])
        paths.append(tuple(reversed(path)))
    return paths


@dataclasses.dataclass
class Counts:
    """How many passes there were with a tree, and after how many the next one was there."""

    passes: int = 0
    ready: int = 0


@contextmanager
def prepared(leaves: int) -> Iterator[Counts]:
    """Within this block drafts grow trees during passes."""
    counts, under_way, ready = Counts(), list[PreparedTrees](), list[TokenTree]()
    read, commit, grow = batch._read, accept._commit, batch.Batch._grow

    def read_beside(trees: Any, prompts: Any) -> Any:
        if len(trees) == 1 and not prompts and trees[0][1].num_nodes > 1 and trees[0][0].num_left > 2:
            under_way.append(PreparedTrees(*trees[0], leaves=leaves))
            counts.passes += 1
        return read(trees, prompts)

    def commit_prepared(text: Text, tree: TokenTree, path: AcceptedPath) -> None:
        found = under_way.pop().take((path.path, path.tokens[-1])) if under_way else None
        if found is None:
            commit(text, tree, path)
            return
        counts.ready += 1
        draft, grown = found
        text.target.commit(path.path)
        assert isinstance(text.drafter, LanguageModelDrafter)
        text.drafter.cache.__dict__.update(draft.cache.__dict__)
        for name in ("_pending", "_num_behind", "_num_rows", "_hidden", "_visible", "_positions"):
            setattr(text.drafter, name, getattr(draft, name))
        text.add(path.tokens)
        ready.append(grown)

    def grow_others(self: batch.Batch) -> list[tuple[Text, TokenTree]]:
        return [(self._running[0], ready.pop())] if ready and self._running else grow(self)

    batch._read, accept._commit, batch.Batch._grow = read_beside, commit_prepared, grow_others  # type: ignore
    try:
        yield counts
    finally:
        batch._read, accept._commit, batch.Batch._grow = read, commit, grow  # type: ignore[method-assign]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("--drafts", nargs="+", default=[BUILT_IN, "self:nf4"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--depths", type=int, nargs="+", default=[24, 48], help="of the drafts' trees, each its own")
    parser.add_argument("--leaves", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("-n", "--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--link-gib-per-s", type=float, default=0.5)
    arguments = parser.parse_args()
    throttle_edgespec(arguments.link_gib_per_s * GIB)
    prompts = cut_texts(held_out_halves()[1], count=arguments.texts, tokens=PROMPT_TOKENS, seed=SEED)
    rows = []
    print(f"{'draft':<10}{'nodes':>6}{'leaves':>8}{'ready':>8}{'tok/pass':>16}{'tok/s':>16}{'ratio':>8}")
    for name, depth in zip(arguments.drafts, arguments.depths, strict=False):
        pair = open_pair(arguments.target, DEMO_FOLDER / "draft" if name == BUILT_IN else Path(name))
        largest = TreeSettings(size=max(arguments.sizes), depth=depth, lookup=False)
        limits = MemoryLimits(max_resident_layers=0)
        with Engine.from_pair(pair, tree=largest, dtype="bfloat16", context_tokens=1024, limits=limits) as engine:
            for size in arguments.sizes:
                tree = dataclasses.replace(largest, size=size)
                options: Any = {"new_tokens": arguments.new_tokens, "temp": 0.0}
                without: list[Found] = []
                beside: dict[int, list[Found]] = {leaves: [] for leaves in arguments.leaves}
                ready = dict.fromkeys(arguments.leaves, 0.0)
                for _ in range(arguments.repeats):
                    without.append(measure(engine, tree, prompts, **options))
                    for leaves, found in beside.items():
                        with prepared(leaves) as counts:
                            found.append(measure(engine, tree, prompts, **options))
                        ready[leaves] = counts.ready / counts.passes
                        if found[-1].texts != without[-1].texts:
                            print(f"{name}, {size} nodes, {leaves} leaves: another text than without")
                for leaves, found in beside.items():
                    pairs = list(zip(without, found, strict=True))
                    tokens = [statistics.median(one.per_pass for one in every) for every in zip(*pairs, strict=True)]
                    speeds = [statistics.median(one.per_s for one in every) for every in zip(*pairs, strict=True)]
                    ratio = statistics.median(new.per_s / old.per_s for old, new in pairs)
                    rows.append({
                        "draft": name, "nodes": size, "leaves": leaves, "ready": ready[leaves],
                        "tokens_per_pass": tokens, "tokens_per_s": speeds, "ratio": ratio,
                    })  # fmt: skip
                    shown = "".join(f"{f'{old:.2f}, {new:.2f}':>16}" for old, new in (tokens, speeds))
                    print(f"{name:<10}{size:>6}{leaves:>8}{ready[leaves]:>8.1%}{shown}{ratio:>8.2f}", flush=True)
    facts = dataclasses.asdict(machine_facts(torch.device("cpu")))
    print(
        json.dumps({"machine": facts, "arguments": {**vars(arguments), "target": str(arguments.target)}, "rows": rows})
    )


if __name__ == "__main__":
    main()
