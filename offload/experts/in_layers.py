"""Packed experts that live in their layers, resident or streamed: only those that rows chose are computed."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.experts.expert_group import ExpertGroup, ExpertWeights, scratch_weights
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
        self._group, self._module, self._scratch = group, module, scratch
        self._parameters: list[Tensor] = []  # that the shares belong to: others in each pass where the layer streams
        self._weights: dict[int, ExpertWeights] = {}

    def take(self, rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
        """Yield these experts."""
        parameters: list[Tensor] = [self._module.get_parameter(name) for name in self._group.tensors]
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            self._parameters, self._weights = parameters, {}
        for number in rows_of:
            if number not in self._weights:
                shares = {
                    name: [self._share(number, of)] for name, of in zip(self._group.tensors, parameters, strict=True)
                }
                self._weights[number] = self._group.weights(shares, self._scratch)
            yield HandedExpert(number=number, weights=self._weights[number], device=self._scratch.device)

    def _share(self, number: int, parameter: Tensor) -> Tensor:
        """Return one expert's part: the first dimension counts the experts, or what each has as much of."""
        each = parameter.shape[0] // self._group.num_experts
        return parameter[number * each : (number + 1) * each]
