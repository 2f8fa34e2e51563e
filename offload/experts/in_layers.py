"""Packed experts that live in their layers, resident or streamed: only those that rows chose are computed."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack

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
        module.forward = functools.partial(mix, module, functools.partial(_taken, group, module, scratch))
        undo.callback(module.__dict__.pop, "forward", None)


def _taken(
    group: ExpertGroup, module: nn.Module, scratch: Tensor, rows_of: Mapping[int, int]
) -> Generator[HandedExpert]:
    """Yield experts by their shares of the module's parameters, which are there while its layer runs."""
    whole = {name: module.get_parameter(name) for name in group.tensors}
    for number in rows_of:
        shares = {name: [_share(tensor, number, group.num_experts)] for name, tensor in whole.items()}
        yield HandedExpert(number=number, weights=group.weights(shares, scratch), device=scratch.device)


def _share(tensor: Tensor, number: int, num_experts: int) -> Tensor:
    """Return one expert's part: the first dimension counts the experts, or what each has as much of."""
    each = tensor.shape[0] // num_experts
    return tensor[number * each : (number + 1) * each]
