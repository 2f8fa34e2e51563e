"""The experts' modules of a model compute with experts that come on demand; all else stays transformers' own."""

import functools
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from offload.device import CudaDevice
from offload.experts.cpu_experts import CpuExperts
from offload.experts.cuda_experts import CudaExperts
from offload.experts.expert_cache import ExpertCache
from offload.experts.expert_group import ExpertGroup, scratch_weights
from offload.experts.expert_source import ExpertMemory, ExpertSource
from offload.experts.mixture import mix
from offload.layer_store import LayerStore
from offload.placement import ExpertPlacement


def hook_experts(
    model: PreTrainedModel,
    groups: Sequence[ExpertGroup],
    placement: ExpertPlacement,
    store: LayerStore,
    undo: ExitStack,
    *,
    device: torch.device,
    keeps_cached: bool,
) -> ExpertSource:
    """Give the modules of `groups` a forward that requests experts, until `undo` is closed; return their source.

    `keeps_cached` says that the system's cache can hold what is read of them.
    """
    num_scratch = scratch_weights(groups)
    is_on_device = device.type == "cuda" and not placement.is_on_host
    memory: ExpertMemory = (
        CudaExperts(
            store, groups, placement=placement, num_scratch=num_scratch, dtype=model.dtype, device=CudaDevice(device)
        )
        if is_on_device
        else CpuExperts(store, num_scratch=num_scratch, dtype=model.dtype, keeps_cached=keeps_cached)
    )
    cache = ExpertCache(
        [placement.expert_bytes if is_on_device else group.expert_stored_bytes for group in groups],
        num_experts=max(group.num_experts for group in groups),
        capacity_bytes=placement.kept_bytes,
    )
    source = ExpertSource(groups, cache, memory)
    undo.callback(source.close)
    for row, group in enumerate(groups):
        module = model.get_submodule(group.module_name)
        module.forward = functools.partial(mix, module, functools.partial(source.take, row))
        undo.callback(module.__dict__.pop, "forward", None)
    return source
