"""Packed weights take their places in the modules that compute with them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from offload.checkpoint import Pieces
from offload.formats.storage import cannot_be_used
from offload.layouts.known import storage_of
from offload.layouts.onednn import is_read_whole
from offload.packed_outside import PackedHead, PackedTable
from offload.packed_weight import PackedModule, PackedWeight


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
        packing = storage_of(name, shape, stored, stated) if name not in ties and name not in unread else None
        if packing is None:
            continue
        names.add(name)
        module_name, _, attribute = name.rpartition(".")
        packed = PackedWeight(shape, packing)
        model.get_submodule(module_name).add_module(f"{attribute}_packed", packed)
        by_module[module_name].append((attribute, packed))
        for other in (other for other, source in ties.items() if source == name and other not in unread):
            if packing.unpack_some is None or not _may_share(model, name, other):
                raise cannot_be_used(name, f"'{other}' is tied to it")
            by_module[other.rpartition(".")[0]].append((attribute, packed))
        for part, stored_name in packing.stored_names(name).items():
            if stored_name in stored:  # missing parts are reported with all other tensors
                pieces = (replace(piece, is_transposed=False, is_in_turn=False) for piece in stored.pop(stored_name))
                stored[f"{module_name}.{attribute}_packed.{part}"] = tuple(pieces)  # whose order is the packing's
    return tuple(_packed_module(model, name, weights) for name, weights in by_module.items()), names


def detach_packed_weights(modules: Iterable[PackedModule]) -> None:
    """Take from the modules the packed parts that `attach_packed_weights` gave them."""
    for packed in modules:
        for attribute, _ in packed.weights:
            packed.module._modules.pop(f"{attribute}_packed", None)  # tied modules have none of their own


def _packed_module(model: PreTrainedModel, name: str, weights: list[tuple[str, PackedWeight]]) -> PackedModule:
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        return PackedTable(module, weights)
    output = model.get_output_embeddings()
    if type(module) is nn.Linear and module is getattr(output, "linear", output):  # which a draft's head holds
        return PackedHead(module, weights)
    return PackedModule(module, weights, is_read_whole=is_read_whole(model, name))


def _may_share(model: PreTrainedModel, *names: str) -> bool:
    """Return whether parameters are the whole weights of embeddings and linear layers, which read the same parts."""
    modules = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    return all(isinstance(module, (nn.Embedding, nn.Linear)) for module in modules)
