"""The parts of packed weights as config.json states them, for a model whose files are not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.formats.bitsandbytes_4bit import FP4, NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.formats.packed_format import Layouts, Packer, stored_layout
from offload.formats.stated import COMPRESSED, compressed_groups, format_stated

WORD_BITS = 32
# Where the methods list the modules that stay as they are
PLAIN_FIELDS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules")


def planned_parts(parameter: str, shape: tuple[int, ...], stated: Mapping[str, Any]) -> Layouts:
    """Return stored name -> (shape, dtype) of a weight's parts; none where config.json leaves it as it is.

    `shape` is [rows, columns], or [experts, rows, columns] of experts in one parameter. Raises CheckpointError where
    config.json does not say what the parts are.
    """
    try:
        return _parts(parameter, shape, stated)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, re.error) as error:
        raise _not_said(stated) from error  # a field that is missing, or of another form than its method's


def _parts(parameter: str, shape: tuple[int, ...], stated: Mapping[str, Any]) -> Layouts:
    module = parameter.removesuffix(".weight")
    method = stated.get("quant_method")
    if not stated or _stays_plain(module, stated):
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
        layout = _compressed(rows, columns, group["weights"], group["format"], stated) if group else {}
    else:
        layout = LAYOUTS[str(method)](rows, columns, stated)
    return {
        parameter if leaf == "weight" else f"{module}.{leaf}": ((*experts, *part), dtype)
        for leaf, (part, dtype) in layout.items()
    }


def _stays_plain(module: str, stated: Mapping[str, Any]) -> bool:
    """Return whether config.json names a module among those that are not packed, or one that it lies in."""
    named = [name for field in PLAIN_FIELDS for name in stated.get(field) or ()]
    # GPTQModel excludes what these patterns find.
    named += [f"re:{name[2:]}" for name in stated.get("dynamic") or () if name.startswith("-:")]
    return any(_is_named(module, name) for name in named)


def _is_named(module: str, name: str) -> bool:
    """Return whether a pattern (re:...), or a part of a path with or without *, names a module."""
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return fnmatchcase(f".{module}.", f"*.{name}.*")


def _bitsandbytes(parameter: str, shape: tuple[int, ...], stated: Mapping[str, Any]) -> Layouts:
    nested = bool(stated.get("bnb_4bit_use_double_quant"))
    four_bits = FP4 if stated.get("bnb_4bit_quant_type", "fp4") == "fp4" else NF4
    packer: Packer = INT8 if stated.get("load_in_8bit") else replace(four_bits, nested=nested)
    return stored_layout(packer, parameter, shape)


def _fp8(rows: int, columns: int, stated: Mapping[str, Any]) -> Layouts:
    block = stated.get("weight_block_size")
    scale = _num_blocks(rows, columns, block) if block else ()
    return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale_inv": (scale, torch.float32)}


def _fbgemm_fp8(rows: int, columns: int, stated: Mapping[str, Any]) -> Layouts:
    return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": ((rows, 1), torch.float32)}


def _modelopt(rows: int, columns: int, stated: Mapping[str, Any]) -> Layouts:
    if stated.get("quant_algo") == "NVFP4":
        return {"weight_scale_2": ((), torch.float32), **_fp4(rows, columns, "weight", torch.float8_e4m3fn)}
    if stated.get("quant_algo") == "FP8":
        return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": ((), torch.float32)}
    raise _not_said(stated)


def _gptq(rows: int, columns: int, stated: Mapping[str, Any]) -> Layouts:
    each, groups = WORD_BITS // stated.get("bits", 4), _num_groups(columns, stated.get("group_size"))
    layout: Layouts = {
        "qweight": ((columns // each, rows), torch.int32),
        "qzeros": ((groups, rows // each), torch.int32),
        "scales": ((groups, rows), torch.float16),
    }
    return {**layout, "g_idx": ((columns,), torch.int32)} if stated.get("desc_act") else layout


def _awq(rows: int, columns: int, stated: Mapping[str, Any]) -> Layouts:
    as_gptq = _gptq(rows, columns, {"group_size": stated.get("group_size")})
    return {**as_gptq, "qweight": ((columns, rows // 8), torch.int32)}


LAYOUTS: dict[str, Callable[[int, int, Mapping[str, Any]], Layouts]] = {
    "fp8": _fp8, "fbgemm_fp8": _fbgemm_fp8, "modelopt": _modelopt, "gptq": _gptq, "awq": _awq,
}  # fmt: skip


def _group_of(module: str, stated: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return compressed-tensors' settings for a module, their format among them; its own come before all linear ones'.

    None of a module that no group names, or whose weights stay as they are.
    """
    groups = [{**group, "format": group.get("format") or stated.get("format")} for group in compressed_groups(stated)]
    own = (group for group in groups if any(_is_named(module, name) for name in group.get("targets") or ()))
    all_linear = (group for group in groups if "Linear" in (group.get("targets") or ()))
    found = next(own, None) or next(all_linear, None)
    return found if found and found.get("weights") and found["format"] != "dense" else None


def _compressed(rows: int, columns: int, weights: Mapping[str, Any], form: str, stated: Mapping[str, Any]) -> Layouts:
    bits, groups = weights.get("num_bits", 8), _num_groups(columns, weights.get("group_size"))
    if form == "nvfp4-pack-quantized":
        parts = _fp4(rows, columns, "weight_packed", torch.float8_e4m3fn)
        return {"weight_global_scale": ((1,), torch.float32), **parts}
    if form == "mxfp4-pack-quantized":
        return _fp4(rows, columns, "weight_packed", torch.uint8)
    if form == "pack-quantized" and bits in {4, 8}:
        each = WORD_BITS // bits
        layout: Layouts = {
            "weight_packed": ((rows, -(-columns // each)), torch.int32),
            "weight_scale": ((rows, groups), torch.bfloat16),
        }
        if not weights.get("symmetric", True):
            layout["weight_zero_point"] = ((-(-rows // each), groups), torch.int32)
        return layout
    if bits != 8:
        raise _not_said(stated)
    if weights.get("type") == "int":
        return {"weight": ((rows, columns), torch.int8), "weight_scale": ((rows, 1), torch.bfloat16)}
    block = weights.get("block_structure")
    scale: tuple[int, ...] = {"tensor": (1,), "group": (rows, groups)}.get(weights["strategy"], (rows, 1))
    if block:
        scale = _num_blocks(rows, columns, block)
    dtype = torch.uint8 if form == "mxfp8-quantized" else torch.float32
    return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": (scale, dtype)}


def _fp4(rows: int, columns: int, packed: str, scale_dtype: torch.dtype) -> Layouts:
    """Return the parts of NVFP4, whose scales have numbers of eight bits for 16 columns, or MXFP4: bytes for 32."""
    group = 32 if scale_dtype == torch.uint8 else 16
    return {packed: ((rows, columns // 2), torch.uint8), "weight_scale": ((rows, columns // group), scale_dtype)}


def _num_blocks(rows: int, columns: int, block: Sequence[int]) -> tuple[int, int]:
    """Return the blocks that share a scale, along rows and columns."""
    return -(-rows // block[0]), -(-columns // block[1])


def _num_groups(columns: int, group_size: int | None) -> int:
    """Return the groups of columns that share a scale: one, where no size is stated or it is -1."""
    return -(-columns // group_size) if group_size and group_size > 0 else 1


def _not_said(stated: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        "E_QUANTIZED",
        f"config.json states {format_stated(stated)} and does not say how large the packed weights are.",
        "Give the folder with its weights, or the original's config.json with `quant`.",
    )
