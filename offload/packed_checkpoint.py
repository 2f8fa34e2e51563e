"""Quantised tensors in a checkpoint: found by their names, and attached to the modules they are of."""

from __future__ import annotations

import json
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


def attach_packed_weights(model: PreTrainedModel, stored: dict[str, Pieces]) -> tuple[PackedModule, ...]:
    """Give every quantised parameter's module its packed parts, and put them into `stored` by name."""
    by_module: dict[str, list[tuple[str, PackedWeight]]] = defaultdict(list)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        packing = _packing(name, stored)
        if packing is None:
            continue
        module_name, _, attribute = name.rpartition(".")
        packed = PackedWeight(tuple(parameter.shape), packing)
        model.get_submodule(module_name).add_module(f"{attribute}_packed", packed)
        by_module[module_name].append((attribute, packed))
        for part, stored_name in packing.stored_names(name).items():
            stored[f"{module_name}.{attribute}_packed.{part}"] = stored.pop(stored_name, ())
    return tuple(PackedModule(model.get_submodule(name), weights) for name, weights in by_module.items())


def _packing(name: str, stored: dict[str, Pieces]) -> PackedFormat | None:
    """How the parameter is packed; None where it is not."""
    if name not in stored:
        return None
    if INT8.stored_names(name)["scale"] in stored:
        return INT8
    if f"{name}.absmax" not in stored:
        return None
    nested = f"{name}.nested_absmax" in stored
    kind = next((kind for kind in FORMATS_4BIT if f"{name}.{STATE_KEY}{kind}" in stored), None)
    if kind is None:
        raise CheckpointError(
            "E_QUANTIZED", f"'{name}' is quantised without its '{STATE_KEY}…'.", "Download the model again."
        )
    return _read_state(name, stored[f"{name}.{STATE_KEY}{kind}"][0], kind=kind, nested=nested)


def _read_state(name: str, entry: TensorEntry, *, kind: str, nested: bool) -> PackedFormat:
    """The facts about one weight, a few hundred bytes of JSON in its checkpoint."""
    if not entry.file.name:  # of a checkpoint that is only planned
        return PackedFormat(kind=kind, nested=nested)
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        content = file.read(entry.num_bytes)
    try:
        state = json.loads(content)
        packing = PackedFormat(
            kind=kind,
            nested=nested,
            block_size=int(state["blocksize"]),
            offset=float(state["nested_offset"]) if nested else 0.0,
        )
        if nested and state["nested_blocksize"] != NESTED_BLOCK_SIZE:
            raise ValueError(f"nested_blocksize is {state['nested_blocksize']}")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "E_QUANTIZED", f"'{name}' has a quantisation state that is not understood ({error}).",
            "Download the model again.",
        ) from error  # fmt: skip
    return packing


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
