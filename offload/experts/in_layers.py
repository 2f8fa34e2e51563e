"""Experts that live in their layers, resident or streamed: only those that rows chose are computed.

On a card that holds where rows choose few of a layer's: the host waits for the router, and issues each expert's calls.
"""

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.experts.expert_group import ExpertGroup, scratch_weights
from offload.experts.expert_source import HandedExpert
from offload.experts.mixture import mix
from offload.native.weights import NativeWeight, of_experts

FEW = 4  # rows choose few experts where those are fewer than one in so many of a layer's


def hook_experts_in_layers(
    model: PreTrainedModel,
    groups: Sequence[ExpertGroup],
    undo: ExitStack,
    *,
    device: torch.device,
    few_only: bool = False,
) -> None:
    """Let the modules of `groups` compute with their own parameters, until `undo` is closed.

    With `few_only` their own forward goes on where rows choose many experts.
    """
    scratch = torch.empty(scratch_weights(groups), dtype=model.dtype, device=device)
    for group in groups:
        module = model.get_submodule(group.module_name)
        experts = _ExpertsInLayer(group, module, scratch)
        singly = functools.partial(mix, module, experts.take)
        module.forward = _by_number(module, singly) if few_only else singly
        vars(module)["native"] = experts.native
        for name in ("forward", "native"):
            undo.callback(module.__dict__.pop, name, None)


def chooses_few(module: nn.Module, _hidden: Tensor, chosen: Tensor, *_: Any) -> bool:
    """Return whether the experts `chosen` [n, k] are few of the module's, all of them different at most."""
    return FEW * chosen.numel() < int(module.num_experts)  # type: ignore[arg-type]


def _by_number(module: nn.Module, singly: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward that computes few experts one by one, and many as the module does."""
    together = module.forward

    def forward(*arguments: Any) -> Tensor:
        found: Tensor = (singly if chooses_few(module, *arguments) else together)(*arguments)
        return found

    return forward


class _ExpertsInLayer:
    """One layer's experts as shares of their module's parameters, which are there while the layer runs."""

    def __init__(self, group: ExpertGroup, module: nn.Module, scratch: Tensor) -> None:
        self._group, self._scratch = group, scratch
        owners = {name: name.rpartition(".") for name in group.tensors}
        self._places = [(module.get_submodule(owner)._parameters, leaf) for owner, _, leaf in owners.values()]
        self._turned = {matrix.attribute for matrix in group.matrices if matrix.is_turned}
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

    def native(self, attribute: str) -> NativeWeight | None:
        """Return a weight of all experts for a pass that is one native call; None where a kernel cannot take it."""
        weights = [expert.weights[attribute] for expert in self.take(dict.fromkeys(range(self._group.num_experts), 1))]
        kernels = [weight.kernel.native for weight in weights if weight.kernel and weight.kernel.native]
        if len(kernels) < len(weights):
            return None
        return of_experts([kernel(weight.parts) for kernel, weight in zip(kernels, weights, strict=True)])

    def _expert(self, number: int) -> HandedExpert:
        shares = {
            name: [share.mT if name in self._turned else share]
            for name, of in zip(self._group.tensors, self._parameters, strict=True)
            for share in [self._share(number, of)]
        }
        weights = self._group.weights(shares, self._scratch)
        return HandedExpert(number=number, weights=weights, device=self._scratch.device)

    def _share(self, number: int, parameter: Tensor) -> Tensor:
        """Return one expert's part: the first dimension counts the experts, or what each has as much of."""
        each = parameter.shape[0] // self._group.num_experts
        return parameter[number * each : (number + 1) * each]
