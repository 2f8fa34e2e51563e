"""The parts of packed weights as config.json states them, for a model whose files are not there."""

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.formats.bitsandbytes_4bit import FP4, NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.formats.fp4 import part_shapes
from offload.formats.known import FORMATS
from offload.formats.scaled import num_blocks
from offload.formats.stated import COMPRESSED, compressed_groups, format_stated
from offload.formats.storage import PartShapes, stored_shapes
from offload.formats.words import WORD_BITS, num_groups

# Where the methods list the modules that stay as they are
UNPACKED_FIELDS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules")


def planned_parts(parameter: str, shape: tuple[int, ...], stated: Mapping[str, Any]) -> PartShapes:
    """Return stored name -> (shape, dtype) of a weight's parts; none where config.json leaves it as it is.

    `shape` is [rows, columns], or [experts, rows, columns] of experts in one parameter. Raises CheckpointError where
    config.json does not say what the parts are.
    """
    try:
        return _parts(parameter, shape, stated)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, re.error) as error:
        raise _not_said(stated) from error  # a field that is missing, or of another kind than its method's


def _parts(parameter: str, shape: tuple[int, ...], stated: Mapping[str, Any]) -> PartShapes:
    module = parameter.removesuffix(".weight")
    method = stated.get("quant_method")
    if not stated or _stays_unpacked(module, stated):
        return {}
    *experts, rows, columns = shape
    if method == "bitsandbytes":
        return {} if experts else _bitsandbytes(parameter, shape, stated)
    if method == "mxfp4":  # gpt-oss' experts alone, which are computed with as [experts, columns, rows]
        rows, columns = columns, rows
        parts = {"_blocks": (rows, columns // 32, 16), "_scales": (rows, columns // 32)}
        return {parameter + end: ((*experts, *part), torch.uint8) for end, part in parts.items() if experts}
    if method == COMPRESSED:
        group = _group_of(module, stated)
        shapes = _compressed(rows, columns, group["weights"], group["format"], stated) if group else {}
    else:
        all_planned = (known.planned for known in FORMATS if method in known.methods and known.planned)
        found = next((found for planned in all_planned if (found := planned(rows, columns, stated))), None)
        if found is None:
            raise _not_said(stated)
        shapes = found
    return {
        parameter if leaf == "weight" else f"{module}.{leaf}": ((*experts, *part), dtype)
        for leaf, (part, dtype) in shapes.items()
    }


def _stays_unpacked(module: str, stated: Mapping[str, Any]) -> bool:
    """Return whether config.json names a module among those that are not packed, or one that it lies in."""
    named = [name for field in UNPACKED_FIELDS for name in stated.get(field) or ()]
    # GPTQModel excludes what these patterns find.
    named += [f"re:{name[2:]}" for name in stated.get("dynamic") or () if name.startswith("-:")]
    return any(_is_named(module, name) for name in named)


def _is_named(module: str, name: str) -> bool:
    """Return whether a pattern (re:...), or a part of a path with or without *, names a module."""
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return fnmatchcase(f".{module}.", f"*.{name}.*")


def _bitsandbytes(parameter: str, shape: tuple[int, ...], stated: Mapping[str, Any]) -> PartShapes:
    nested = bool(stated.get("bnb_4bit_use_double_quant"))
    four_bits = FP4 if stated.get("bnb_4bit_quant_type", "fp4") == "fp4" else NF4
    packer = INT8 if stated.get("load_in_8bit") else replace(four_bits, nested=nested)
    return stored_shapes(packer, parameter, shape)


def _group_of(module: str, stated: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return compressed-tensors' settings for a module, their format among them; its own come before all linear ones'.

    None of a module that no group names, or whose weights stay as they are.
    """
    groups = [{**group, "format": group.get("format") or stated.get("format")} for group in compressed_groups(stated)]
    own = (group for group in groups if any(_is_named(module, name) for name in group.get("targets") or ()))
    all_linear = (group for group in groups if "Linear" in (group.get("targets") or ()))
    found = next(own, None) or next(all_linear, None)
    return found if found and found.get("weights") and found["format"] != "dense" else None


def _compressed(
    rows: int, columns: int, weights: Mapping[str, Any], form: str, stated: Mapping[str, Any]
) -> PartShapes:
    bits, groups = weights.get("num_bits", 8), num_groups(columns, weights.get("group_size"))
    if form == "nvfp4-pack-quantized":
        parts = part_shapes(rows, columns, "weight_packed", torch.float8_e4m3fn)
        return {"weight_global_scale": ((1,), torch.float32), **parts}
    if form == "mxfp4-pack-quantized":
        return part_shapes(rows, columns, "weight_packed", torch.uint8)
    if form == "pack-quantized" and bits in {4, 8}:
        each = WORD_BITS // bits
        shapes: PartShapes = {
            "weight_packed": ((rows, -(-columns // each)), torch.int32),
            "weight_scale": ((rows, groups), torch.bfloat16),
        }
        if not weights.get("symmetric", True):
            shapes["weight_zero_point"] = ((-(-rows // each), groups), torch.int32)
        return shapes
    if bits != 8:
        raise _not_said(stated)
    if weights.get("type") == "int":
        return {"weight": ((rows, columns), torch.int8), "weight_scale": ((rows, 1), torch.bfloat16)}
    block = weights.get("block_structure")
    scale: tuple[int, ...] = {"tensor": (1,), "group": (rows, groups)}.get(weights["strategy"], (rows, 1))
    if block:
        scale = num_blocks(rows, columns, block)
    dtype = torch.uint8 if form == "mxfp8-quantized" else torch.float32
    return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": (scale, dtype)}


def _not_said(stated: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        "E_QUANTIZED",
        f"config.json states {format_stated(stated)} and does not say how large the packed weights are.",
        "Give the folder with its weights, or the original's config.json with `quant`.",
    )
