"""Experts are multiplied as they are packed, or unpacked one by one: in memory, with their layers and on demand."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from offload.checkpoint import Checkpoint, read_checkpoint
from offload.experts.expert_group import ExpertWeight
from offload.experts.expert_placement import place_on_demand
from offload.experts.expert_source import HandedExpert
from offload.experts.mixture import mix
from offload.formats.bitsandbytes_4bit import Bitsandbytes4Bit
from offload.formats.published import temporary_bytes
from offload.layouts.bitsandbytes import BITSANDBYTES_4BIT
from offload.layouts.int4 import INT4_LAYOUT, Int4
from offload.layouts.int4_lanes import LaneOrder
from offload.layouts.int4_orders import kernel_order
from offload.layouts.layout import Kernel
from offload.placement import Placement
from offload.quantized_cache import load_or_quantize
from offload.skeleton import Skeleton
from offload.streamed_model import StreamedModel
from tests.offload.experts.mixtures import with_room_for
from tests.offload.layouts.pretend_kernels import pretend_kernels
from tests.offload.streaming import CPU, UNLIMITED, logits, skeleton_of, unlimited_placement
from tests.support.families import EXPERTS, WINDOW, make_model, save_folder

BF16 = torch.bfloat16
F32 = torch.float32
ROWS = (20, 1, 7, 1)
EXPERT_SHAPES = {(192, 64), (64, 96)}  # gate and up together, and down
needs_kernel = pytest.mark.skipif(kernel_order() is None, reason="torch has no such kernel for this processor")


def place_in_memory(skeleton: Skeleton) -> Placement:
    return unlimited_placement(skeleton)


def place_in_stream(skeleton: Skeleton) -> Placement:
    return unlimited_placement(skeleton, resident=0)


def place_apart(skeleton: Skeleton) -> Placement:
    dense, groups = skeleton.dense_records, skeleton.expert_groups
    return with_room_for(place_on_demand(dense, groups, device_memory={}, device_budget_bytes=UNLIMITED), 2)


PLACES: dict[str, Callable[[Skeleton], Placement]] = {
    "in-memory": place_in_memory, "streamed-with-layers": place_in_stream, "on-demand": place_apart,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose matrices have whole blocks of int4."""
    config = Qwen3MoeConfig(
        **{**EXPERTS, "hidden_size": 64}, head_dim=16, num_experts=8, moe_intermediate_size=96, norm_topk_prob=True
    )
    return save_folder(tmp_path_factory.mktemp("mixture"), make_model(config, dtype=BF16))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def packed(folder: Path, quant: str, cache: Path) -> Checkpoint:
    return load_or_quantize(skeleton_of(folder), read_checkpoint(folder), quant, cache_folder=cache, device=CPU)


def loaded(checkpoint: Checkpoint, folder: Path, place: str, dtype: torch.dtype = BF16) -> StreamedModel:
    skeleton = skeleton_of(folder, dtype, checkpoint=checkpoint)
    return StreamedModel(skeleton, PLACES[place](skeleton), device=CPU)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_experts_are_equal_wherever_they_live(dtype: torch.dtype, folder: Path, cache: Path) -> None:
    checkpoint = packed(folder, "int4", cache)
    found = []
    for place in PLACES:
        with closing(loaded(checkpoint, folder, place, dtype)) as model:
            found.append([logits(model.model, rows=rows) for rows in ROWS])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@pytest.mark.parametrize("place", PLACES)
def test_experts_that_no_row_chose_are_not_unpacked(
    place: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel multiplies them."""
    monkeypatch.setattr(LaneOrder, "runs_on", lambda *_: False)
    shapes: list[tuple[int, ...]] = []
    unpack = Int4.unpack

    def noted(self: Int4, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        shapes.append(tuple(out.shape))
        return unpack(self, parts, out)

    with closing(loaded(packed(folder, "int4", cache), folder, place, torch.float32)) as model:
        monkeypatch.setattr(Int4, "unpack", noted)
        logits(model.model, rows=1)
    assert len([shape for shape in shapes if shape in EXPERT_SHAPES]) >= 3 * 2 * 2  # layers, experts of a row, matrices
    assert all(len(shape) == 2 for shape in shapes)


@pytest.mark.parametrize("place", ["in-memory", "streamed-with-layers"])
def test_a_card_unpacks_all_experts_of_a_layer_only_where_rows_choose_a_quarter_of_them(
    place: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaneOrder, "runs_on", lambda *_: False)
    config = Qwen3MoeConfig(
        **{**EXPERTS, "hidden_size": 64}, head_dim=16, num_experts=32, moe_intermediate_size=96, norm_topk_prob=True
    )
    folder = save_folder(tmp_path, make_model(config, dtype=BF16))
    checkpoint = packed(folder, "int4", cache)
    with closing(loaded(checkpoint, folder, place, F32)) as model:
        expected = [logits(model.model, rows=rows) for rows in ROWS]
    shapes: list[tuple[int, ...]] = []
    unpack = Int4.unpack

    def noted(self: Int4, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        shapes.append(tuple(out.shape))
        return unpack(self, parts, out)

    monkeypatch.setattr(Skeleton, "computed_singly", lambda _self, _device, on_demand=False: ())
    monkeypatch.setattr(Skeleton, "few_singly", lambda self, _device, on_demand=False: self.expert_groups)
    with closing(loaded(checkpoint, folder, place, F32)) as model:
        monkeypatch.setattr(Int4, "unpack", noted)
        for rows, same in zip(ROWS, expected, strict=True):
            shapes.clear()
            torch.testing.assert_close(logits(model.model, rows=rows), same)
            assert {len(shape) for shape in shapes if shape[-2:] in EXPERT_SHAPES} == {2 if 4 * 2 * rows < 32 else 3}


def test_a_card_without_grouped_products_computes_few_plain_experts_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton, card = skeleton_of(folder), torch.device("cuda", 0)
    assert len(skeleton.few_singly(card)) == len(skeleton.expert_groups) > 0
    assert not skeleton.few_singly(card, on_demand=True)
    assert not skeleton.few_singly(CPU)
    monkeypatch.setattr("offload.skeleton.has_grouped_products", lambda _device: True)
    assert not skeleton.few_singly(card)


@needs_kernel
@pytest.mark.parametrize("place", PLACES)
def test_few_rows_are_multiplied_with_packed_experts_and_many_with_unpacked_ones(
    place: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied: list[int] = []
    unpacked: list[tuple[int, ...]] = []
    kernel, unpack = INT4_LAYOUT.kernel, Int4.unpack

    def for_few_rows(stored: Int4, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
        found = kernel(stored, shape, dtype, device)
        assert found is not None

        def multiply(parts: Mapping[str, Tensor], rows: Tensor, bias: Tensor | None) -> Tensor:
            multiplied.append(len(rows))
            return found.multiply(parts, rows, bias)

        return replace(found, max_rows=max_rows, multiply=multiply) if shape in EXPERT_SHAPES else found

    def noted(self: Int4, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        unpacked.append(tuple(out.shape))
        return unpack(self, parts, out)

    pretend_kernels({"int4": for_few_rows}, monkeypatch)
    monkeypatch.setattr(Int4, "unpack", noted)
    found, num_products, max_rows = [], set(), 0
    checkpoint = packed(folder, "int4", cache)
    for max_rows in (100, 5, 0):
        multiplied.clear()
        unpacked.clear()
        with closing(loaded(checkpoint, folder, place)) as model:
            found.append(logits(model.model))
        num_products.add(len(multiplied) + len(unpacked))
        assert max(multiplied, default=0) <= max_rows
        assert (bool(multiplied), bool(unpacked)) == (max_rows > 0, max_rows < 20)
        assert set(unpacked) <= EXPERT_SHAPES
    assert len(num_products) == 1, "each of an expert's two matrices once, either way"
    for others in found[1:]:
        torch.testing.assert_close(others, found[0], rtol=0.1, atol=0.1)


def test_a_cards_kernel_multiplies_rows_with_one_experts_share(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is bitsandbytes' own, which computes the same on a CPU."""
    shapes, kernel = set(), BITSANDBYTES_4BIT.kernel

    def of_a_card(
        stored: Bitsandbytes4Bit, shape: tuple[int, ...], dtype: torch.dtype, _: torch.device
    ) -> Kernel | None:
        found = kernel(stored, shape, dtype, torch.device("cuda"))
        shapes.update([shape] if found else [])
        return found

    checkpoint, found = packed(folder, "nf4", cache), []
    for _ in range(2):
        with closing(loaded(checkpoint, folder, "on-demand", torch.float32)) as model:
            found.append(logits(model.model))
        pretend_kernels({"nf4": of_a_card}, monkeypatch)
    assert (192, 64) in shapes
    assert (64, 96) not in shapes, "blocks of 64 straddle its rows"
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)


def test_experts_that_are_stored_transposed_are_unpacked(tmp_path: Path, cache: Path) -> None:
    """int4 has groups of gpt-oss' outputs, and no kernel sums over them."""
    config = GptOssConfig(**{**EXPERTS, "hidden_size": 64}, head_dim=16, num_local_experts=8, sliding_window=WINDOW)
    folder = save_folder(tmp_path, make_model(config, dtype=BF16))
    checkpoint = packed(folder, "int4", cache)
    found = []
    for dtype in (BF16, torch.float32):
        with closing(loaded(checkpoint, folder, "in-memory", dtype)) as model:
            found.append(logits(model.model).float())
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


@needs_kernel
def test_what_experts_make_of_a_row_does_not_depend_on_other_rows(folder: Path, cache: Path) -> None:
    torch.manual_seed(1)
    hidden, shares = torch.randn(20, 64, dtype=BF16), torch.rand(20, 2)
    chosen = torch.stack([torch.randperm(8)[:2] for _ in hidden])
    with closing(loaded(packed(folder, "int4", cache), folder, "in-memory")) as model:
        experts = model.model.model.layers[0].mlp.experts
        together = experts(hidden, chosen, shares)
        for row in range(20):
            own = slice(row, row + 1)
            assert torch.equal(experts(hidden[own], chosen[own], shares[own]), together[own])


def test_weights_that_come_anew_are_seen(folder: Path, cache: Path) -> None:
    """A stream gives a layer other memory in each pass."""
    hidden, shares, chosen = torch.randn(2, 64), torch.rand(2, 2), torch.tensor([[0, 3], [3, 5]])
    with closing(loaded(packed(folder, "int4", cache), folder, "in-memory", torch.float32)) as model:
        first, second, _ = (layer.mlp.experts for layer in model.model.model.layers)
        expected = second(hidden, chosen, shares)
        assert not torch.equal(first(hidden, chosen, shares), expected)
        for packed_weight in ("gate_up_proj_packed", "down_proj_packed"):
            first._modules[packed_weight]._parameters.update(second._modules[packed_weight]._parameters)
        assert torch.equal(first(hidden, chosen, shares), expected)


@needs_kernel
def test_trees_give_plain_decodings_text_wherever_experts_live(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(cache))
    texts: dict[str, list[tuple[int, ...]]] = {}
    for name, options in {
        "plain": {"tree": TreeSettings(policy="none")},
        "in memory": {"draft": folder, "experts": "resident"},
        "streamed": {"draft": folder, "experts": "stream", "limits": MemoryLimits(max_resident_layers=0)},
        "on demand": {"draft": folder, "limits": MemoryLimits(max_resident_layers=0)},
    }.items():
        with Engine.from_pretrained(folder, quant="int4", dtype="bfloat16", context_tokens=96, **options) as engine:
            texts[name] = [
                engine.generate("def ", max_new_tokens=24, seed=3, sampling=SamplingSettings(temperature=t)).token_ids
                for t in (0.0, 0.8)
            ]
    assert all(found == texts["plain"] for found in texts.values())


def test_closing_gives_the_modules_their_own_forward_back(folder: Path, cache: Path) -> None:
    with closing(loaded(packed(folder, "int4", cache), folder, "in-memory")) as model:
        experts = model.model.model.layers[0].mlp.experts
        assert "forward" in experts.__dict__
    assert "forward" not in experts.__dict__


def take_plain(own: Qwen3MoeExperts, rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
    for number in rows_of:
        stored = {name: getattr(own, name)[number] for name in ("gate_up_proj", "down_proj")}
        weights = {
            name: ExpertWeight(blocks=partial(iter, [weight]), dtype=BF16, is_transposed=False)
            for name, weight in stored.items()
        }
        yield HandedExpert(number=number, weights=weights, device=CPU)


@pytest.mark.parametrize(("hidden", "inner"), [(2048, 256), (32, 24), (64, 16)])
def test_a_row_of_plain_experts_in_memory_has_the_same_bits_among_any_rows(hidden: int, inner: int) -> None:
    """Torch's product of all experts gives one row of an expert other bits than several."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=16, num_experts_per_tok=4)
    config._experts_implementation = "eager"
    own = Qwen3MoeExperts(config).to(torch.bfloat16).requires_grad_(False)
    for parameter in own.parameters():
        parameter.normal_(std=0.02)
    rows, shares = torch.randn(128, hidden).bfloat16(), torch.rand(128, 4).bfloat16()
    chosen = torch.stack([torch.randperm(16)[:4] for _ in range(128)])
    take = partial(take_plain, own)
    alone = [
        mix(own, take, rows[place : place + 1], chosen[place : place + 1], shares[place : place + 1])
        for place in range(128)
    ]
    assert torch.equal(mix(own, take, rows, chosen, shares), torch.cat(alone))


def test_plain_experts_in_memory_are_computed_one_by_one_on_a_cpu(folder: Path) -> None:
    with closing(loaded(read_checkpoint(folder), folder, "in-memory")) as model:
        assert "forward" in model.model.model.layers[0].mlp.experts.__dict__


@pytest.mark.parametrize("quant", ["int8", "nf4", "int4"])
def test_a_plan_counts_the_weights_of_one_expert_on_a_cpu_and_of_a_layer_on_a_card(
    quant: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaneOrder, "runs_on", lambda *_: False)
    monkeypatch.setattr("offload.layouts.bitsandbytes.is_available", lambda: False)
    skeleton = skeleton_of(folder, F32, checkpoint=packed(folder, quant, cache))
    linear, matrix, layer = 64 * 64, 192 * 64, 8 * (192 + 96) * 64
    card = torch.device("cuda")
    assert skeleton.num_scratch(F32, card) == layer
    assert skeleton.num_scratch(F32, CPU) == skeleton.num_scratch(F32, card, on_demand=True) == linear
    on_cpu, on_card = (skeleton.unpack_bytes(F32, device) - temporary_bytes(device) for device in (CPU, card))
    assert (on_cpu, on_card) == (4 * (linear + matrix), 4 * (layer + matrix))
