"""Would what the target put high after a token before be a source of candidates, beside looked up text and a draft?

    python -m scripts.bench.adjacency                   the built-in pair, all kinds of `scripts.bench.lookup`

Every row that verification reads says what the target puts high after its token. Kept by token, these are candidates
wherever the token stands again: as many as leave room beside what the text itself has had, with the chance that their
rank has had so far. Prints tokens a pass without them and with them, alone and beside a draft that grows in every step.
All texts must be the same.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

import edgespec.decode.accept
import edgespec.decode.start
from edgespec import Engine, TreeSettings
from edgespec.draft.lookup import LookedUp, Place, TextLookup
from edgespec.pair.pair import open_pair
from edgespec.verify.rows import TargetRows
from scripts.bench.lookup import Found, drafts_always, measure

RANKS = 4  # tokens that are kept after each
PRIOR_HITS, PRIOR_TOKENS = 0.1, 1.0


class AdjacentLookup(TextLookup):
    """Looks up text, and what the target put high after a token."""

    def begin(self, ids: Sequence[int]) -> None:
        """Start a text."""
        super().begin(ids)
        self.last = ids[-1]
        self.after: dict[int, list[int]] = {}  # of each token
        self.hits, self.total = [PRIOR_HITS] * RANKS, [PRIOR_TOKENS] * RANKS

    def add(self, tokens: Iterable[int]) -> None:
        """Add committed tokens, and learn from them."""
        tokens = list(tokens)
        for token in tokens:
            for rank, other in enumerate(self.after.get(self.last, [])):
                self.hits[rank] += other == token
                self.total[rank] += 1
            self.last = token
        super().add(tokens)

    def candidates(self, most: int, *, depth: int, least: float) -> list[LookedUp]:
        """Return the likeliest continuations, as `TextLookup` does."""
        super().candidates(0, depth=0, least=1.0)  # reads the text's beginning
        found: list[LookedUp] = []
        heap: list[tuple[float, int, int, int, int, list[Place | None]]] = []
        numbers = itertools.count()
        chance, parent, layer, token = 1.0, -1, 0, self.last
        places: list[Place | None] = [source.place for source in self._sources]
        while True:
            children = self._children(places) if layer < depth else []
            left, known = 1 - sum(share for _, share, _ in children), {other for other, _, _ in children}
            for rank, other in enumerate(self.after.get(token, []) if layer < depth else []):
                if other not in known:
                    children.append((other, left * self.hits[rank] / self.total[rank], [None] * len(places)))
            for other, share, behind in children:
                if chance * share >= least:
                    heapq.heappush(heap, (-chance * share, next(numbers), parent, other, layer + 1, behind))
            if not heap or len(found) >= most:
                return found
            negative, _, above, token, layer, places = heapq.heappop(heap)
            chance, parent = -negative, len(found)
            found.append(LookedUp(above, token, chance, layer))


def keep_rows() -> None:
    """Let every verified row say what the target puts high after its token."""
    walk, know = edgespec.decode.accept._walk, TargetRows.know
    told: dict[int, tuple[list[int], Any]] = {}

    def with_tokens(sequence: Any, tree: Any, *arguments: Any, **options: Any) -> Any:
        found = walk(sequence, tree, *arguments, **options)
        told.clear()
        told[id(found.rows)] = tree.tokens.tolist(), sequence.lookup
        return found

    def keep(self: TargetRows, node: int, row: Tensor) -> None:
        know(self, node, row)
        tokens, choice = told[id(self)]
        if choice is not None and isinstance(choice.lookup, AdjacentLookup):
            choice.lookup.after[tokens[node]] = row.flatten().topk(RANKS).indices.tolist()

    edgespec.decode.accept._walk = with_tokens
    TargetRows.know = keep  # type: ignore[method-assign]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["code", "copy", "rows", "chat"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("-n", "--new-tokens", type=int, default=192, help="of the texts of a kind together")
    arguments = parser.parse_args()
    keep_rows()
    print(f"{'kind':6}{'nodes':>6} {'trees':8}{'without':>9}{'with':>7}")
    with Engine.from_pair(open_pair(None, None), tree=TreeSettings(size=64), context_tokens=1024) as engine:
        for kind, size in itertools.product(arguments.kinds, arguments.sizes):
            for name, tree in (("lookup", TreeSettings(policy="lookup", size=size)), ("both", TreeSettings(size=size))):
                found: list[Found] = []
                for lookup in (TextLookup, AdjacentLookup):
                    edgespec.decode.start.TextLookup = lookup  # type: ignore[misc]
                    with drafts_always(engine, tree):
                        found.append(measure(engine, kind, tree, new_tokens=arguments.new_tokens, temperature=0.0))
                assert found[0].texts == found[1].texts
                without, with_it = found
                gain = with_it.per_pass / without.per_pass - 1
                print(
                    f"{kind:6}{size:>6} {name:8}{without.per_pass:>9.2f}{with_it.per_pass:>7.2f}{gain:>+7.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
