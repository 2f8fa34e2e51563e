"""A mixture's output for rows whose router has spoken, from experts that come one by one.

The arithmetic is that of transformers' own grouped function, so that results are the same as with all experts in
memory: an expert's rows are multiplied together, in the order of rows, and a row's experts are summed in the order in
which the router named them. Where the format of an expert has a kernel, few rows are multiplied with it as it is
packed. Where an expert stays on the host, its rows go there and come back. Legend: n rows, k experts of a row, h the
hidden size.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offload.device import to_device
from offload.layouts.layout import Kernel, experts_stay_packed
from offload.layouts.onednn import in_few_sizes, multiply

if TYPE_CHECKING:
    from offload.experts.expert_group import ExpertWeight
    from offload.experts.expert_source import HandedExpert

    # An expert's number -> how many rows it has; what is handed out is valid until the next is taken
    Take = Callable[[Mapping[int, int]], Generator[HandedExpert]]


def mix(module: nn.Module, take: Take, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the sum [n, h] of the experts `chosen` [n, k] for `hidden` [n, h], weighted by `shares` [n, k].

    `take` hands the experts out, in any order. A number beyond the last expert stands for none at all.
    """
    num_rows, each = chosen.shape
    # Which weights are needed is decided here, on the host: on an accelerator this waits for the router.
    if num_rows == 1:
        numbers = chosen[0].tolist()
        outputs = _outputs(module, take, dict.fromkeys(numbers, hidden))
        parts = torch.cat([outputs[number] for number in numbers])
    else:
        in_order, order = chosen.reshape(-1).cpu().sort(stable=True)
        counts = Counter(in_order.tolist())
        order = to_device(order, hidden.device)  # places of a row and one of its experts, by expert
        rows = hidden.index_select(0, order // each).split(list(counts.values()))
        outputs = _outputs(module, take, dict(zip(counts, rows, strict=True)))
        parts = torch.cat(list(outputs.values())).index_select(0, order.argsort())
    return (parts.view(num_rows, each, -1) * shares[..., None]).sum(1).to(hidden.dtype)


def products(weight: ExpertWeight, inputs: Tensor) -> Tensor:
    """Return the rows times a weight, as it is packed or in blocks."""
    inputs = inputs.to(weight.dtype)
    if weight.kernel is not None and _takes(weight.kernel, inputs):
        return weight.kernel.product(weight.parts, inputs, None)
    if weight.is_transposed or inputs.dtype == torch.float32:
        padded, product = in_few_sizes(inputs), torch.matmul if weight.is_transposed else nn.functional.linear
        outputs = [product(padded, block)[: len(inputs)] for block in weight.blocks()]
    else:  # torch's own product of two rows may have other bits than that of eight
        outputs = [multiply(inputs, block) for block in weight.blocks()]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _takes(kernel: Kernel, inputs: Tensor) -> bool:
    """Return whether the kernel multiplies an expert's rows, of which other texts' may be some."""
    asked = experts_stay_packed.get()
    return kernel.takes(inputs) if asked is None else asked or kernel.max_rows == sys.maxsize


def _outputs(module: nn.Module, take: Take, rows_of: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return what each expert makes of its rows, in the same order; those of no expert become zeros."""
    none: int = module.num_experts  # type: ignore[assignment]
    outputs = {number: torch.zeros_like(rows) for number, rows in rows_of.items() if number >= none}
    with closing(take({number: rows.shape[0] for number, rows in rows_of.items() if number not in outputs})) as taken:
        for expert in taken:
            outputs[expert.number] = _expert_output(module, expert, rows_of[expert.number])
    return {number: outputs[number] for number in rows_of}


def _expert_output(module: nn.Module, expert: HandedExpert, inputs: Tensor) -> Tensor:
    """Return what one expert makes of its rows, on the device of the rows."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, first, expert, inputs.to(expert.device))
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)  # type: ignore[operator]
    output = to_device(_linear(module, "down_proj", expert, inner), inputs.device)
    if getattr(module, "has_post_expert_norm", False):
        output = module.post_expert_norm(output)  # type: ignore[operator]
    return output


def _linear(module: nn.Module, name: str, expert: HandedExpert, inputs: Tensor) -> Tensor:
    """Return the rows times one of the expert's weights, and its bias, which lives with the dense parts."""
    output = products(expert.weights[name], inputs)
    if module.has_bias:
        output += getattr(module, f"{name}_bias")[expert.number].to(output.device)
    return output
