"""Rotations whose frequencies depend on how long a text is: dynamic scaling, and two sets of factors (longrope).

transformers takes the longest position of a pass, and of the passes before it. So the rows of a tree would depend on
its depth, and those of a text on others. Here each row has the frequencies that plain decoding by transformers gives
it: rows of a prompt, which is read whole, those of the prompt's length, and each later row those of its own position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.pass_rows import PassRows

DEPENDENT = {"dynamic", "longrope"}
# Their own generate reads a text anew, whole, where it outgrows the first set of factors.
READ_ANEW = {"phi3", "phimoe", "phi4_multimodal"}


def rotations_of(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the settings of a model's rotations whose frequencies depend on the length."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [scaling, *(kind for kind in scaling.values() if isinstance(kind, dict))]
    return [kind for kind in kinds if kind.get("rope_type", kind.get("type")) in DEPENDENT]


class LengthRotation:
    """Lets a decoder's rotations go by the length of each row's own text, while a pass of ours runs."""

    def __init__(self, decoder: nn.Module, config: PretrainedConfig) -> None:
        kinds = rotations_of(config)
        limits = [_unscaled(kind, config) for kind in kinds]
        self._least = min(limits, default=0)  # up to which all lengths rotate alike
        has_two_sets = all(kind.get("rope_type") == "longrope" for kind in kinds)
        self._most = max(limits, default=-1) + 1 if has_two_sets else None  # from which on all do: 0 without any
        self._reads_anew = bool(kinds) and has_two_sets and config.model_type in READ_ANEW
        self._lengths: Tensor | None = None  # [n], of the rows of the pass under way
        self._modules = [part for part in decoder.modules() if kinds and hasattr(part, "rope_type")]
        for module in self._modules:
            module.forward = functools.partial(self._forward, module.forward)

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)

    def length(self, num_tokens: int) -> int:
        """Return the shortest length that rotates as so many tokens do, and all between."""
        most = num_tokens if self._most is None else min(num_tokens, self._most)
        return max(most, self._least)

    def outgrows(self, prompt_tokens: int, num_tokens: int) -> bool:
        """Return whether a text that was read with so many tokens must be read anew, now that it has more."""
        return self._reads_anew and self.length(prompt_tokens) != self.length(num_tokens)

    def room_before(self, prompt_tokens: int, num_tokens: int) -> int | None:
        """Return how many tokens more a text may have before it must be read anew; None where it never must."""
        is_ahead = self._reads_anew and self.length(max(prompt_tokens, num_tokens)) == self._least
        return self._least - num_tokens if is_ahead else None

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
            forward(x, first, *arguments, **named)  # it forgets the longest so far
            positions = torch.cat([position_ids[..., rows[-1]], first + length - 1], -1)
            found.append(forward(x, positions, *arguments, **named))
        order = torch.cat(rows).argsort()
        if isinstance(found[0], Tensor):
            return _joined(found, order)
        return tuple(_joined(parts, order) for parts in zip(*found, strict=True))


def _unscaled(kind: dict[str, Any], config: PretrainedConfig) -> int:
    """Return the length up to which nothing is scaled."""
    original = kind.get("original_max_position_embeddings") if kind.get("rope_type") == "longrope" else None
    return int(original or config.max_position_embeddings)


def _joined(parts: Sequence[Tensor], order: Tensor) -> Tensor:
    """Return rows [.., n, d] of several groups in their order, without each group's last."""
    return torch.cat([part[..., :-1, :] for part in parts], -2).index_select(-2, order)
