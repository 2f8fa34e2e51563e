"""The experts' modules of a model compute with experts that come on demand; all else stays transformers' own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from offload.device import CudaDevice
from offload.experts.cpu_experts import CpuExperts
from offload.experts.cuda_experts import CudaExperts, ExpertRoom
from offload.experts.expert_cache import ExpertCache
from offload.experts.expert_group import ExpertGroup
from offload.experts.expert_source import ExpertCounts, ExpertMemory, ExpertSource
from offload.experts.expert_use import ExpertUse
from offload.experts.mixture import mix
from offload.layer_store import LayerStore
from offload.placement import ExpertPlacement


class ExpertsOnDemand:
    """Gives the modules of `groups` a forward that asks for experts, until `close`."""

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Sequence[ExpertGroup],
        placement: ExpertPlacement,
        store: LayerStore,
        *,
        device: torch.device,
    ) -> None:
        num_scratch = max(group.scratch_weights() for group in groups)
        is_on_device = device.type == "cuda" and not placement.is_on_host
        memory: ExpertMemory = (
            CudaExperts(
                store,
                groups,
                room=ExpertRoom(num_slots=placement.num_kept, num_pinned=placement.num_pinned, num_scratch=num_scratch),
                use=placement.use,
                dtype=model.dtype,
                device=CudaDevice(device),
            )
            if is_on_device
            else CpuExperts(store, num_scratch=num_scratch, dtype=model.dtype)
        )
        self._cache = ExpertCache(
            [placement.expert_bytes if is_on_device else group.expert_stored_bytes for group in groups],
            num_experts=max(group.num_experts for group in groups),
            capacity_bytes=placement.kept_bytes,
        )
        self.num_pinned = memory.num_pinned
        self._source = ExpertSource(groups, self._cache, memory)
        self._modules = [model.get_submodule(group.module_name) for group in groups]
        for row, module in enumerate(self._modules):
            module.forward = functools.partial(mix, module, row, self._source)

    @property
    def counts(self) -> ExpertCounts:
        """What was asked for since the model was loaded."""
        return self._source.counts

    @property
    def use(self) -> ExpertUse:
        """The share of the passes so far that asked for each expert."""
        return self._cache.use()

    def close(self) -> None:
        """End all reading, and give the modules their own forward back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._source.close()
