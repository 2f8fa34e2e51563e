"""Quantised tensors of a checkpoint are found by their names, and attached to the modules that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from offload.formats.known import packing_of
from offload.formats.packed_format import cannot_be_used
from offload.packed_weight import PackedModule, PackedWeight
from offload.stored_names import Pieces


def attach_packed_weights(
    model: PreTrainedModel,
    stored: dict[str, Pieces],
    ties: dict[str, str],
    stated: Mapping[str, Any],
    unread: frozenset[str] = frozenset(),
) -> tuple[tuple[PackedModule, ...], set[str]]:
    """Give every quantised parameter's module its packed parts, and put them into `stored` by name.

    `stated` is what config.json says of the packing. Returns the modules, and the names of the parameters that are
    packed. Raises CheckpointError for a packing that is not understood.
    """
    by_module: dict[str, list[tuple[str, PackedWeight]]] = defaultdict(list)
    names = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        shape = tuple(parameter.shape)
        packing = packing_of(name, shape, stored, stated) if name not in ties and name not in unread else None
        if packing is None:
            continue
        if name in ties.values():
            raise cannot_be_used(name, "another parameter is tied to it")
        names.add(name)
        module_name, _, attribute = name.rpartition(".")
        packed = PackedWeight(shape, packing)
        model.get_submodule(module_name).add_module(f"{attribute}_packed", packed)
        by_module[module_name].append((attribute, packed))
        for part, stored_name in packing.stored_names(name).items():
            if stored_name in stored:  # what is missing is missed with all other tensors
                stored[f"{module_name}.{attribute}_packed.{part}"] = stored.pop(stored_name)
    modules = tuple(PackedModule(model.get_submodule(name), weights) for name, weights in by_module.items())
    return modules, names
