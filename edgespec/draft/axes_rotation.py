"""Rotation by several axes in a published draft, whose target has them for rows of pictures.

Each column of a head rotates by the position of one axis; `mrope_section` says how many columns each axis has, one axis
after the other or in turns. Rows of words have one position on all axes. Legend: k rows, d numbers of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.draft.published import PublishedDraft
from edgespec.to_device import on_device

SECTIONS, IN_TURNS = "mrope_section", "mrope_interleaved"
FIELDS = ("rope_scaling", "rope_parameters")


def with_known_rotation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layer's fields, in which a rotation named after its axes has the name that transformers knows."""
    found = dict(fields)
    for name in FIELDS:
        stated = found.get(name)
        if isinstance(stated, Mapping) and stated.get("rope_type", stated.get("type")) == "mrope":
            others = {key: value for key, value in stated.items() if key != "type"}
            found[name] = {**others, "rope_type": "default"}
    return found


def has_axes(config: PretrainedConfig) -> bool:
    """Return whether a model rotates by several axes."""
    return SECTIONS in (getattr(config, "rope_parameters", None) or {})


def check_axes(config: PretrainedConfig, draft: PublishedDraft) -> None:
    """Raise EdgespecError where the columns of a layer's axes are not all that rotate."""
    if not has_axes(config):
        return
    sections, half = config.rope_parameters[SECTIONS], config.head_dim // 2
    is_list = isinstance(sections, list) and all(type(count) is int and count >= 0 for count in sections)
    if not is_list or sum(sections) != half:
        raise draft.wrong(f"states {SECTIONS} = {sections!r}, and the half of its heads' numbers is {half}")


def rotate_by_axes(decoder: Any) -> None:
    """Let a decoder's rotation take the positions of several axes, where its config states how."""
    if has_axes(decoder.config):
        module: nn.Module = decoder.rotary_emb
        module.forward = functools.partial(_by_axes, module.forward, _axis_of_columns(decoder.config.rope_parameters))


def _axis_of_columns(rotation: Mapping[str, Any]) -> list[int]:
    """Return the axis of each of the d / 2 columns that rotate with another."""
    sections = rotation[SECTIONS]
    if not rotation.get(IN_TURNS):
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    turns = [column % len(sections) for column in range(sum(sections))]
    return [axis if column < sections[axis] * len(sections) else 0 for column, axis in enumerate(turns)]


def _by_axes(
    forward: Callable[..., tuple[Tensor, Tensor]], axes: list[int], x: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [1, k, d] of positions [1, k], or [axes, 1, k]."""
    cosine, sine = forward(x, position_ids)
    if position_ids.dim() == 2:
        return cosine, sine
    which = on_device(axes * 2, cosine.device).expand(1, *cosine.shape[1:])
    return cosine.gather(0, which)[0], sine.gather(0, which)[0]
