"""The published formats: random numbers and scales of a matrix, the weight that they mean, and what is stated of it.

The definitions are written with one number at a time, from the formats' own descriptions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Parts = dict[str, Tensor]  # the end of a name -> tensor, beside "weight"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that each number of a word, the lowest bits first, is of
BLOCK = (16, 24)  # rows, columns: of no matrix's size, so that a block taken for another shows
GROUP = 8


def random_words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)


def scales(*shape: int, size: float) -> Tensor:
    return size * (0.5 + torch.rand(shape))


def number(word: int, place: int, bits: int = 4) -> int:
    return (word >> (bits * place)) & ((1 << bits) - 1)


def lists(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.is_floating_point() else tensor).tolist()


def by_element(rows: int, columns: int, value: Callable[[int, int], float]) -> Tensor:
    return torch.tensor([[value(row, column) for column in range(columns)] for row in range(rows)])


def powers(scale: Tensor) -> Tensor:
    return torch.tensor([2.0 ** (int(byte) - 127) for byte in scale.flatten()]).view(scale.shape)


# FP8 and int8


def fp8_parts(scale_name: str, scale_shape: Callable[[int, int], tuple[int, ...]]) -> Callable[[int, int], Parts]:
    def parts(rows: int, columns: int) -> Parts:
        numbers = (torch.randn(rows, columns) * 50).to(torch.float8_e4m3fn)
        return {"weight": numbers, scale_name: scales(*scale_shape(rows, columns), size=2e-3)}

    return parts


def blocks_of(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // BLOCK[0]), -(-columns // BLOCK[1])


def blocks_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    numbers, scale = lists(parts["weight"]), lists(next(part for name, part in parts.items() if "scale" in name))
    return by_element(rows, columns, lambda r, c: numbers[r][c] * scale[r // BLOCK[0]][c // BLOCK[1]])


def rows_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    numbers, scale = lists(parts["weight"]), lists(parts["weight_scale"].view(rows))
    return by_element(rows, columns, lambda r, c: numbers[r][c] * scale[r])


def matrix_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    numbers, scale = lists(parts["weight"]), next(part for name, part in parts.items() if "scale" in name).item()
    return by_element(rows, columns, lambda r, c: numbers[r][c] * scale)


def mxfp8_parts(rows: int, columns: int) -> Parts:
    numbers = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": torch.randint(120, 124, (rows, columns // 32)).to(torch.uint8)}


def mxfp8_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    numbers, scale = lists(parts["weight"]), lists(powers(parts["weight_scale"]))
    return by_element(rows, columns, lambda r, c: numbers[r][c] * scale[r][c // 32])


def int8_parts(rows: int, columns: int) -> Parts:
    numbers = torch.randint(-127, 128, (rows, columns)).to(torch.int8)
    return {"weight": numbers, "weight_scale": scales(rows, 1, size=2e-3).bfloat16()}


# compressed-tensors' whole numbers


def packed_parts(bits: int, *, zeros: bool) -> Callable[[int, int], Parts]:
    def parts(rows: int, columns: int) -> Parts:
        groups, each = columns // GROUP, 32 // bits
        found = {
            "weight_packed": random_words(rows, columns // each),
            "weight_scale": scales(rows, groups, size=0.3 / (1 << bits)).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        return {**found, "weight_zero_point": random_words(rows // each, groups)} if zeros else found

    return parts


def packed_meaning(bits: int, *, zeros: bool) -> Callable[[Parts, int, int], Tensor]:
    each = 32 // bits

    def meaning(parts: Parts, rows: int, columns: int) -> Tensor:
        packed, scale = lists(parts["weight_packed"]), lists(parts["weight_scale"])
        all_zeros = lists(parts["weight_zero_point"]) if zeros else None

        def value(r: int, c: int) -> float:
            zero = 1 << (bits - 1)
            if all_zeros is not None:
                zero = number(all_zeros[r // each][c // GROUP], r % each, bits)
            return (number(packed[r][c // each], c % each, bits) - zero) * scale[r][c // GROUP]

        return by_element(rows, columns, value)

    return meaning


# four-bit floating point


def nvfp4_parts(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8),
        "weight_scale": scales(rows, columns // 16, size=100).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([2500.0]),
    }


def modelopt_parts(rows: int, columns: int) -> Parts:
    found = nvfp4_parts(rows, columns)
    return {
        "weight": found["weight_packed"],
        "weight_scale": found["weight_scale"],
        "weight_scale_2": torch.tensor(4e-4),
    }


def fp4_meaning(packed: Tensor, scale: Tensor, rows: int, columns: int, group: int) -> Tensor:
    numbers, factors = lists(packed), lists(scale)
    return by_element(rows, columns, lambda r, c: FP4[number(numbers[r][c // 2], c % 2)] * factors[r][c // group])


def nvfp4_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    scale = parts["weight_scale"].float() / parts["weight_global_scale"]
    return fp4_meaning(parts["weight_packed"], scale, rows, columns, 16)


def modelopt_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    scale = parts["weight_scale"].float() * parts["weight_scale_2"]
    return fp4_meaning(parts["weight"], scale, rows, columns, 16)


def mxfp4_parts(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2)).to(torch.uint8),
        "weight_scale": torch.randint(120, 124, (rows, columns // 32)).to(torch.uint8),
    }


def mxfp4_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    return fp4_meaning(parts["weight_packed"], powers(parts["weight_scale"]), rows, columns, 32)


# GPTQ and AWQ


def gptq_parts(*, act_order: bool = False, bits: int = 4) -> Callable[[int, int], Parts]:
    def parts(rows: int, columns: int) -> Parts:
        each, groups = 32 // bits, columns // GROUP
        group = torch.arange(columns) // GROUP
        return {
            "qweight": random_words(columns // each, rows),
            "qzeros": random_words(groups, rows // each),
            "scales": scales(groups, rows, size=0.3 / (1 << bits)).half(),
            "g_idx": (group[torch.randperm(columns)] if act_order else group).to(torch.int32),
        }

    return parts


def gptq_meaning(*, bits: int = 4, less: int = 1) -> Callable[[Parts, int, int], Tensor]:
    each = 32 // bits

    def meaning(parts: Parts, rows: int, columns: int) -> Tensor:
        packed, zeros, scale, groups = (lists(parts[name]) for name in ("qweight", "qzeros", "scales", "g_idx"))
        # The first version subtracts one from each number of a word by one subtraction, which may borrow.
        ones = less * sum(1 << (bits * place) for place in range(each))

        def value(r: int, c: int) -> float:
            zero = number(zeros[groups[c]][r // each] + ones, r % each, bits)
            return (number(packed[c // each][r], c % each, bits) - zero) * scale[groups[c]][r]

        return by_element(rows, columns, value)

    return meaning


def awq_parts(rows: int, columns: int) -> Parts:
    groups = columns // GROUP
    return {
        "qweight": random_words(columns, rows // 8),
        "qzeros": random_words(groups, rows // 8),
        "scales": scales(groups, rows, size=0.02).half(),
    }


def awq_meaning(parts: Parts, rows: int, columns: int) -> Tensor:
    packed, zeros, scale = (lists(parts[name]) for name in ("qweight", "qzeros", "scales"))

    def value(r: int, c: int) -> float:
        place, group = AWQ_ORDER.index(r % 8), c // GROUP
        zero = number(zeros[group][r // 8], place)
        return (number(packed[c][r // 8], place) - zero) * scale[group][r]

    return by_element(rows, columns, value)


# All of them


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A way of publishing: what config.json states, random parts of a matrix, and what they mean."""

    stated: dict[str, Any]
    parts: Callable[[int, int], Parts]
    meaning: Callable[[Parts, int, int], Tensor]
    name: str


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
ACTIVATIONS = {"num_bits": 8, "type": "float", "dynamic": True}
PUBLISHED: dict[str, Published] = {
    "fp8-blocks": Published(
        name="fp8", stated=FP8_BLOCKS, parts=fp8_parts("weight_scale_inv", blocks_of), meaning=blocks_meaning
    ),
    "fp8-matrix": Published(
        name="fp8",
        stated={"quant_method": "fp8", "activation_scheme": "static"},
        parts=fp8_parts("weight_scale_inv", lambda _rows, _columns: ()),
        meaning=matrix_meaning,
    ),
    "compressed-fp8-rows": Published(
        name="fp8",
        stated=compressed("float-quantized", FLOAT8, ACTIVATIONS),
        parts=fp8_parts("weight_scale", lambda rows, _columns: (rows, 1)),
        meaning=rows_meaning,
    ),
    "compressed-fp8-blocks": Published(
        name="fp8",
        stated=compressed("float-quantized", {**FLOAT8, "block_structure": list(BLOCK)}, ACTIVATIONS),
        parts=fp8_parts("weight_scale", blocks_of),
        meaning=blocks_meaning,
    ),
    "fbgemm-fp8": Published(
        name="fp8",
        stated={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        parts=fp8_parts("weight_scale", lambda rows, _columns: (rows, 1)),
        meaning=rows_meaning,
    ),
    "compressed-mxfp8": Published(
        name="fp8",
        stated=compressed("mxfp8-quantized", {**FLOAT8, "strategy": "group", "group_size": 32}, ACTIVATIONS),
        parts=mxfp8_parts,
        meaning=mxfp8_meaning,
    ),
    "compressed-int8": Published(
        name="int-quantized",
        stated=compressed("int-quantized", {**FLOAT8, "type": "int"}, ACTIVATIONS),
        parts=int8_parts,
        meaning=rows_meaning,
    ),
    "compressed-int4": Published(
        name="pack-quantized",
        stated=compressed("pack-quantized", WEIGHTS),
        parts=packed_parts(4, zeros=False),
        meaning=packed_meaning(4, zeros=False),
    ),
    "compressed-int4-zeros": Published(
        name="pack-quantized",
        stated=compressed("pack-quantized", {**WEIGHTS, "symmetric": False}),
        parts=packed_parts(4, zeros=True),
        meaning=packed_meaning(4, zeros=True),
    ),
    "compressed-packed-int8": Published(
        name="pack-quantized",
        stated=compressed("pack-quantized", {**WEIGHTS, "num_bits": 8}),
        parts=packed_parts(8, zeros=False),
        meaning=packed_meaning(8, zeros=False),
    ),
    "compressed-nvfp4": Published(
        name="nvfp4",
        stated=compressed("nvfp4-pack-quantized", {**WEIGHTS, "type": "float", "group_size": 16}, ACTIVATIONS),
        parts=nvfp4_parts,
        meaning=nvfp4_meaning,
    ),
    "modelopt-nvfp4": Published(
        name="nvfp4",
        stated={"quant_method": "modelopt", "quant_algo": "NVFP4"},
        parts=modelopt_parts,
        meaning=modelopt_meaning,
    ),
    "compressed-mxfp4": Published(
        name="mxfp4",
        stated=compressed("mxfp4-pack-quantized", {**WEIGHTS, "type": "float", "group_size": 32}),
        parts=mxfp4_parts,
        meaning=mxfp4_meaning,
    ),
    "gptq": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        parts=gptq_parts(),
        meaning=gptq_meaning(),
    ),
    "gptq-act-order": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "checkpoint_format": "gptq"},
        parts=gptq_parts(act_order=True),
        meaning=gptq_meaning(),
    ),
    "gptq-v2": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        parts=gptq_parts(),
        meaning=gptq_meaning(less=0),
    ),
    "gptq-8-bits": Published(
        name="gptq",
        stated={"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False},
        parts=gptq_parts(bits=8),
        meaning=gptq_meaning(bits=8),
    ),
    "awq": Published(
        name="awq",
        stated={"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        parts=awq_parts,
        meaning=awq_meaning,
    ),
}
