"""What an inflated draft is made of: heads, drafters of blocks, and a target's own layer, beside an inflated target.

The inflated target's hidden states repeat the small one's, so that a draft's do too: what makes its stream of them
reads one repetition and writes all, and all else is as in the target. What knows no width stays as it is.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgespec.draft.eagle3 import AUX_IDS
from edgespec.pair.folder import ModelFolder
from scripts.make.inflated_parts import Part, Role, Shape, query_places, shape_of

SIZES = {
    "hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "inner": "intermediate_size",
}  # fmt: skip
ROLES: Sequence[tuple[str, Role]] = (  # of tensors whose name ends so
    (r"self_attn\.[qk]_norm\.weight", "aside"),
    (r"hnorm\.weight", "renorm"),
    (r"(e|layer)?norm\.weight", "norm"),
    (r"self_attn\.q_proj\.weight", "reads"),
    (r"self_attn\.[kv]_proj\.weight", "reads"),
    (r"self_attn\.o_proj\.weight", "writes"),
    (r"mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up)_proj\.weight", "reads"),
    (r"mlp\.(experts\.\d+\.|shared_experts\.)?down_proj\.weight", "writes"),
    (r"mlp\.gate\.weight", "reads"),
    (r"kernel_projection\.weight", "mixes"),
    (r"base_kernel", "repeats"),
    (r"(fc|eh_proj)\.weight", "writes"),
    (r"(lm_head|hidden_projection)\.weight", "reads"),
    (r"d2t|t2d|e_score_correction_bias|markov_w[12]\.weight|(predecessor|successor)_codebook(\.weight)?", "kept"),
)


def layers_passed(places: Mapping[int, int], count: int, large: Shape) -> int:
    """How many layers of the large model its stream has passed that is the small one's behind `count` layers."""
    return {layer: place for place, layer in places.items()}.get(count, large.layers)


def check_sizes(stated: Mapping[str, Any], small: Shape) -> None:
    """Raise ValueError where a draft's layers are not of its target's sizes."""
    for name, key in SIZES.items():
        if stated.get(key) != getattr(small, name):
            raise ValueError(f"the draft's {key} is {stated.get(key)}, and its target's {getattr(small, name)}")


def inflated_config(stated: Mapping[str, Any], large: Shape, places: Mapping[int, int]) -> dict[str, Any]:
    """The config.json of a draft of the large model; `places` says which of its layers hold which of the small one."""
    config = copy.deepcopy(dict(stated))
    config |= {key: getattr(large, name) for name, key in SIZES.items()}
    of_head, of_blocks = config.get("eagle_config"), config.get("dflash_config")
    if of_head:
        of_head[AUX_IDS] = [layers_passed(places, count, large) for count in of_head[AUX_IDS]]
    elif of_blocks:
        of_blocks["target_layer_ids"] = [
            layers_passed(places, layer + 1, large) - 1 for layer in of_blocks["target_layer_ids"]
        ]
        config["num_target_layers"] = large.layers
    else:
        raise ValueError("the draft is no EAGLE-3 head in the plain container and no drafter of blocks in z-lab's")
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a draft before and after."""

    small: Shape
    large: Shape
    head_dim: int
    num_groups: int = 1  # of the small one's channels that share what a convolution's kernel is made of

    @property
    def repetitions(self) -> int:
        """How often the large hidden state has the small one."""
        return self.large.hidden // self.small.hidden

    def inner(self, size: int) -> int:
        """The inner size of a part, which grows as those of the target's layers do."""
        return size * self.large.inner // self.small.inner

    def states(self, columns: int) -> int:
        """The number of hidden states side by side in so many columns of the small draft."""
        return columns // self.small.hidden


def own_layer_parts(source: ModelFolder, large: Shape) -> list[Part]:
    """The tensors of the layer of multi-token prediction behind the last one, where a checkpoint has one."""
    start = f"model.layers.{source.config.num_hidden_layers}."
    sizes = Sizes(small=shape_of(source), large=large, head_dim=source.config.head_dim)
    return [
        draft_part(f"model.layers.{large.layers}.{name.removeprefix(start)}", name, entry.shape, sizes)
        for name, entry in source.checkpoint.tensors.items()
        if name.startswith(start)
    ]


def draft_part(name: str, stored: str, shape: Sequence[int], sizes: Sizes) -> Part:
    """The part `name` of a large draft that a tensor `stored` of this shape becomes.

    Raises ValueError for a tensor that is not known.
    """
    role = next((role for pattern, role in ROLES if re.search(rf"(^|[._]){pattern}$", stored)), None)
    hidden, rows, columns = sizes.large.hidden, shape[0], shape[-1]
    if role in {"aside", "kept"}:
        return Part(name, stored, role, tuple(shape), torch.arange(rows))
    if role in {"norm", "renorm"}:
        return Part(name, stored, role, (hidden,), torch.arange(rows))
    if role == "repeats":
        return Part(name, stored, role, (*shape[:-1], columns * sizes.repetitions), torch.arange(rows))
    if role == "mixes":
        groups = torch.arange(rows).view(-1, sizes.num_groups).repeat(1, sizes.repetitions).flatten()
        return Part(name, stored, role, (groups.shape[0], hidden), groups)
    if role == "writes":
        places, count = _written(stored, columns, sizes)
        return Part(name, stored, role, (hidden, count), places)
    if role == "reads":
        places, count = _read(stored, rows, sizes)
        segments = sizes.states(columns)
        return Part(name, stored, role, (count, segments * hidden), places, segments=segments)
    raise ValueError(f"'{stored}' is no tensor of a draft that can be inflated")


def _written(stored: str, columns: int, sizes: Sizes) -> tuple[Tensor, int]:
    """Where the columns of a tensor that writes go, and how many there are."""
    small, large = sizes.small, sizes.large
    if stored.endswith("o_proj.weight"):
        return query_places(small, large, sizes.head_dim), large.heads * sizes.head_dim
    if stored.endswith("down_proj.weight"):
        return torch.arange(columns), sizes.inner(columns)
    starts = torch.arange(sizes.states(columns))[:, None] * large.hidden
    return (starts + torch.arange(small.hidden)).flatten(), starts.shape[0] * large.hidden


def _read(stored: str, rows: int, sizes: Sizes) -> tuple[Tensor, int]:
    """Where the rows of a tensor that reads go, and how many there are."""
    count = rows
    if stored.endswith("q_proj.weight"):
        return query_places(sizes.small, sizes.large, sizes.head_dim), sizes.large.heads * sizes.head_dim
    if stored.endswith(("k_proj.weight", "v_proj.weight")):
        count = sizes.large.kv_heads * sizes.head_dim
    elif stored.endswith(("gate_proj.weight", "up_proj.weight")):
        count = sizes.inner(rows)
    return torch.arange(rows), count
