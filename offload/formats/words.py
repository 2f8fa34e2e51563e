"""Whole numbers of four or eight bits in 32-bit words, in groups of columns that share a scale and a zero point.

GPTQ packs them along the inputs, AWQ along the outputs in an order of its own, and compressed-tensors along the inputs
of every row. GPTQ's first version stores zero points less one, in whole words: a zero point of 0 borrows from its
neighbour, and adding one to each number of the word gives it back.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.formats.even_steps import StepsInWords
from offload.formats.numbers import float_scale, halves
from offload.formats.published import PublishedWeight, stored_matrices
from offload.formats.storage import PartShapes, Steps, StorageFormat, StoredParameter

WORD_BITS = 32
SHORT_DTYPES = {torch.float16, torch.bfloat16}  # of scales
AWQ_BITS = 4
ONES = {4: 0x11111111, 8: 0x01010101}  # a one for each number of a word


def _find_gptq(weight: StoredParameter) -> PublishedWeight | None:
    """Find GPTQ by its words and what config.json states; the words' shape says how many bits a number has."""
    if not _has_words(weight, "gptq"):
        return None
    in_order = not weight.stated.get("desc_act")
    leaves = ["qweight", "qzeros", "scales", *([] if in_order else ["g_idx"])]
    found = stored_matrices(weight, {leaf: weight.sibling(leaf) for leaf in leaves})
    rows, columns = found.rows, found.columns
    words = {bits: columns * bits // WORD_BITS for bits in (4, 8)}
    bits = 8 if found.shape("qweight") == (words[8], rows) else 4
    groups = found.num_groups(are_equal=in_order)
    each = WORD_BITS // bits
    parts = {
        "qweight": found.part("qweight", (words[4], rows), (words[8], rows), rows_dim=-1),
        "qzeros": found.part("qzeros", (groups, rows // each), rows_dim=-1, rows_each=each),
        "scales": found.part("scales", (groups, rows), rows_dim=-1),
    }
    if not in_order:
        parts["g_idx"] = found.part("g_idx", (columns,))
    is_first_version = weight.stated.get("checkpoint_format") != "gptq_v2"
    steps = StepsInWords(
        bits=bits,
        read_words=partial(_gptq_steps, bits=bits, zeros_less=ONES[bits] * is_first_version),
        numbers_in=partial(_whole_numbers, bits=bits),
        scales=_short(parts["scales"].dtype),
    )
    return found.even_weight("gptq", parts, steps, num_groups=groups, in_order=in_order)


def _find_awq(weight: StoredParameter) -> PublishedWeight | None:
    """Find AWQ by its words and what config.json states."""
    if not _has_words(weight, "awq"):
        return None
    found = stored_matrices(weight, {leaf: weight.sibling(leaf) for leaf in ("qweight", "qzeros", "scales")})
    groups, each = found.num_groups(), WORD_BITS // AWQ_BITS
    words = found.rows // each
    parts = {
        "qweight": found.part("qweight", (found.columns, words), rows_dim=-1, rows_each=each),
        "qzeros": found.part("qzeros", (groups, words), rows_dim=-1, rows_each=each),
        "scales": found.part("scales", (groups, found.rows), rows_dim=-1),
    }
    scales = _short(parts["scales"].dtype)
    steps = StepsInWords(bits=AWQ_BITS, read_words=_awq_steps, numbers_in=_awq_numbers, scales=scales)
    return found.even_weight("awq", parts, steps, num_groups=groups)


def _find_pack_quantized(weight: StoredParameter) -> PublishedWeight | None:
    """Find compressed-tensors' words; their shape says how many bits a number has."""
    if weight.dtype_of(weight.sibling("weight_packed")) != torch.int32:
        return None
    if weight.has("weight_g_idx"):
        raise weight.cannot_be_used("its columns are in the order of their activations ('weight_g_idx')")
    names = {"packed": weight.sibling("weight_packed"), "scale": weight.sibling("weight_scale")}
    has_zeros = weight.has("weight_zero_point")
    found = stored_matrices(weight, names | ({"zeros": weight.sibling("weight_zero_point")} if has_zeros else {}))
    rows, columns = found.rows, found.columns
    words = {bits: -(-columns * bits // WORD_BITS) for bits in (4, 8)}
    bits = 8 if found.shape("packed") == (rows, words[8]) else 4
    packed = found.part("packed", (rows, words[4]), (rows, words[8]), rows_dim=-2)
    groups = found.shape("scale")[-1] if len(found.shape("scale")) == 2 else 1
    if columns % max(1, groups):
        raise weight.cannot_be_used(f"{columns} columns are no {groups} equal groups")
    parts = {"packed": packed, "scale": found.part("scale", (rows, groups), rows_dim=-2)}
    if has_zeros:
        each = WORD_BITS // bits
        parts["zeros"] = found.part("zeros", (-(-rows // each), groups), rows_dim=-2, rows_each=each)
    steps = StepsInWords(
        bits=bits,
        read_words=partial(_row_steps, bits=bits),
        numbers_in=lambda words: _whole_numbers(words, bits)[..., :columns],
        scales=_short(parts["scale"].dtype),
        is_middle=not has_zeros,
    )
    return found.even_weight("pack-quantized", parts, steps, num_groups=groups)


def _short(dtype: torch.dtype) -> torch.dtype | None:
    return dtype if dtype in SHORT_DTYPES else None


def _has_words(weight: StoredParameter, method: str) -> bool:
    """Return whether numbers stand in 32-bit words by a method; only config.json says whose the words are."""
    return (weight.has("qweight") or weight.has("qzeros")) and weight.stated.get("quant_method") == method


def _gptq_steps(parts: Mapping[str, Tensor], *, bits: int, zeros_less: int) -> Steps:
    """Read qweight [n, i * bits / 32, r], qzeros [n, G, r * bits / 32] and scales [n, G, r]."""
    scale = parts["scales"].mT
    is_in_order = "g_idx" not in parts
    return Steps(
        numbers=parts["qweight"].mT,
        zeros=_signed(_whole_numbers(parts["qzeros"] + zeros_less, bits), bits).mT,
        scale=scale.float() if is_in_order or scale.dtype == torch.bfloat16 else scale,
        groups=None if is_in_order else parts["g_idx"].long(),
    )


def _awq_steps(parts: Mapping[str, Tensor]) -> Steps:
    """Read qweight [n, i, r / 8], qzeros [n, G, r / 8] and scales [n, G, r]."""
    zeros = _signed(_awq_numbers(parts["qzeros"].mT), AWQ_BITS)
    return Steps(numbers=parts["qweight"].mT, zeros=zeros, scale=parts["scales"].mT.float())


def _row_steps(parts: Mapping[str, Tensor], *, bits: int) -> Steps:
    """Read packed [n, r, i * bits / 32] and scale [n, r, G]; zeros are packed along rows, or half of all numbers."""
    scale = float_scale(parts["scale"])
    rows = scale.shape[1]
    if "zeros" in parts:
        zeros = _signed(_whole_numbers(parts["zeros"].mT, bits)[..., :rows].mT, bits)
    else:
        held = torch.int16 if bits == 8 else torch.int8
        zeros = scale.new_full((), 1 << (bits - 1), dtype=held).expand_as(scale)
    return Steps(numbers=parts["packed"], zeros=zeros, scale=scale)


def _awq_numbers(words: Tensor) -> Tensor:
    """Return the numbers of words [n, r / 8, m]: uint8 [n, r, m].

    The halves of a word's four bytes are rows 0 2, 4 6, 1 3, 5 7: byte 2 a + b holds rows a + 4 b + 2 c, c = 0 in its
    low half.
    """
    packed = _bytes_of(words.mT).mT.contiguous().unflatten(1, (-1, 2, 2)).transpose(2, 3)  # [n, r / 8, b, a, m]
    num_matrices, eighths, _, _, columns = packed.shape
    found = words.new_empty(num_matrices, eighths, 2, 2, 2, columns, dtype=torch.uint8)  # [n, r / 8, b, c, a, m]
    torch.bitwise_and(packed, 15, out=found[:, :, :, 0])
    torch.bitwise_right_shift(packed, 4, out=found[:, :, :, 1])
    return found.view(num_matrices, 8 * eighths, columns)


def _whole_numbers(words: Tensor, bits: int) -> Tensor:
    """Return the numbers from 0 on that 32-bit words are made of: int32 [..., n] -> uint8 [..., n * 32 / bits]."""
    return _bytes_of(words) if bits == 8 else halves(_bytes_of(words))


def _signed(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers in a type that unsigned ones can be less by."""
    return numbers.to(torch.int16) if bits == 8 else numbers.view(torch.int8)


def _bytes_of(words: Tensor) -> Tensor:
    """Return the bytes of 32-bit words, the lowest first: int32 [..., n] -> uint8 [..., 4 n]."""
    flat = words.contiguous().view(-1)  # a last dimension of one may have any stride
    return flat.view(torch.uint8).view(*words.shape[:-1], -1)


def _planned_gptq(rows: int, columns: int, stated: Mapping[str, Any]) -> PartShapes:
    each, groups = WORD_BITS // stated.get("bits", 4), num_groups(columns, stated.get("group_size"))
    shapes: PartShapes = {
        "qweight": ((columns // each, rows), torch.int32),
        "qzeros": ((groups, rows // each), torch.int32),
        "scales": ((groups, rows), torch.float16),
    }
    return {**shapes, "g_idx": ((columns,), torch.int32)} if stated.get("desc_act") else shapes


def _planned_awq(rows: int, columns: int, stated: Mapping[str, Any]) -> PartShapes:
    as_gptq = _planned_gptq(rows, columns, {"group_size": stated.get("group_size")})
    return {**as_gptq, "qweight": ((columns, rows // 8), torch.int32)}


def num_groups(columns: int, group_size: int | None) -> int:
    """Return the groups of columns that share a scale: one, where no size is stated or it is -1."""
    return -(-columns // group_size) if group_size and group_size > 0 else 1


def _refused_gptq(stated: Mapping[str, Any]) -> str | None:
    form = stated.get("checkpoint_format")
    other = None if form in {None, "gptq", "gptq_v2"} else f"its checkpoint_format is {form}, not gptq or gptq_v2"
    return _other_bits(stated, 4, 8) or other


def _refused_awq(stated: Mapping[str, Any]) -> str | None:
    version = stated.get("version") or "gemm"
    return _other_bits(stated, 4) or (None if str(version).lower() == "gemm" else f"its version is {version}, not gemm")


def _other_bits(stated: Mapping[str, Any], *readable: int) -> str | None:
    bits = stated.get("bits")
    return None if bits in (None, *readable) else f"its weights have {bits} bits, not {' or '.join(map(str, readable))}"


GPTQ = StorageFormat(
    name="gptq", methods=("gptq",), detect=_find_gptq,
    leaves=("qweight", "qzeros", "scales", "g_idx"), planned=_planned_gptq, refused=_refused_gptq,
)  # fmt: skip
AWQ = StorageFormat(
    name="awq", methods=("awq",), detect=_find_awq,
    leaves=("qweight", "qzeros", "scales"), planned=_planned_awq, refused=_refused_awq,
)  # fmt: skip
PACK_QUANTIZED = StorageFormat(
    name="pack-quantized", methods=("compressed-tensors",), detect=_find_pack_quantized,
    leaves=("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
)  # fmt: skip
