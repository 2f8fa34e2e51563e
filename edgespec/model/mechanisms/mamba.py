"""Mamba 2's scan. Legend: n rows of all texts, m of one, g heads of keys, h of values, k and v their widths."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PretrainedConfig

from edgespec.model.mechanisms.fading_memory import FadingMemory, MemoryForm, memory_dtype, memory_of
from edgespec.model.mechanisms.recurrent import Plain, of_texts, read_rows
from edgespec.model.mechanisms.state_cache import Rows, StateRows
from edgespec.model.pass_rows import Span

# Families' names of a layer's heads, their width, their groups, and of the layer's width over the model's
HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_expand"),
    ("num_heads", "head_dim", "n_groups", "expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_expand"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(MemoryForm):
    """Mamba 2's scan: a row writes its own input, times its step."""

    steps: Tensor  # [m, h], before bias, softplus and limits
    rates: Tensor  # [h], of the decay of a step

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rows by transformers' chunks, whose states are [h, v, k]."""
        inputs, steps, keys, queries = (
            part[None, :count] for part in (self.inputs, self.steps, self.keys, self.queries)
        )
        states = {"initial_states": state.mT.contiguous()[None], "return_final_states": True}
        out, last = self.plain(inputs, steps, self.rates, keys, queries, **self.options | states)
        return out[0].float(), last[0].to(state.dtype).mT.contiguous()

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Read the writing of ancestors, faded by the steps between."""
        dtype = memory_dtype(self.inputs)
        bias, skip = self.options.get("dt_bias"), self.options.get("D")  # [h] each
        steps = self.steps[first:]
        steps = steps if bias is None else steps + bias.to(steps.dtype)
        steps = softplus(steps) if self.options.get("dt_softplus") else steps
        steps = steps.clamp(*self.options.get("dt_limit", (0.0, math.inf))).to(dtype)
        inputs, keys = self.inputs[first:].to(dtype), self.keys[first:]
        memory = memory_of(held, keys, self.rates.to(dtype) * steps, visible)
        written = (steps[..., None] * inputs).transpose(0, 1)
        by_state, weights = memory.found(self.queries[first:])
        out = (by_state + weights @ torch.cat([memory.open, written], 1)).transpose(0, 1)
        out = out if skip is None else out + skip.to(dtype)[:, None] * inputs
        return out.float(), memory.rows(keys, written)


class MambaScan(FadingMemory):
    """The memory of Mamba 2's scan."""

    function = "mamba2_chunk_scan"
    shape_names = ("n_groups", "ssm_state_size", "num_heads", "head_dim")

    @staticmethod
    def rows(
        plain: Plain,
        spans: Sequence[Span],
        hidden_states: Tensor,  # [1, n, h, v]
        dt: Tensor,  # [1, n, h]
        A: Tensor,  # [h]  # noqa: N803
        B: Tensor,  # [1, n, g, k]  # noqa: N803
        C: Tensor,  # [1, n, g, k]  # noqa: N803
        **options: Any,
    ) -> Any:
        """Return the rows' outputs [1, n, h, v]; their states stay with the texts."""
        parts = zip(*(of_texts(spans, whole) for whole in (hidden_states, dt, B, C)), strict=True)
        forms = [
            Mamba2(plain=plain, inputs=inputs, steps=steps, rates=A, keys=keys, queries=queries, options=options)
            for inputs, steps, keys, queries in parts
        ]
        found = read_rows(spans, forms)
        return (found, None) if options.get("return_final_states", False) else found

    def narrow(self, config: PretrainedConfig, hidden_size: int) -> dict[str, Any]:
        """Return at most two groups, with enough heads for the width."""
        changes: dict[str, Any] = {}
        for heads, width, groups, expand in HEADS:
            has_heads = all(getattr(config, name, None) for name in (heads, width, expand))
            if has_heads and not getattr(config, "mamba_d_ssm", None):
                changes[heads] = getattr(config, expand) * hidden_size // getattr(config, width)
                changes[groups] = min(2, getattr(config, groups))
        return changes
