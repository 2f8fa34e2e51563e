"""Text as a draft: what followed the end of a text before, in the text itself or in a corpus, may follow it again.

Source: prompt lookup decoding and SuffixDecoding (arXiv 2411.04975); the matches here are those of a suffix automaton
(`suffix_automaton.py`), with no limit to their length. A candidate's chance is learned while the text is written
(`lookup_acceptance.py`), from each token that it gains, whether anything was proposed or not.

Candidates know nothing of the target's choices in the pass that verifies them, so that they may be in every tree whose
rule follows the target's own token: greedy and coupled.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from edgespec.draft.lookup_acceptance import LookupAcceptance, cell_of
from edgespec.draft.suffix_automaton import BETWEEN_TEXTS, BYTES_A_TOKEN, SuffixAutomaton
from edgespec.tree.settings import MAX_LOOKED_UP_LAYERS

MOST_TOKENS = 1 << 16  # of a text's beginning that are searched: its last ones
MOST_CORPUS_TOKENS = 1 << 18
MAX_CHILDREN = 4
TOKEN_BYTES = 4
REPEATED_TOKENS = 2  # with which a text is said to repeat itself
LEAST_LEFT = 0.1  # chance that longer matches leave, with which shorter ones are looked at


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A token that may follow its parent, which stands before it."""

    parent: int  # by place among the candidates; -1 is the text's last token
    token: int
    chance: float  # that the text goes through it
    layer: int


Place: TypeAlias = tuple[int, int]  # a state of an automaton, and the number of tokens that match


class TokenBytes:
    """Tokens, among which some that follow each other are found faster than by an automaton is read."""

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._bytes = bytearray()
        self._waiting = list(ids)  # until something is asked for

    def add(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        self._waiting += tokens

    def end(self, count: int) -> bytes:
        """Return the last tokens."""
        self._take_waiting()
        return bytes(self._bytes[-count * TOKEN_BYTES :])

    def has(self, part: bytes, *, before_last: bool = False) -> bool:
        """Return whether these tokens stand there, with `before_last` so that another follows them."""
        self._take_waiting()
        end = len(self._bytes) - TOKEN_BYTES * before_last
        at = self._bytes.find(part, 0, end)
        while at > 0 and at % TOKEN_BYTES:
            at = self._bytes.find(part, at + 1, end)
        return at >= 0

    def _take_waiting(self) -> None:
        self._bytes += array("i", self._waiting).tobytes()
        self._waiting = []


class Corpus:
    """Texts that all texts of an engine may be continued by; tokens beyond `MOST_CORPUS_TOKENS` are left out."""

    def __init__(self, *, grows: bool = False) -> None:
        """Begin with no text. With `grows` the engine's own texts are added as they end."""
        self.automaton, self.ids, self.grows = SuffixAutomaton(), TokenBytes(), grows
        self.num_left_out = 0
        self.files_left_out: list[Path] = []  # of folders: data, and files too large to be text

    @property
    def num_tokens(self) -> int:
        """The number of tokens, an end of each text included."""
        return self.automaton.num_tokens

    def add(self, ids: Sequence[int]) -> None:
        """Add a text."""
        room = max(0, MOST_CORPUS_TOKENS - self.automaton.num_tokens)
        self.automaton.extend(ids[:room])
        self.automaton.append(BETWEEN_TEXTS)
        self.ids.add((*ids[:room], BETWEEN_TEXTS))
        self.num_left_out += max(0, len(ids) - room)


def lookup_bytes(all_tokens: int, *, num_texts: int, corpus_tokens: int = 0) -> int:
    """Return the memory of texts of so many tokens together, and of a corpus, as they are searched."""
    return BYTES_A_TOKEN * (min(all_tokens, num_texts * MOST_TOKENS) + min(corpus_tokens, MOST_CORPUS_TOKENS))


class _Source:
    """Where continuations are looked up, and where the text's end stands there."""

    def __init__(self, automaton: SuffixAutomaton, *, is_own: bool) -> None:
        self.automaton, self._is_own = automaton, is_own
        self.acceptance = LookupAcceptance()
        self.place: Place = (0, 0)

    def add(self, token: int) -> None:
        automaton = self.automaton
        if self._is_own:
            automaton.append(token)
            state = automaton.links[automaton.last]  # the longest ending that stood here before
            self.place = (state, automaton.lengths[state])
        else:
            self.place = automaton.moved(*self.place, token)

    def learn(self, token: int) -> None:
        """Learn from the token that follows the text's end whether its best candidates do."""
        state, match = self.place
        found = self.automaton.transitions[state]
        if match and found:
            counts = self.automaton.counts
            best, count, total = -1, 0, 0
            for other, behind in found.items():
                times = counts[behind]
                total += times
                if times >= count:
                    best, count = other, times
            self.acceptance.learn(cell_of(match, count, total), is_hit=best == token)

    def children(self, place: Place, least: float) -> list[tuple[int, float, Place]]:
        """Return the likeliest tokens at a place, their chances, and the places behind; some below `least` lack."""
        automaton, chance_of = self.automaton, self.acceptance.chance
        counts, (state, match) = automaton.counts, place
        found: list[tuple[int, float, Place]] = []
        left, least_left, seen = 1.0, max(LEAST_LEFT, least), set[int]()
        while match > 0 and left >= least_left and len(found) < MAX_CHILDREN:
            after = automaton.transitions[state]
            if len(after) == 1:
                ((token, behind),) = after.items()
                best = [(counts[behind], token, behind)]
                total = best[0][0]
            else:
                # Of equally frequent ones the last to come is first.
                entries = enumerate(after.items())
                ranked = sorted(((counts[behind], at, token, behind) for at, (token, behind) in entries), reverse=True)
                total = sum(entry[0] for entry in ranked)
                best = [(count, token, behind) for count, _, token, behind in ranked[:MAX_CHILDREN]]
            taken = 0.0
            for count, token, behind in best:
                if token in seen or token < 0:  # an end of a text, or a picture
                    continue
                seen.add(token)
                chance = left * chance_of(cell_of(match, count, total))
                chance = min(chance, left - taken)
                if chance > 0:
                    found.append((token, chance, (behind, match + 1)))
                    taken += chance
            left -= taken
            state = automaton.links[state]
            match = automaton.lengths[state] if state > 0 else 0
        return found[:MAX_CHILDREN]


class TextLookup:
    """The continuations of one text, which it has in itself and in a corpus."""

    def __init__(self, corpus: Corpus | None = None) -> None:
        self._corpus = corpus
        self._sources: list[_Source] = []
        self._waiting: list[int] = []  # of the text, until something is looked up
        self._ids = TokenBytes()

    def begin(self, ids: Sequence[int]) -> None:
        """Start a text, or start it again; nothing of an earlier one stays."""
        self._sources = []
        self._waiting = list(ids[-MOST_TOKENS:])
        self._ids = TokenBytes(self._waiting)

    def add(self, tokens: Sequence[int]) -> None:
        """Add committed tokens; the next look learns from them."""
        self._waiting += tokens
        self._ids.add(tokens)

    def repeats(self) -> bool:
        """Return whether the text's last tokens stood before, in it or in the corpus; that costs little to see."""
        end = self._ids.end(REPEATED_TOKENS)
        return self._ids.has(end, before_last=True) or (self._corpus is not None and self._corpus.ids.has(end))

    def candidates(self, most: int, *, depth: int, least: float) -> list[LookedUp]:
        """Return the likeliest continuations, parents before children, likeliest first.

        They are at most `most`, in at most `depth` layers, each with at least the chance `least`.
        """
        self._read_waiting()
        found: list[LookedUp] = []
        # Best first; the counter keeps entries of equal chance in their order.
        heap: list[tuple[float, int, int, int, int, list[Place | None]]] = []
        number = 0
        places: list[Place | None] = [source.place for source in self._sources]
        chance, parent, layer = 1.0, -1, 0
        depth = min(depth, MAX_LOOKED_UP_LAYERS)
        while True:
            if layer < depth:
                for token, share, behind in self._children(places, least / chance):
                    if chance * share >= least:
                        number += 1
                        heapq.heappush(heap, (-chance * share, number, parent, token, layer + 1, behind))
            if not heap or len(found) >= most:
                return found
            negative, _, above, token, layer, places = heapq.heappop(heap)
            chance, parent = -negative, len(found)
            found.append(LookedUp(parent=above, token=token, chance=chance, layer=layer))

    def _children(self, places: list[Place | None], least: float) -> list[tuple[int, float, list[Place | None]]]:
        """Return tokens that follow, each once, with the larger chance where several sources have it."""
        if len(places) == 1:
            (place,) = places
            return [] if place is None else [
                (token, chance, [behind]) for token, chance, behind in self._sources[0].children(place, least)
            ]  # fmt: skip
        merged: dict[int, tuple[float, list[Place | None]]] = {}
        for number, (source, place) in enumerate(zip(self._sources, places, strict=True)):
            for token, chance, behind in () if place is None else source.children(place, 0.0):  # shares count all
                known, behinds = merged.get(token, (0.0, [None] * len(places)))
                behinds[number] = behind
                merged[token] = (max(known, chance), behinds)
        over = max(1.0, sum(chance for chance, _ in merged.values()))
        return [(token, chance / over, behinds) for token, (chance, behinds) in merged.items()]

    def _read_waiting(self) -> None:
        is_first = not self._sources
        if is_first:
            self._sources = [_Source(SuffixAutomaton(), is_own=True)]
            if self._corpus is not None:
                self._sources.append(_Source(self._corpus.automaton, is_own=False))
        for token in self._waiting:
            for source in self._sources:
                if not is_first:
                    source.learn(token)
                source.add(token)
        self._waiting = []
