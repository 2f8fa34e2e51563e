"""Quantised tensors in a checkpoint: found by their names, and attached to the modules they are of."""

from __future__ import annotations

import json
import math
from collections import defaultdict

from torch import nn
from transformers import PreTrainedModel

from offload.checkpoint import TensorEntry
from offload.errors import CheckpointError
from offload.packed_weight import (
    BLOCK_SIZE,
    FORMATS_4BIT,
    NESTED_BLOCK_SIZE,
    PackedFormat,
    PackedModule,
    PackedWeight,
)
from offload.stored_names import Pieces

STATE_KEY = "quant_state.bitsandbytes__"  # of the small JSON that bitsandbytes stores beside a 4-bit weight
INT8 = PackedFormat(kind="int8")
BLOCK_SIZES = {32, 64, 128, 256, 512, 1024, 2048, 4096}  # bitsandbytes' own


def attach_packed_weights(
    model: PreTrainedModel, stored: dict[str, Pieces], ties: dict[str, str]
) -> tuple[tuple[PackedModule, ...], set[str]]:
    """Give every quantised parameter's module its packed parts, and put them into `stored` by name.

    Returns the modules, and the names of the parameters that are packed. Raises CheckpointError for
    a packing that is not understood.
    """
    by_module: dict[str, list[tuple[str, PackedWeight]]] = defaultdict(list)
    names = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        packing = _packing(name, stored, tuple(parameter.shape)) if name not in ties else None
        if packing is None:
            continue
        if name in ties.values():
            raise _not_read(name, "another parameter is tied to it")
        names.add(name)
        module_name, _, attribute = name.rpartition(".")
        packed = PackedWeight(tuple(parameter.shape), packing)
        model.get_submodule(module_name).add_module(f"{attribute}_packed", packed)
        by_module[module_name].append((attribute, packed))
        for part, stored_name in packing.stored_names(name).items():
            if stored_name in stored:  # what is missing is missed with all other tensors
                stored[f"{module_name}.{attribute}_packed.{part}"] = stored.pop(stored_name)
    modules = tuple(PackedModule(model.get_submodule(name), weights) for name, weights in by_module.items())
    return modules, names


def _packing(name: str, stored: dict[str, Pieces], shape: tuple[int, ...]) -> PackedFormat | None:
    """How the parameter is packed; None where it is not."""
    if name not in stored:
        return None
    if INT8.stored_names(name)["scale"] in stored:
        layout = stored.get(f"{name.rpartition('.')[0]}.weight_format")
        if layout is not None and any(_content(layout[0])):
            raise _not_read(name, "its rows are not stored as rows")
        return INT8
    if f"{name}.absmax" not in stored:
        return None
    nested = f"{name}.nested_absmax" in stored
    kind = next((kind for kind in FORMATS_4BIT if f"{name}.{STATE_KEY}{kind}" in stored), None)
    if kind is None:
        raise _not_read(name, f"its '{STATE_KEY}' is missing")
    state = stored[f"{name}.{STATE_KEY}{kind}"][0]
    if not state.file.name:  # of a checkpoint that is only planned
        return PackedFormat(kind=kind, nested=nested)
    return _read_state(name, _content(state), shape, kind=kind, nested=nested)


def _content(entry: TensorEntry) -> bytes:
    """The bytes of a small tensor; none where it is only planned."""
    if not entry.file.name:
        return b""
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.num_bytes)


def _read_state(name: str, content: bytes, shape: tuple[int, ...], *, kind: str, nested: bool) -> PackedFormat:
    """The facts about one weight: a few hundred bytes of JSON in its checkpoint."""
    try:
        state = json.loads(content)
        packing = PackedFormat(
            kind=kind,
            nested=nested,
            block_size=int(state["blocksize"]),
            offset=float(state["nested_offset"]) if nested else 0.0,
        )
        stored_shape = tuple(state["shape"])
        if packing.block_size not in BLOCK_SIZES or math.prod(shape) % packing.block_size:
            raise ValueError(f"blocks of {packing.block_size}")
        if not math.isfinite(packing.offset):
            raise ValueError(f"an offset of {packing.offset}")
        if nested and state["nested_blocksize"] != NESTED_BLOCK_SIZE:
            raise ValueError(f"nested blocks of {state['nested_blocksize']}")
    except (ValueError, KeyError, TypeError) as error:
        raise _not_read(name, f"its quantisation state is not understood: {error}") from error
    if stored_shape != shape:
        raise _not_read(name, f"it was packed as {list(stored_shape)}, and the module computes with {list(shape)}")
    return packing


def _not_read(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        "E_QUANTIZED",
        f"the quantised weight '{name}' cannot be used: {reason}.",
        "Use the model's bf16 or fp16 safetensors, with `quant=nf4` or int8.",
    )


def state_content(shape: tuple[int, ...], packing: PackedFormat) -> bytes:
    """What bitsandbytes stores beside a 4-bit weight."""
    state: dict[str, object] = {
        "quant_type": packing.kind,
        "blocksize": packing.block_size,
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    if packing.nested:
        state |= {"nested_blocksize": NESTED_BLOCK_SIZE, "nested_dtype": "float32", "nested_offset": packing.offset}
    return json.dumps(state).encode()


def is_quantizable(module: nn.Module, attribute: str, parameter: nn.Parameter) -> bool:
    """Whether a decoder layer's parameter is worth packing: matrices of linear layers and of experts.

    Norms, biases and routers are small, and routing decides much: they stay as they are.
    """
    from transformers.pytorch_utils import Conv1D

    is_linear = attribute == "weight" and isinstance(module, (nn.Linear, Conv1D))
    is_experts = parameter.dim() == 3
    return (is_linear or is_experts) and parameter.numel() % BLOCK_SIZE == 0 and min(parameter.shape[-2:]) > 1
