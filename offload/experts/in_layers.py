"""Packed experts that live in their layers, resident or streamed: only those that rows chose are computed."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.experts.expert_group import ExpertGroup, scratch_weights
from offload.experts.expert_source import HandedExpert
from offload.experts.mixture import mix


def hook_experts_in_layers(model: PreTrainedModel, groups: Sequence[ExpertGroup], undo: ExitStack) -> None:
    """Let the modules of `groups` compute with their own packed parameters, until `undo` is closed."""
    scratch = torch.empty(scratch_weights(groups), dtype=model.dtype)
    for group in groups:
        module = model.get_submodule(group.module_name)
        module.forward = functools.partial(mix, module, _ExpertsInLayer(group, module, scratch).take)
        undo.callback(module.__dict__.pop, "forward", None)


class _ExpertsInLayer:
    """One layer's experts as shares of their module's parameters, which are there while the layer runs."""

    def __init__(self, group: ExpertGroup, module: nn.Module, scratch: Tensor) -> None:
        self._group, self._scratch = group, scratch
        owners = {name: name.rpartition(".") for name in group.tensors}
        self._places = [(module.get_submodule(owner)._parameters, leaf) for owner, _, leaf in owners.values()]
        self._parameters: list[Any] = []  # that the shares belong to: others in each pass where the layer streams
        self._experts: dict[int, HandedExpert] = {}

    def take(self, rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
        """Yield these experts."""
        parameters = [owner[leaf] for owner, leaf in self._places]
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            self._parameters, self._experts = parameters, {}
        for number in rows_of:
            if number not in self._experts:
                self._experts[number] = self._expert(number)
            yield self._experts[number]

    def _expert(self, number: int) -> HandedExpert:
        shares = {
            name: [self._share(number, of)] for name, of in zip(self._group.tensors, self._parameters, strict=True)
        }
        weights = self._group.weights(shares, self._scratch)
        return HandedExpert(number=number, weights=weights, device=self._scratch.device)

    def _share(self, number: int, parameter: Tensor) -> Tensor:
        """Return one expert's part: the first dimension counts the experts, or what each has as much of."""
        each = parameter.shape[0] // self._group.num_experts
        return parameter[number * each : (number + 1) * each]
