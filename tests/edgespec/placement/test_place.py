"""Memory budgets from limits, and the pair's plan for devices that are not there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV3Config, FalconConfig, LlamaConfig, PretrainedConfig

from edgespec.config import MemoryLimits
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.pair.pair import open_pair
from edgespec.placement.cache_memory import cache_bytes, placed_cache_bytes, state_sizes
from edgespec.placement.memory import CUDA_CONTEXT_BYTES, PassShape, draft_probs_rows, pass_bytes, placed_bytes
from edgespec.placement.place import Memory, PlacedWeights, pair_weights, place_weights, read_memory
from edgespec.placement.run_config import RunConfig
from edgespec.text.trees import check_tree_fits
from edgespec.tree.settings import TreeSettings
from offload.allocated import LARGE_BUFFER_BYTES, allocated_bytes
from offload.placement import Placement
from tests.support.allocator import RoundingAllocator
from tests.support.families import BY_LEVELS, EAGER_ONLY, FAMILIES, RECURRENT, SMALL, make_model

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with 10 of 12 GiB free, of which asking makes a context."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10 * GIB - CUDA_CONTEXT_BYTES, 12 * GIB))


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("limits", "expected_gib"),
    [
        (MemoryLimits(), 9),
        (MemoryLimits(gpu_margin_bytes=3 * GIB), 7),
        (MemoryLimits(gpu_margin_bytes=0), 10),
        (MemoryLimits(max_gpu_bytes=8 * GIB), 8),
        (MemoryLimits(max_gpu_bytes=8 * GIB, gpu_margin_bytes=3 * GIB), 7),
        (MemoryLimits(max_gpu_bytes=11 * GIB), 10),
        (MemoryLimits(gpu_margin_bytes=11 * GIB), 0),
    ],
)
def test_a_cards_budget_keeps_the_limit_and_the_margin(limits: MemoryLimits, expected_gib: int) -> None:
    assert read_memory(limits, CUDA).device_budget_bytes == expected_gib * GIB


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("limits", "usable_gib", "room_gib"),
    [
        (MemoryLimits(), 59, 8 - 1),  # a twelfth of 100 GiB, of which the margin is a part
        (MemoryLimits(max_cpu_bytes=59 * GIB), 59, 0),  # as the user has it
        (MemoryLimits(), 10, 0),  # a control group leaves enough to others
    ],
)
def test_the_system_keeps_room_where_memory_is_locked(
    limits: MemoryLimits, usable_gib: int, room_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose RAM is locked but for a GiB freezes, or kills a process."""
    there = SimpleNamespace(total=100 * GIB, available=60 * GIB)
    monkeypatch.setattr("edgespec.machine.host_memory.psutil.virtual_memory", lambda: there)
    monkeypatch.setattr("edgespec.placement.place.usable_host_bytes", lambda: usable_gib * GIB)
    memory = read_memory(limits, CUDA)
    assert (memory.host_budget_bytes, memory.host_room_bytes) == (usable_gib * GIB, room_gib * GIB)


def test_on_a_cpu_both_budgets_are_ram_and_pages_of_files_have_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.placement.place.usable_host_bytes", lambda: 5 * GIB)
    assert read_memory(MemoryLimits(max_cpu_bytes=3 * GIB, max_gpu_bytes=GIB), CPU) == Memory(
        device_budget_bytes=3 * GIB, host_budget_bytes=3 * GIB, cache_bytes=2 * GIB
    )
    assert read_memory(MemoryLimits(), CPU).cache_bytes == 0


def test_a_card_that_is_not_there_needs_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_memory(MemoryLimits(max_gpu_bytes=24 * GIB), CUDA).device_budget_bytes == 24 * GIB
    assert read_memory(MemoryLimits(max_gpu_bytes=24 * GIB, gpu_margin_bytes=GIB), CUDA).device_budget_bytes == 23 * GIB
    with pytest.raises(EdgespecError, match="`max_gpu_bytes`"):
        read_memory(MemoryLimits(), CUDA)


def small_deepseek() -> PretrainedConfig:
    return DeepseekV3Config(
        **{**SMALL, "num_hidden_layers": 1},
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        first_k_dense_replace=1,
    )


def small_falcon() -> PretrainedConfig:
    return FalconConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True)


def plan(
    *, quant: str | None = None, tree_size: int = 64, context_tokens: int = 512, prompt_tokens: int | None = None
) -> PlacedWeights:
    pair = open_pair(None, None)
    run_config = RunConfig(
        limits=MemoryLimits(max_cpu_bytes=4 * GIB, max_gpu_bytes=4 * GIB, max_resident_layers=0),
        device=CUDA,
        dtype=torch.bfloat16,
        quant=quant,
        draft_quant=quant,
        context_tokens=context_tokens,
        prompt_tokens=prompt_tokens or context_tokens,
    )
    weights = pair_weights(pair.target, pair.draft, run_config)
    return place_weights(weights, TreeSettings(size=tree_size), run_config, read_memory(run_config.limits, CUDA))


@pytest.mark.parametrize(("cache_bytes", "is_cacheable"), [(0, False), (GIB, True)])
def test_layers_that_stream_stay_in_the_page_cache_where_it_holds_them_all(
    cache_bytes: int, is_cacheable: bool
) -> None:
    """Pages that are read once a pass are gone before the next in a smaller one, and resident layers' with them."""
    pair = open_pair(None, None)
    run_config = RunConfig(
        limits=MemoryLimits(), device=CPU, dtype=torch.float32, context_tokens=512, prompt_tokens=512
    )
    weights = pair_weights(pair.target, pair.draft, run_config)

    def placed(budget_bytes: int) -> Placement:
        memory = Memory(device_budget_bytes=budget_bytes, host_budget_bytes=budget_bytes, cache_bytes=cache_bytes)
        return place_weights(weights, TreeSettings(), run_config, memory).placement

    whole = placed(GIB)
    placement = placed(whole.planned_bytes - 1)
    assert whole.is_cacheable
    assert placement.disk_bytes > 0
    assert placement.is_cacheable == is_cacheable


def test_every_part_grows_with_what_it_depends_on() -> None:
    small, wide, long = (
        plan().placement.device_bytes,
        plan(tree_size=768).placement.device_bytes,
        plan(context_tokens=4000).placement.device_bytes,
    )
    for name in ("target: one pass", "draft: one pass", "target: keys and values", "draft: keys and values"):
        assert wide[name] > small[name]
    assert long["target: keys and values"] > wide["target: keys and values"]
    assert long["draft: keys and values"] > small["draft: keys and values"]
    assert long["target: embeddings, norms, head"] == small["target: embeddings, norms, head"]


def test_quantised_plans_move_fewer_bytes_and_count_the_unpacked_weights() -> None:
    plain, int8, nf4 = (plan(quant=quant).placement for quant in (None, "int8", "nf4"))
    assert int8.streamed_bytes < 0.53 * plain.streamed_bytes
    assert nf4.streamed_bytes < 0.28 * plain.streamed_bytes
    assert "weights while unpacked" not in plain.device_bytes
    largest = 768 * 256 * 2  # the target's, in bfloat16
    assert nf4.device_bytes["weights while unpacked"] >= largest
    assert nf4.device_bytes["draft: weights"] < plain.device_bytes["draft: weights"]
    assert (
        plain.host_bytes["libraries, tokenizer"]
        == int8.host_bytes["libraries, tokenizer"]
        == nf4.host_bytes["libraries, tokenizer"] - (48 << 20)
    ), "nf4 is that of bitsandbytes"


def test_rows_of_keys_and_values_are_those_that_a_cache_keeps() -> None:
    for family, make in {**FAMILIES, "deepseek": small_deepseek, "falcon": small_falcon}.items():
        config = make()
        config._attn_implementation = "eager" if family in EAGER_ONLY else "sdpa"
        causal = CausalModel(make_model(config), device=CPU)
        text = causal.new_text()
        causal.read_text(text, torch.arange(5))
        assert cache_bytes(causal.config, rows=text.layers[0].capacity, dtype=torch.float32) == text.num_bytes > 0, (
            family
        )


@pytest.mark.parametrize("family", RECURRENT)
def test_states_and_rows_beside_them_are_those_that_a_cache_keeps(family: str) -> None:
    config = RECURRENT[family]()
    model = make_model(config)
    sizes = state_sizes(model, torch.float32)
    causal = CausalModel(model, device=CPU)
    text = causal.new_text()
    causal.read_text(text, torch.arange(8))  # none of which is folded yet
    keys_bytes = cache_bytes(config, rows=max(layer.capacity for layer in text.layers), dtype=torch.float32)
    mixers = [module for module in model.modules() if hasattr(module, "num_v_heads")]
    shared = sum((mixer.num_v_heads - mixer.num_k_heads) * mixer.head_k_dim for mixer in mixers)
    # Older versions of transformers repeat a group's key for each of its heads, and the plan counts that.
    state_bytes = 0 if family in BY_LEVELS else sizes.state_bytes  # the former have none before their first rows
    spare_bytes = keys_bytes + state_bytes + 8 * sizes.row_bytes - text.num_bytes
    assert spare_bytes in (0, 8 * shared * 4)
    text.truncate(0)
    causal.read_text(text, torch.arange(60))
    text.truncate()
    causal.read_text(text, torch.arange(20))
    keys_bytes = cache_bytes(config, rows=max(layer.capacity for layer in text.layers), dtype=torch.float32)
    assert keys_bytes + sizes.state_bytes < text.num_bytes <= keys_bytes + sizes.texts_bytes(num_texts=1, rows=20)


def test_a_mask_counts_for_every_head_of_a_group() -> None:
    """Keys are not repeated for the heads that share them; the mask is."""
    grouped = LlamaConfig(**{**SMALL, "num_attention_heads": 4}, num_key_value_heads=1)
    plain = LlamaConfig(**{**SMALL, "num_attention_heads": 4}, num_key_value_heads=4)
    shape = PassShape(prompt_rows=1, tree_rows=2, keys=30_000)
    repeated = 2 * 30_000 * 3 * 4  # rows, keys, heads more than one, float32
    assert pass_bytes(grouped, shape, dtype=torch.float32) - pass_bytes(plain, shape, dtype=torch.float32) >= repeated


def test_texts_under_way_count_once_each_in_caches_and_masks() -> None:
    config = LlamaConfig(**SMALL)
    shape = PassShape(prompt_rows=1, tree_rows=65, keys=3_000)
    one, eight = (pass_bytes(config, replace(shape, num_texts=count), dtype=torch.float32) for count in (1, 8))
    assert eight - one > 7 * 65 * 3_000 * 4, "each text has a mask"
    assert eight < 8 * one, "the layers' temporaries are those of one chunk"


def test_sampled_trees_need_room_for_the_distributions_that_they_keep() -> None:
    """In memory that is planned for coupled trees, whose distributions are looked at once, only small ones fit."""
    run_config = RunConfig(
        device=CPU, dtype=torch.float32, limits=MemoryLimits(), context_tokens=512, prompt_tokens=512
    )
    planned, large = TreeSettings(size=256), TreeSettings(policy="dyspec", size=200)
    check_tree_fits(large, planned, run_config, vocab=8_000)
    with pytest.raises(EdgespecError, match="room for 42") as caught:
        check_tree_fits(large, planned, run_config, vocab=128_256)
    assert "`policy=dyspec`, `size=200`" in caught.value.fix
    check_tree_fits(replace(large, size=42), planned, run_config, vocab=128_256)
    check_tree_fits(TreeSettings(policy="opt-tree", size=100), planned, run_config, vocab=128_256)
    check_tree_fits(large, large, run_config, vocab=128_256)
    records = replace(run_config, keeps_draft_probs=True)
    check_tree_fits(large, planned, records, vocab=128_256)
    config = LlamaConfig(**{**SMALL, "vocab_size": 128_256})
    shape = PassShape(prompt_rows=1, tree_rows=257, keys=1000)
    coupled, kept = (
        pass_bytes(config, replace(shape, probs_rows=draft_probs_rows(128_256, planned, one)), dtype=torch.float32)
        for one in (run_config, records)
    )
    assert kept > 4 * coupled


def test_a_long_context_is_not_masked() -> None:
    """Keys and values grow with the context; a pass hardly does."""
    short, long = (plan(context_tokens=tokens, prompt_tokens=500).placement.device_bytes for tokens in (8_000, 32_000))
    assert long["target: one pass"] == short["target: one pass"]
    assert long["target: keys and values"] > 3 * short["target: keys and values"]


@pytest.mark.parametrize("rows", [100, 3100, 4900, 30_000])
def test_caches_on_a_card_fit_the_plans_bytes(rows: int) -> None:
    """Each layer's keys and values are blocks of their own, which the allocator rounds up."""
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=10)
    allocator = RoundingAllocator()
    for _ in range(2 * 3 * config.num_hidden_layers):
        allocator.take(8 * 128 * rows * 2)
    planned_bytes = placed_cache_bytes(config, rows=3 * rows, num_texts=3, dtype=torch.bfloat16, device=CUDA)
    assert allocator.reserved_bytes <= planned_bytes + LARGE_BUFFER_BYTES
    assert placed_cache_bytes(config, rows=3 * rows, num_texts=3, dtype=torch.bfloat16, device=CPU) == cache_bytes(
        config, rows=3 * rows, dtype=torch.bfloat16
    )


def test_weights_on_a_card_count_with_what_the_allocator_rounds() -> None:
    pair = open_pair(None, None)
    (first, *_) = pair.draft.skeleton(pair.draft.checkpoint, dtype=torch.bfloat16).records
    assert placed_bytes(first, device=CUDA) == allocated_bytes(first.flat_bytes) > first.flat_bytes
    assert placed_bytes(first, device=CPU) == first.cpu_bytes
