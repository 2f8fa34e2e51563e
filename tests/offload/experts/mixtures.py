"""Tiny mixtures of experts of many families, in folders, and what a limit leaves of their experts in memory."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, Glm4MoeConfig, GptOssConfig, GraniteMoeConfig, OlmoeConfig, PretrainedConfig

from offload.experts.expert_group import ExpertGroup
from offload.experts.expert_placement import place_on_demand
from offload.experts.expert_use import ExpertUse
from offload.placement import ExpertPlacement, Placement
from offload.skeleton import Skeleton
from offload.streamed_model import StreamedModel
from tests.offload.streaming import CPU, UNLIMITED, skeleton_of, streamed_logits, unlimited_placement
from tests.support.families import EXPERTS, FAMILIES, GROUPED, MIXED, RECURRENT, WINDOW, make_model, save_folder

EIGHT: dict[str, Any] = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
MIXTURES: dict[str, Callable[[], PretrainedConfig]] = {
    **{name: FAMILIES[name] for name in ("qwen3-moe", "mixtral")},
    **{name: RECURRENT[name] for name in ("qwen3.5-moe", "nemotron-h", "granite-hybrid")},
    "gpt-oss": lambda: GptOssConfig(
        **EXPERTS, head_dim=8, num_local_experts=8, layer_types=MIXED, sliding_window=WINDOW
    ),
    "glm4-moe": lambda: Glm4MoeConfig(**EXPERTS, **EIGHT, head_dim=8, first_k_dense_replace=1, n_shared_experts=1),
    "deepseek-v3": lambda: DeepseekV3Config(
        **{**EXPERTS, "num_key_value_heads": 4}, **EIGHT, first_k_dense_replace=1, n_shared_experts=1,
        q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "olmoe": lambda: OlmoeConfig(**EXPERTS, num_experts=8),
    "granite-moe": lambda: GraniteMoeConfig(**GROUPED, num_local_experts=8, num_experts_per_tok=3),
}  # fmt: skip


def save_mixture(folder: Path, family: str, *, shard: str = "5GB") -> Path:
    """A folder of a random mixture in bfloat16."""
    return save_folder(folder, make_model(MIXTURES[family](), dtype=torch.bfloat16), shard=shard)


def with_room_for(placement: Placement, num_experts: int | None) -> Placement:
    """The placement with so many experts in memory at a time; None leaves all."""
    experts = placement.experts
    assert isinstance(experts, ExpertPlacement)
    return dataclasses.replace(
        placement, experts=dataclasses.replace(experts, num_kept=num_experts or experts.num_experts)
    )


def placement_of(
    groups: Sequence[ExpertGroup], *, slots: int, pinned: int, use: ExpertUse | None = None
) -> ExpertPlacement:
    """So many experts in slots, and so many in pinned memory."""
    return ExpertPlacement(
        num_experts=sum(group.num_experts for group in groups), num_kept=slots, num_pinned=pinned,
        expert_bytes=max(group.expert_flat_bytes for group in groups), use=use,
    )  # fmt: skip


@contextmanager
def on_demand(
    folder: Path, *, room: int | None = None, dtype: torch.dtype = torch.float32, is_cacheable: bool = True
) -> Iterator[StreamedModel]:
    """The model with all dense parts streamed and room for so many experts; None is room for all."""
    skeleton = skeleton_of(folder, dtype)
    placement = place_on_demand(
        skeleton.dense_records, skeleton.expert_groups, device_memory={}, device_budget_bytes=UNLIMITED, max_resident=0
    )
    placement = replace(with_room_for(placement, room), is_cacheable=is_cacheable)
    with closing(StreamedModel(skeleton, placement, device=CPU)) as model:
        yield model


def found_logits(skeleton: Skeleton, *, resident: int, on_demand: bool = False) -> Tensor:
    """The logits of a checkpoint of which some layers are resident, and the others stream, with or without experts."""
    placement = unlimited_placement(skeleton, resident=resident)
    if on_demand:
        placement = with_room_for(
            place_on_demand(skeleton.dense_records, skeleton.expert_groups, device_memory={},
                            device_budget_bytes=UNLIMITED, max_resident=resident),
            2,
        )  # fmt: skip
    return streamed_logits(skeleton, placement, rows=40)
