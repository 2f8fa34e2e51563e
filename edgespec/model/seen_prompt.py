"""A prompt with pictures as a family's own code hands it to its decoder, and the keys by which its rows are kept.

Rows of a picture have one token id, whatever it shows. Where rows are kept and compared, a number stands in its place
that is made of the picture's digest and of the row's place in it: negative, so that it is no token. Legend: n rows of
the prompt, h the hidden size.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seen_rows import NO_BLOCK, SeenRows, end_of_block, is_within_block

DIGEST_BITS = 62  # of a key: with the place it stays a number of 64 bits


def keys_of(prompt: PicturePrompt) -> list[int]:
    """Return the prompt's ids, in whose place keys of its pictures stand."""
    keys = list(prompt.ids)
    places: Counter[str] = Counter()  # the rows that each picture has had so far
    for first, end, digest in _joined_runs(prompt.image_rows):
        number = int.from_bytes(hashlib.sha256(digest.encode()).digest()[:8], "big") >> (64 - DIGEST_BITS)
        for row in range(first, end):
            keys[row] = -1 - (number + places[digest]) % (1 << DIGEST_BITS)
            places[digest] += 1
    return keys


def _joined_runs(runs: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return runs of which no two touch: rows of pictures side by side may see each other, and are known together."""
    found: list[tuple[int, int, str]] = []
    for first, end, digest in runs:
        if found and found[-1][1] == first:
            before = found.pop()
            found.append((before[0], end, f"{before[2]} {digest}"))
        else:
            found.append((first, end, digest))
    return found


def without_pictures(ids: Sequence[int], runs: Sequence[tuple[int, int, str]]) -> list[list[int]]:
    """Return the words of a text before, between and after its pictures."""
    edges = [0, *(edge for first, end, _ in runs for edge in (first, end)), len(ids)]
    return [list(ids[first:end]) for first, end in list(pairwise(edges))[::2]]


def words_of(prompt: PicturePrompt) -> list[int]:
    """Return the ids of a prompt that are no rows of pictures."""
    return [token for part in without_pictures(prompt.ids, prompt.image_rows) for token in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPrompt:
    """What a decoder gets of a prompt with pictures."""

    keys: list[int]  # [n] by which its rows are kept
    ids: list[int]  # [n] true ones
    runs: list[tuple[int, int, str]]  # of placeholders, [first, end)
    embedded: Tensor | None  # [n, h]; None: a head of another width embeds them
    rotated: Tensor | None = None  # [axes, n] positions; None: those of the rows
    shift: int = 0  # of the positions of all rows behind the prompt
    deepstacked: Tensor | None = None  # [n] bool
    deepstack: tuple[Tensor, ...] = ()  # [k, h] of each of the first layers, for these k rows
    per_layer: Tensor | None = None  # [n, layers, d]
    are_words: Tensor | None = None  # [n] bool, rows that a head embeds by its own table
    blocks: Tensor | None = None  # [n] on the host
    blocks_only_in_windows: bool = False
    _blocks_on_host: list[int] = field(init=False, default_factory=list)  # the same blocks

    def __post_init__(self) -> None:
        if self.blocks is not None:
            self._blocks_on_host.extend(self.blocks.tolist())

    @property
    def num_rows(self) -> int:
        """The number of the prompt's rows."""
        return len(self.ids)

    def keyed(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text that begins with this prompt, with the keys of its pictures."""
        return [*self.keys[: len(ids)], *ids[self.num_rows :]]

    def true_ids(self, keys: Sequence[int], first: int) -> list[int]:
        """Return the true ids of keys that are the text's from row `first` on."""
        known = self.ids[first : first + len(keys)]
        return [*known, *keys[len(known) :]]

    def words(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text that begins with this prompt, without the rows of pictures."""
        return [token for part in without_pictures(ids, self.runs) for token in part]

    def words_apart(self, ids: Sequence[int]) -> list[int]:
        """Return the same ids with a number in the place of each picture that is no token, and another each time."""
        first, *others = without_pictures(ids, self.runs)
        behind = [[-1 - number, *part] for number, part in enumerate(others)]
        return [*first, *(token for part in behind for token in part)]

    def of_head(self, width: int, *, has_axes: bool) -> SeenPrompt:
        """Return what a draft gets of it that reads the target's states; it may rotate by several axes.

        Rows of pictures are the target's, where the draft is as wide; words are the draft's own.
        """
        assert self.embedded is not None
        are_words = torch.ones(self.num_rows, dtype=torch.bool, device=self.embedded.device)
        for first, end, _ in self.runs:
            are_words[first:end] = False
        return replace(
            self, embedded=self.embedded if self.embedded.shape[1] == width else None, are_words=are_words,
            rotated=self.rotated if has_axes else None, deepstacked=None, deepstack=(), per_layer=None, blocks=None,
        )  # fmt: skip

    def is_within_block(self, row: int) -> bool:
        """Return whether a cut before this row parts rows that see each other."""
        return is_within_block(self._blocks_on_host, row)

    def start_of_block(self, row: int) -> int:
        """Return the last place up to this row where rows may be cut."""
        while self.is_within_block(row):
            row -= 1
        return row

    def end_of_block(self, row: int) -> int:
        """Return the first place from this row on where rows may be cut."""
        return end_of_block(self._blocks_on_host, row)

    def rows(self, positions: Tensor, *, first: int) -> SeenRows | None:
        """Return what the text's rows at these positions [n], from `first` on, carry; None where nothing."""
        end = min(first + positions.shape[0], self.num_rows)
        if end <= first:
            return self.rows_behind(positions)
        deepstacked, deepstack = None, self.deepstack
        if self.deepstacked is not None:
            deepstacked = self.deepstacked[first:end]
            before = int(self.deepstacked[:first].sum())
            deepstack = tuple(layer[before : before + int(deepstacked.sum())] for layer in deepstack)
        rotated = blocks = None
        if self.rotated is not None:
            behind = (positions[end - first :] + self.shift).expand(self.rotated.shape[0], -1)
            rotated = torch.cat([self.rotated[:, first:end], behind], 1)
        if self.blocks is not None and any(number != NO_BLOCK for number in self._blocks_on_host[first:end]):
            num_behind = positions.shape[0] - (end - first)
            blocks = torch.cat([self.blocks[first:end], self.blocks.new_full((num_behind,), NO_BLOCK)])
        return SeenRows(
            embedded=None if self.embedded is None else self.embedded[first:end],
            are_words=None if self.are_words is None else self.are_words[first:end],
            rotated=rotated,
            deepstacked=deepstacked,
            deepstack=deepstack,
            per_layer=None if self.per_layer is None else self.per_layer[first:end],
            blocks=blocks,
            blocks_only_in_windows=self.blocks_only_in_windows,
        )

    def rows_behind(self, positions: Tensor) -> SeenRows | None:
        """Return what rows behind the prompt at these positions [n] carry, a tree's among them; None where nothing."""
        if self.rotated is None:
            return None
        return SeenRows(rotated=(positions + self.shift).expand(self.rotated.shape[0], -1))
