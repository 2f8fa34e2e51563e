"""A mixture's experts by size and place: nothing is lost between dense parts and experts, and memory is shared out."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from edgespec.cli.open_engine import where_layers_live
from edgespec.config import MemoryLimits
from edgespec.draft.calls import BY_LAYER, DraftCalls
from edgespec.estimate import speed
from edgespec.estimate.speed import (
    PairOnHardware,
    SpeedEstimate,
    estimate_best,
    estimate_plain,
    load_there,
    memory_there,
    open_hardware,
    packed_kernels_tokens_per_s,
    place_on,
    rates_of,
)
from edgespec.pair.folder import open_architecture
from edgespec.placement.expert_load import expert_modules, mixture_sizes
from edgespec.placement.pass_load import layers_load, model_load, with_locked
from edgespec.placement.place import PlacedWeights, pair_weights, place_weights
from edgespec.placement.run_config import RunConfig
from edgespec.placement.step_seconds import step_seconds
from edgespec.placement.weights import Weights
from edgespec.tree.settings import TreeSettings
from offload.layouts import int4_orders
from profiles.roofline import ExpertLoad, ModelLoad
from tests.support.families import FAMILIES, GROUPED

GIB = 1 << 30
CUDA = torch.device("cuda:0")
BIG: dict[str, Any] = {  # 12 layers of 64 experts of 12 MiB
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 1024, "num_hidden_layers": 12,
    "num_experts": 64, "num_experts_per_tok": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


def run_place(**settings: Any) -> RunConfig:
    return RunConfig(
        **{"device": CUDA, "dtype": torch.bfloat16, "limits": MemoryLimits(), "context_tokens": 256,
           "prompt_tokens": 256, **settings}
    )  # fmt: skip


def weights_of(folder: Path, config: PretrainedConfig, run_config: RunConfig) -> Weights:
    config.save_pretrained(folder)
    return pair_weights(open_architecture(folder), None, run_config).target


def big_pair(folder: Path, *, ram: int, num_texts: int = 1, with_draft: bool = False) -> PairOnHardware:
    hardware, assumptions = open_hardware("rtx-3060")
    limits = MemoryLimits(max_cpu_bytes=ram * GIB, max_gpu_bytes=3 * GIB)
    run_config = run_place(limits=limits, num_texts=num_texts)
    Qwen3MoeConfig(**BIG).save_pretrained(folder / "target")
    LlamaConfig(**{**GROUPED, "vocab_size": 32000}).save_pretrained(folder / "draft")
    draft = open_architecture(folder / "draft") if with_draft else None
    weights = pair_weights(open_architecture(folder / "target"), draft, run_config)
    memory = memory_there(hardware, assumptions, limits)
    return PairOnHardware(
        weights=weights, hardware=hardware, assumptions=assumptions, run_config=run_config, memory=memory
    )


def test_a_block_is_one_call_of_its_rows_whatever_the_tree(tmp_path: Path) -> None:
    pair = big_pair(tmp_path, ram=5, with_draft=True)
    load, rates = load_there(pair, place_on(pair, TreeSettings(size=16))), rates_of(pair, pair.assumptions.likely)

    def draft_s(calls: DraftCalls, *, nodes: int, depth: int) -> float:
        return step_seconds(replace(load, calls=calls), rates, 1, nodes=nodes, depth=depth, tokens=2.0).draft_s

    block = DraftCalls(num_places=7, num_rows=8)
    one = draft_s(BY_LAYER, nodes=8, depth=1)
    assert draft_s(block, nodes=8, depth=2) == draft_s(block, nodes=256, depth=7) == one
    assert draft_s(BY_LAYER, nodes=64, depth=8) == pytest.approx(8 * one)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("quant", [None, "nf4"])
def test_dense_parts_and_experts_are_all_of_the_layers(tmp_path: Path, family: str, quant: str | None) -> None:
    weights = weights_of(tmp_path, FAMILIES[family](), run_place(quant=quant))
    whole = layers_load(weights, None, keys=16, num_texts=1, device=CUDA, are_whole=True)
    apart = model_load(weights, None, keys=16, num_texts=1, device=CUDA)
    experts = apart.experts
    assert apart.resident_bytes + experts.all_bytes == sum(record.flat_bytes for record in weights.skeleton.records)
    assert experts.num_experts == 4
    assert experts.row_flops == 2 * 3 * 32 * (16 if family == "qwen3-moe" else 64)
    assert (experts.unpacked_bytes > 0) == (quant is not None)
    chosen_flops = experts.num_layers * experts.chosen * experts.row_flops
    assert apart.row_flops + chosen_flops == pytest.approx(whole.row_flops)
    assert apart.resident_bytes + experts.all_bytes == whole.resident_bytes
    assert apart.unpacked_bytes + experts.num_layers * 4 * experts.unpacked_bytes == whole.unpacked_bytes


def test_a_router_is_no_expert_and_a_dense_model_has_none(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, FAMILIES["qwen3-moe"](), run_place())
    assert all(name.endswith(".mlp.experts.") for name in expert_modules(weights))
    dense = weights_of(tmp_path, LlamaConfig(**GROUPED), run_place())
    assert mixture_sizes(dense, CUDA) is None
    plan = place_weights(pair_weights(dense.model, None, run_place()), TreeSettings(policy="none"), run_place(),
                         memory_there(*open_hardware("rtx-3060"), MemoryLimits()))  # fmt: skip
    assert load_of(plan).experts is None


def placed(pair: PairOnHardware) -> PlacedWeights:
    return place_weights(pair.weights, TreeSettings(policy="none"), pair.run_config, pair.memory)


def load_of(plan: PlacedWeights, device: torch.device = CUDA) -> ModelLoad:
    return model_load(plan.target, plan.placement, keys=256, num_texts=1, device=device)


def test_what_the_dense_parts_leave_of_the_card_and_of_ram_holds_experts(tmp_path: Path) -> None:
    load = load_of(placed(big_pair(tmp_path, ram=5)))
    experts = load.experts
    assert load.resident_bytes == load.layer_bytes
    assert 0 < experts.device_kept < experts.ram_kept < experts.num_experts
    on_card = load.resident_bytes + experts.device_kept * experts.num_layers * experts.expert_bytes
    assert 1.5 * GIB < on_card < 2.5 * GIB, "of 3 GiB, what the context, the head and keys leave"
    in_ram = experts.ram_kept * experts.num_layers * experts.expert_bytes
    assert 5 * GIB > in_ram > 4 * GIB, "libraries and the pages of a layer that is read have the rest"


def test_dense_parts_that_do_not_fit_the_card_come_from_ram_and_then_from_disk(tmp_path: Path) -> None:
    pair = big_pair(tmp_path, ram=5)
    whole = placed(pair).placement
    sizes = mixture_sizes(placed(pair).target, CUDA)
    tight_bytes = (
        whole.planned_bytes - whole.experts.kept_bytes - sum(sizes.dense_bytes) // 2 + 3 * max(sizes.dense_bytes)
    )
    for host_bytes, are_in_ram in ((5 * GIB, True), (GIB, False)):
        memory = replace(pair.memory, device_budget_bytes=tight_bytes, host_budget_bytes=host_bytes)
        load = load_of(placed(replace(pair, memory=memory)))
        parts = (load.resident_bytes, load.ram_bytes, load.disk_bytes)
        assert sum(parts) == sum(sizes.dense_bytes)
        assert parts[0] < sum(parts)
        assert (parts[1] > 0) == are_in_ram or parts[2] == 0
        assert load.experts.device_kept <= load.experts.ram_kept


def test_on_a_cpu_the_experts_that_stay_are_those_in_ram(tmp_path: Path) -> None:
    run_config = run_place(device=torch.device("cpu"), limits=MemoryLimits(max_cpu_bytes=4 * GIB))
    pair = replace(big_pair(tmp_path, ram=5), run_config=run_config)
    weights = pair_weights(pair.weights.target.model, None, run_config)
    memory = memory_there(*open_hardware("cpu"), run_config.limits)
    plan = place_weights(weights, TreeSettings(policy="none"), run_config, memory)
    experts = load_of(plan, run_config.device).experts
    assert 0 < experts.device_kept == experts.ram_kept < 64


def tokens_per_s(estimate: SpeedEstimate) -> float:
    return estimate.likely.tokens_per_s


def test_a_pass_fetches_the_experts_of_its_rows_and_more_memory_leaves_fewer_to_fetch(tmp_path: Path) -> None:
    short, roomy = (estimate_plain(big_pair(tmp_path, ram=ram)) for ram in (4, 16))
    assert short.likely.experts.asked == roomy.likely.experts.asked == pytest.approx(12 * 4)
    assert short.likely.experts.disk_bytes > 0
    assert roomy.likely.experts.disk_bytes == 0
    assert tokens_per_s(roomy) > 2 * tokens_per_s(short)
    whole_s = placed(big_pair(tmp_path, ram=16)).placement.streamed_bytes / (0.8 * 15.75e9)
    assert roomy.likely.step_s < whole_s / 2, "whole layers would have to move"


def test_trees_are_smaller_where_their_nodes_add_experts(tmp_path: Path) -> None:
    """The same card and draft: of a dense target that streams, large trees pay."""
    rates = [0.7, 0.12, 0.05, 0.03]
    assert estimate_best(big_pair(tmp_path, ram=4, with_draft=True), TreeSettings(), rates, size=None).nodes <= 4
    dense = big_pair(tmp_path, ram=16, with_draft=True)
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=32000)  # fmt: skip
    config.save_pretrained(tmp_path / "dense")
    weights = replace(dense.weights, target=weights_of(tmp_path / "dense", config, dense.run_config))
    assert estimate_best(replace(dense, weights=weights), TreeSettings(), rates, size=None).nodes >= 64


def test_packed_experts_move_because_unpacking_takes_longer_and_kernels_would_not(tmp_path: Path) -> None:
    pair = big_pair(tmp_path, ram=16)
    run_config = replace(pair.run_config, quant="nf4", limits=replace(pair.run_config.limits, max_gpu_bytes=2 * GIB))
    weights = pair_weights(pair.weights.target.model, None, run_config)
    memory = memory_there(pair.hardware, pair.assumptions, run_config.limits)
    packed = replace(
        pair, weights=weights, run_config=run_config, memory=replace(memory, device_budget_bytes=int(2.2 * GIB))
    )
    estimate = estimate_plain(packed)
    assert estimate.likely.experts.in_place == 0
    found = packed_kernels_tokens_per_s(packed, estimate)
    assert found is not None
    assert found >= tokens_per_s(estimate)
    roomy = replace(packed, memory=replace(pair.memory, device_budget_bytes=40 * GIB))
    assert packed_kernels_tokens_per_s(roomy, estimate_plain(roomy)) is None, "all of them are on the card"


@pytest.mark.skipif(int4_orders.kernel_order() is None, reason="torch has no kernel here")
def test_experts_in_a_format_with_a_kernel_are_multiplied_as_they_are_packed(tmp_path: Path) -> None:
    pair = big_pair(tmp_path, ram=16)

    def sizes_of(quant: str, device: torch.device) -> ExpertLoad:
        run_config = replace(pair.run_config, quant=quant, device=device)
        sizes = mixture_sizes(pair_weights(pair.weights.target.model, None, run_config).target, device)
        return sizes.experts

    on_cpu, beside_card = (sizes_of("int4", device) for device in (torch.device("cpu"), CUDA))
    assert on_cpu.multiplied.num_weights == 3 * 2048 * 1024
    assert on_cpu.multiplied.num_bytes == pytest.approx(on_cpu.expert_bytes, rel=0.05)
    assert (beside_card.multiplied, beside_card.host_multiplies) == (None, True)
    assert sizes_of("nf4", torch.device("cpu")).multiplied is None
    packed = replace(pair, run_config=replace(pair.run_config, quant="int4"))
    packed = replace(packed, weights=pair_weights(pair.weights.target.model, None, packed.run_config))
    assert packed_kernels_tokens_per_s(packed, estimate_plain(packed)) is None, "the CPU's kernel is edgespec's too"


def test_experts_that_are_to_stay_with_the_cpu_have_ram_and_the_card_has_the_rest(tmp_path: Path) -> None:
    pair = big_pair(tmp_path, ram=5)
    pair = replace(pair, run_config=replace(pair.run_config, expert_mode="cpu"))
    plan = placed(pair)
    kept_experts = load_of(plan).experts
    assert plan.placement.num_resident == 12
    assert (kept_experts.device_kept, kept_experts.is_on_host) == (0, True)
    assert 0 < kept_experts.ram_kept < 64
    assert sum(plan.placement.host_bytes.values()) <= 5 * GIB
    line = where_layers_live(SimpleNamespace(placement=plan.placement))
    kept = plan.placement.experts.num_kept
    assert line.startswith(f"12 of 12 layers resident, their experts computed on the CPU: {kept} of 768 kept in RAM, ")
    assert plan.placement.disk_bytes == plan.placement.experts.num_left * plan.placement.experts.expert_bytes
    experts = estimate_plain(pair).likely.experts
    assert (experts.in_place, experts.link_bytes) == (experts.asked, 0)
    assert experts.disk_bytes > 0


def test_under_wsl_little_waits_in_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = big_pair(tmp_path, ram=5)
    for limit, is_staged in ((math.inf, False), (1 << 20, True)):
        limited = replace(pair, locked_bytes=limit)
        assert speed.load_there(limited, placed(pair)).target.experts.are_staged == is_staged
    dense = replace(load_of(placed(pair)), ram_bytes=9, experts=None)
    assert [with_locked(dense, limit).staged_bytes for limit in (math.inf, 9, 4)] == [0, 0, 5]
    assumptions = pair.assumptions
    for spills, limit in ((True, 1 << 29), (False, math.inf)):
        monkeypatch.setattr(speed, "locks_little", lambda spills=spills: spills)
        monkeypatch.setattr(sys, "platform", "linux")
        assert speed.locked_bytes_here(assumptions) == limit
