"""What a layer's gated delta rule is made of, found by its parts: none is known by its family's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from edgespec.model.mechanisms.fading_memory import memory_dtype
from edgespec.model.native.mlp import part_names
from edgespec.model.native.shape import DeltaShape

OTHERS = {"conv1d", "norm", "out_proj", "dt_bias", "A_log"}
ALONE, IN_GROUPS = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}, {"in_proj_qkvz", "in_proj_ba"}
UNPACKED_AT_ONCE = 256  # columns of a weight: what is multiplied for that is in no plan
SIZES = {"key_heads": "num_k_heads", "heads": "num_v_heads", "key_width": "head_k_dim", "value_width": "head_v_dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaMixer:
    """The numbers of a gated delta rule."""

    shape: DeltaShape
    linear: dict[str, nn.Module]  # by product
    parts: dict[str, Tensor]  # by field of a layer's record


@torch.no_grad()
def delta_mixer(mixer: Any, dtype: torch.dtype) -> DeltaMixer | None:
    """Return the numbers of a mixer, which takes rows of this dtype; None of one with other parts."""
    names, modules = part_names(mixer), mixer._modules
    in_groups = names == OTHERS | IN_GROUPS
    if not in_groups and names != OTHERS | ALONE:
        return None
    taps, norm = modules["conv1d"], modules["norm"]
    sizes: dict[str, Any] = {name: getattr(mixer, attribute, None) for name, attribute in SIZES.items()}
    eps: Any = getattr(norm, "variance_epsilon", None)
    is_known = isinstance(taps, nn.Conv1d) and taps.bias is None and taps.dilation == (1,) and isinstance(eps, float)
    if not is_known or not all(isinstance(size, int) for size in sizes.values()):
        return None
    if in_groups:  # rates and decays stand side by side for each head of keys
        both = _rows(mixer.in_proj_ba, dtype).unflatten(0, (sizes["key_heads"], -1)).chunk(2, 1)
        weights = [half.flatten(0, 1) for half in both]
    else:
        weights = [_rows(linear, dtype) for linear in (mixer.in_proj_b, mixer.in_proj_a)]
    shape = DeltaShape(
        **sizes,
        taps=taps.kernel_size[0],
        in_groups=in_groups,
        is_weight_bf16=weights[0].dtype == torch.bfloat16,
        is_wide=memory_dtype(torch.empty(0, dtype=dtype)) == torch.float64,
        eps=eps,
    )
    if weights[0].dtype not in {torch.bfloat16, torch.float32} or len({weight.dtype for weight in weights}) > 1:
        return None
    beyond = (0, shape.padded_heads - shape.heads)
    parts = {
        "taps": taps.weight.detach()[:, 0].float().T.contiguous(),  # [taps, channels]
        "rate_weight": weights[0].contiguous(),
        "decay_weight": weights[1].contiguous(),
        "decay_bias": pad(mixer.dt_bias.detach().float(), beyond),
        "decay_factor": pad(-mixer.A_log.detach().float().exp(), beyond),
        "memory_norm": norm._parameters["weight"].detach().float().contiguous(),
    }
    names_of = ("in_proj_qkvz",) if in_groups else ("in_proj_qkv", "in_proj_z")
    linear = dict(zip(("mixed", "gating"), (modules[name] for name in names_of), strict=False))
    return DeltaMixer(shape=shape, linear=linear | {"output": modules["out_proj"]}, parts=parts)


def _rows(linear: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight [rows, columns] of a small linear layer, unpacked."""
    weight: Tensor | None = linear._parameters.get("weight")
    if type(linear) is nn.Linear and weight is not None and not weight.is_meta:
        return weight.detach()
    columns, found = torch.arange(linear.in_features), list[Tensor]()
    for some in columns.split(UNPACKED_AT_ONCE):
        found.append(linear((columns == some[:, None]).to(dtype)))
    return torch.cat(found).T
