"""Layers that one model computes with in another's weights: both are of one family, and nothing of these is packed."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn

from offload.attached_weights import detach_packed_weights
from offload.skeleton import Skeleton


def with_shared_layers(skeleton: Skeleton, lender: nn.ModuleList, indices: Collection[int]) -> Skeleton:
    """Return the skeleton without the records of these layers, whose modules have the parameters of `lender`'s.

    The lender's layers are loaded, and stay. The skeleton given is not used any more.
    """
    kept = without_layers(skeleton, indices)
    detach_packed_weights(set(skeleton.packed) - set(kept.packed))
    for index in indices:
        theirs: dict[str, Any] = dict(lender[index].named_modules())
        for name, module in skeleton.layers[index].named_modules():
            own: Any = vars(module)
            module._parameters.update(theirs[name]._parameters)
            if "kernel_order" in vars(theirs[name]):
                own["kernel_order"] = theirs[name].kernel_order
    return kept


def without_layers(skeleton: Skeleton, indices: Collection[int]) -> Skeleton:
    """Return the skeleton without the weights of these layers, as far as they are to be loaded or unpacked."""
    inside = {module for index in indices for module in skeleton.layers[index].modules()}
    return replace(
        skeleton,
        records=tuple(record for record in skeleton.records if record.index not in indices),
        packed=tuple(packed for packed in skeleton.packed if packed.module not in inside),
        expert_groups=tuple(group for group in skeleton.expert_groups if group.layer not in indices),
    )
