"""A suffix automaton: every sequence of tokens that a text has had, with how often, appended token by token.

A state stands for the sequences that end at the same places. Its transitions are the tokens that have followed these,
and its link leads to the longest shorter ending that stands in more places. Source: Blumer et al. 1985. Appending takes
amortised constant time and is plain Python, a few microseconds a token.
"""

from __future__ import annotations

from collections.abc import Iterable

BETWEEN_TEXTS = -1  # a token that stands between two texts, and is never proposed
BYTES_A_TOKEN = 550  # of memory: 455 of code, up to 512 of four tokens in any order
MAX_COUNTED = 64  # endings of a token whose counts are kept: in a text of one token alone there would be no bound


class SuffixAutomaton:
    """The sequences of the tokens so far; states are numbers, and 0 is the empty sequence."""

    __slots__ = ("counts", "last", "lengths", "links", "num_tokens", "transitions")

    def __init__(self) -> None:
        self.transitions: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]  # of each state's longest sequence
        self.counts = [0]  # of the places where its sequences end
        self.last = 0  # all tokens so far
        self.num_tokens = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token."""
        transitions, links, lengths, counts = self.transitions, self.links, self.lengths, self.counts
        state, whole = self.last, len(links)
        transitions.append({})
        lengths.append(lengths[state] + 1)
        counts.append(0)
        links.append(0)
        while state >= 0 and token not in transitions[state]:
            transitions[state][token] = whole
            state = links[state]
        if state >= 0:
            behind = transitions[state][token]
            if lengths[behind] != lengths[state] + 1:
                behind = self._split(behind, state, token)
            links[whole] = behind
        self.last = whole
        self.num_tokens += 1
        ending = whole
        for _ in range(MAX_COUNTED):
            counts[ending] += 1
            ending = links[ending]
            if ending <= 0:
                break

    def _split(self, behind: int, state: int, token: int) -> int:
        """Give the sequences of `behind` that are no longer than by `state` a state of their own."""
        transitions, links = self.transitions, self.links
        copy = len(links)
        transitions.append(transitions[behind].copy())
        self.lengths.append(self.lengths[state] + 1)
        self.counts.append(self.counts[behind])
        links.append(links[behind])
        links[behind] = copy
        while state >= 0 and transitions[state].get(token) == behind:
            transitions[state][token] = copy
            state = links[state]
        return copy

    def moved(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest known ending of the `length` tokens at a state and one more: its state and length."""
        transitions = self.transitions
        while token not in transitions[state]:
            if state == 0:
                return 0, 0
            state = self.links[state]
            length = self.lengths[state]
        return transitions[state][token], length + 1
