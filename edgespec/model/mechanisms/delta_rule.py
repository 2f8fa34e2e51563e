"""The gated delta rule. Legend: n rows of all texts, m of one, g heads of keys, h of values, k and v their widths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.model.mechanisms.fading_memory import FadingMemory, MemoryForm, memory_dtype, memory_of
from edgespec.model.mechanisms.recurrent import Plain, of_texts, read_rows
from edgespec.model.mechanisms.state_cache import Rows, StateRows
from edgespec.model.pass_rows import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule(MemoryForm):
    """The gated delta rule: a row writes the part of its input that its key does not find yet, times its rate."""

    decays: Tensor  # [m, h], logarithms
    rates: Tensor  # [m, h]

    def through(self, count: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the rows by transformers' chunks."""
        out, last = self.plain(
            *(part[None, :count] for part in (self.queries, self.keys, self.inputs)),
            g=self.decays[None, :count],
            beta=self.rates[None, :count],
            **self.options | {"initial_state": state[None], "output_final_state": True},
        )
        return out[0], last[0].to(state.dtype)

    def beside(self, first: int, held: StateRows, visible: Tensor) -> tuple[Tensor, Rows]:
        """Solve for the writing of all rows, under the mask of their ancestors."""
        dtype, kept = memory_dtype(self.inputs), self.keys.dtype
        queries = self._normed(self.queries[first:].to(dtype)) * self.queries.shape[-1] ** -0.5
        keys = self._normed(self.keys[first:].to(dtype)).to(kept)  # as later rows will find them
        memory = memory_of(held, keys, self.decays[first:].to(dtype), visible)
        by_state, weights = memory.found(torch.cat([keys.to(dtype), queries]))
        num_rows, num_open = len(keys), held.num_open
        known = by_state[:, :num_rows] + weights[:, :num_rows, :num_open] @ memory.open
        rates = self.rates[first:].to(dtype).T[..., None]
        unknown = rates * (self.inputs[first:].to(dtype).transpose(0, 1) - known)
        system = rates * weights[:, :num_rows, num_open:]  # parents come first; its diagonal is taken to be 1
        written = torch.linalg.solve_triangular(system, unknown, upper=False, unitriangular=True)
        out = by_state[:, num_rows:] + weights[:, num_rows:] @ torch.cat([memory.open, written], 1)
        return out.transpose(0, 1).to(self.queries.dtype), memory.rows(keys, written)

    def _normed(self, rows: Tensor) -> Tensor:
        is_normed = self.options.get("use_qk_l2norm_in_kernel", False)
        return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6) if is_normed else rows


class GatedDeltaRule(FadingMemory):
    """The memory of the gated delta rule."""

    function = "torch_chunk_gated_delta_rule"
    # The oldest transformers we run with repeats a group's key for each of its heads.
    shape_names = ("num_v_heads", "head_k_dim", "num_v_heads", "head_v_dim")
    small_sizes: ClassVar = {"linear_num_heads": 2}

    @staticmethod
    def rows(
        plain: Plain,
        spans: Sequence[Span],
        query: Tensor,  # [1, n, g, k]
        key: Tensor,  # [1, n, g, k]
        value: Tensor,  # [1, n, h, v]
        g: Tensor,  # [1, n, h]
        beta: Tensor,  # [1, n, h]
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return the rows' outputs [1, n, h, v]; their states stay with the texts."""
        parts = zip(*(of_texts(spans, whole) for whole in (query, key, value, g, beta)), strict=True)
        forms = [
            DeltaRule(
                plain=plain, queries=queries, keys=keys, inputs=inputs, decays=decays, rates=rates, options=options
            )
            for queries, keys, inputs, decays, rates in parts
        ]
        return read_rows(spans, forms), None

    def narrow(self, config: PretrainedConfig, hidden_size: int) -> dict[str, Any]:
        """Return two heads of keys, and as many of values for each as there are."""
        if not getattr(config, "linear_num_key_heads", None):
            return {}
        groups = config.linear_num_value_heads // config.linear_num_key_heads
        return {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * groups}
