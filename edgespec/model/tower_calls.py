"""What a family asks its tower of a prompt's pictures, for each picture by itself, and all answers as one again.

So a picture that is known needs no tower whatever stands beside it, and what the tower says of one does not depend on
others. The inputs are told apart by their shapes: some have an item a picture, others as many items as the picture has
rows, times a number. Where the shapes leave a doubt, the tower is asked of all pictures of the prompt together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from edgespec.model.picture_prompt import PicturePrompt

POOLED, OF_LAYERS = "pooler_output", "deepstack_features"
KEPT_FIELDS = (POOLED, OF_LAYERS)  # of what a tower says: the rest is of its own layers

Digests = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerCall:
    """What a tower is asked."""

    key: Digests  # of the pictures that it is asked of
    arguments: Mapping[str, Any]
    num_rows: int  # of the prompt, that it fills


def num_pixels(call: TowerCall) -> int:
    """Return how many numbers the pictures of a call have."""
    return max((value.numel() for value in call.arguments.values() if isinstance(value, Tensor)), default=0)


def keys_of_calls(prompt: PicturePrompt, *, together: bool) -> list[Digests]:
    """Return the pictures of each call: one, or all of the prompt where they are asked of `together`."""
    if together or not prompt.pictures:
        return [tuple(digest for _, _, digest in prompt.image_rows)]
    return [(picture.digest,) for picture in prompt.pictures]


def calls_of(prompt: PicturePrompt, asked: Mapping[str, Any], *, together: bool) -> list[TowerCall]:
    """Return the calls that have the answers to what a family asks of a prompt's pictures, by its arguments' names."""
    keys = keys_of_calls(prompt, together=together)
    if len(keys) == 1:
        return [TowerCall(key=keys[0], arguments=asked, num_rows=prompt.num_image_tokens)]
    rows = [picture.num_rows for picture in prompt.pictures]
    parts = {name: _of_each(value, rows) for name, value in asked.items()}
    if any(part is None for part in parts.values()):
        return calls_of(prompt, asked, together=True)
    return [
        TowerCall(
            key=key, num_rows=count, arguments={name: part[number] for name, part in parts.items() if part is not None}
        )
        for number, (key, count) in enumerate(zip(keys, rows, strict=True))
    ]


def _of_each(value: Any, rows: Sequence[int]) -> list[Any] | None:
    """Return an argument's part of each picture, which have so many rows of a prompt; None where that is in doubt."""
    if not isinstance(value, Tensor):
        return None if isinstance(value, list | tuple) and any(map(torch.is_tensor, value)) else [value] * len(rows)
    axes = (0, 1) if value.dim() > 2 and value.shape[0] == 1 else (0,)
    for axis in axes:
        sizes = _sizes(value.shape[axis], rows)
        if sizes is not None:
            return list(value.split(sizes, axis))
    return None


def _sizes(total: int, rows: Sequence[int]) -> list[int] | None:
    if total == len(rows):
        return [1] * total
    parts = [total * count / sum(rows) for count in rows]
    return [int(part) for part in parts] if all(part >= 1 and part.is_integer() for part in parts) else None


def without_layers(said: Any) -> Any:
    """Return what a tower said, without what its own layers did."""
    if not isinstance(said, ModelOutput):
        return said
    return _output(
        type(said), {name: value for name in KEPT_FIELDS if (value := getattr(said, name, None)) is not None}
    )


def num_rows_of(said: Any) -> int:
    """Return the number of rows of a prompt that an answer fills; 0 where it is of no known form."""
    pooled = getattr(said, POOLED, None)
    tensors = [pooled] if isinstance(pooled, Tensor) else pooled if isinstance(pooled, list | tuple) else []
    return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)


def joined(said: Sequence[Any]) -> Any:
    """Return the answers of several calls, as one call for all their pictures has them."""
    if len(said) == 1:
        return said[0]
    fields = {POOLED: _joined_parts([getattr(one, POOLED) for one in said])}
    layers = [found for one in said if (found := getattr(one, OF_LAYERS, None)) is not None]
    if layers:
        fields[OF_LAYERS] = [_joined_parts(of_layer) for of_layer in zip(*layers, strict=True)]
    return _output(type(said[0]), fields)


def _joined_parts(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return type(parts[0])(tensor for part in parts for tensor in part)


def _output(kind: type[ModelOutput], fields: Mapping[str, Any]) -> ModelOutput:
    found = kind()
    for name, value in fields.items():
        setattr(found, name, value)  # some families have these beside the fields of their type
    return found


def bytes_of(said: Any) -> int:
    """Return the bytes of an answer."""
    if isinstance(said, Tensor):
        return said.nbytes
    parts = said.values() if isinstance(said, ModelOutput) else said if isinstance(said, list | tuple) else ()
    return sum(bytes_of(part) for part in parts)
