"""Rotations whose frequencies depend on the length of a text: dynamic scaling, and two sets of factors (longrope).

transformers takes the longest position of a pass and of earlier passes. So the rows of a tree would depend on its
depth, and those of a text on other texts. Here each row gets its frequencies in plain decoding by transformers: rows of
a prompt, which is read whole, those of the prompt's length, and each later row those of its own position.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.pass_rows import PassRows

DEPENDENT = {"dynamic", "longrope"}
# Families whose generate reads the whole text again when it outgrows the first set of factors
READ_ANEW = {"phi3", "phimoe", "phi4_multimodal"}


def rotations_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the settings of a model's rotations whose frequencies depend on the length."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [scaling, *(kind for kind in scaling.values() if isinstance(kind, dict))]
    return [kind for kind in kinds if kind.get("rope_type", kind.get("type")) in DEPENDENT]


class LengthRotation:
    """Makes a decoder's rotations follow the length of each row's own text while a pass of ours runs."""

    def __init__(self, decoder: nn.Module, config: PretrainedConfig) -> None:
        kinds = rotations_of(config)
        limits = [_unscaled(kind, config) for kind in kinds]
        self._least = min(limits, default=0)  # all lengths up to this one rotate alike
        has_two_sets = all(kind.get("rope_type") == "longrope" for kind in kinds)
        # All lengths from this one on rotate alike, too; 0 without such rotations.
        self._most = max(limits, default=-1) + 1 if has_two_sets else None
        self._reads_anew = bool(kinds) and has_two_sets and config.model_type in READ_ANEW
        self._lengths: Tensor | None = None  # [n], of the rows of the running pass
        self._modules = [part for part in decoder.modules() if kinds and hasattr(part, "rope_type")]
        for module in self._modules:
            module.forward = functools.partial(self._forward, module.forward)

    def close(self) -> None:
        """Restore the modules' own forward."""
        for module in self._modules:
            module.__dict__.pop("forward", None)

    def length(self, num_tokens: int) -> int:
        """Return the shortest length that rotates like `num_tokens` and all lengths between."""
        most = num_tokens if self._most is None else min(num_tokens, self._most)
        return max(most, self._least)

    def outgrows(self, prompt_tokens: int, num_tokens: int) -> bool:
        """Return whether a text that was read with `prompt_tokens` must be read again with `num_tokens`."""
        return self._reads_anew and self.length(prompt_tokens) != self.length(num_tokens)

    def tokens_before(self, prompt_tokens: int, num_tokens: int) -> int | None:
        """Return the number of tokens that a text may gain before it must be read again; None for any number."""
        is_ahead = self._reads_anew and self.length(max(prompt_tokens, num_tokens)) == self._least
        return self._least - num_tokens if is_ahead else None

    @property
    def two_lengths(self) -> tuple[int, int] | None:
        """The greatest length that one set of factors is for, and the least of the other; None without two sets."""
        has_two = bool(self._modules) and self._most == self._least + 1
        return (self._least, self._least + 1) if has_two else None

    @contextmanager
    def of_length(self, length: int, num_rows: int) -> Iterator[None]:
        """Within this block so many rows rotate by a length."""
        self._lengths = torch.full((num_rows,), length)
        try:
            yield
        finally:
            self._lengths = None

    def are_long(self, part: PassRows) -> Tensor:
        """Return whether a text's rows [n] rotate by the second set of factors."""
        return (part.row_positions + 1).clamp(min=part.cache.prompt_tokens) > self._least

    @contextmanager
    def of_rows(self, parts: Sequence[PassRows]) -> Iterator[None]:
        """Within this block the rows of a pass rotate by their texts' lengths."""
        if self._modules:
            ends = [(part.row_positions + 1).clamp(min=part.cache.prompt_tokens) for part in parts]
            self._lengths = torch.cat(ends).clamp(self._least, self._most)
        try:
            yield
        finally:
            self._lengths = None

    def _forward(
        self, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *arguments: Any, **named: Any
    ) -> Any:
        if self._lengths is None:
            return forward(x, position_ids, *arguments, **named)
        found, rows = [], []
        for length in self._lengths.unique().tolist():  # two, as a rule, or the layers of a tree
            rows.append((self._lengths == length).nonzero()[:, 0])
            first = torch.zeros_like(position_ids[..., :1])
            forward(x, first, *arguments, **named)  # this resets the longest length so far
            positions = torch.cat([position_ids[..., rows[-1]], first + length - 1], -1)
            found.append(forward(x, positions, *arguments, **named))
        order = torch.cat(rows).argsort()
        if isinstance(found[0], Tensor):
            return _joined(found, order)
        return tuple(_joined(parts, order) for parts in zip(*found, strict=True))


def _unscaled(kind: dict[str, Any], config: PretrainedConfig) -> int:
    """Return the greatest length that is not scaled."""
    original = kind.get("original_max_position_embeddings") if kind.get("rope_type") == "longrope" else None
    return int(original or config.max_position_embeddings)


def _joined(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Return rows [.., n, d] of several groups in this order, without the last row of each group."""
    return torch.cat([part[..., :-1, :] for part in parts], -2).index_select(-2, order)
