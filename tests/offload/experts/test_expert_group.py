"""A layer's experts are found where transformers describes them, and each is a slice that stands for itself."""

from pathlib import Path

import pytest
import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from offload.experts.expert_group import scratch_weights
from offload.formats.bitsandbytes_4bit import NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.layer_store import LayerStore
from tests.offload.experts.mixtures import MIXTURES, save_mixture
from tests.offload.streaming import skeleton_of
from tests.support.families import FAMILIES, make_model, save_folder


@pytest.mark.parametrize("family", ["llama", "llama4"])
def test_layers_without_experts_that_are_described_stay_whole(family: str, tmp_path: Path) -> None:
    """Llama 4 multiplies with all experts at once, in a way of its own."""
    skeleton = skeleton_of(save_folder(tmp_path, make_model(FAMILIES[family]())))
    assert not skeleton.expert_groups
    assert [record.tensors for record in skeleton.dense_records] == [record.tensors for record in skeleton.records]


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_slices_of_the_weights_of_all(family: str, tmp_path: Path) -> None:
    model = make_model(MIXTURES[family](), dtype=torch.bfloat16)
    skeleton = skeleton_of(save_folder(tmp_path, model), torch.bfloat16)
    assert skeleton.expert_groups
    store = LayerStore({entry.file for record in skeleton.records for entry in record.entries})
    for group in skeleton.expert_groups:
        assert group.num_experts == len(group.experts)
        for number, record in enumerate(group.experts):
            weights = group.weights(store.pieces(record), torch.empty(scratch_weights([group]), dtype=torch.bfloat16))
            for attribute, weight in weights.items():
                expected = model.get_parameter(f"{group.module_name}.{attribute}")[number]
                assert torch.equal(torch.cat(list(weight.blocks())), expected)


def test_pieces_that_follow_each_other_in_the_file_are_one(tmp_path: Path) -> None:
    """Gate and up of Qwen3's experts do; Mixtral's have `w2` between them."""
    for family, pieces in (("qwen3-moe", 1), ("mixtral", 2)):
        group = skeleton_of(save_mixture(tmp_path / family, family)).expert_groups[0]
        assert [len(record.tensors["gate_up_proj"].pieces) for record in group.experts] == [pieces] * 4


def test_shares_of_packed_weights_are_packed_by_themselves() -> None:
    shape = (4, 256, 64)
    weight = torch.randn(shape)
    for known in (NF4, INT8):
        packing, parts = known.pack(weight)
        share = packing.of_share(shape, 4)
        assert share is not None
        whole = packing.unpack(parts, torch.empty(shape))
        for number in range(4):
            own = {part: tensor.flatten().chunk(4)[number] for part, tensor in parts.items()}
            own = {part: own[part].view(form) for part, (form, _) in share.part_shapes(shape[1:]).items()}
            assert torch.equal(share.unpack(own, torch.empty(shape[1:])), whole[number])
    assert NF4.of_share((4, 255, 64), 4) is None  # a block of scales would belong to two experts


def test_scales_are_nested_where_experts_do_not_share_them() -> None:
    for shape, is_nested in (((4, 256, 64), True), ((4, 255, 64), False), ((4, 3, 16), True)):  # blocks shared as well
        known = NF4.for_shares(shape, 4)
        packing, parts = known.pack(torch.randn(shape))
        assert packing.nested == known.nested == is_nested == ("nested_absmax" in parts)
        assert (packing.of_share(shape, 4) is None) == (shape == (4, 3, 16))
    assert INT8.for_shares((4, 255, 64), 4) is INT8


@pytest.mark.parametrize("quant", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_quantised_experts_come_on_demand_or_with_their_layers(family: str, quant: str, tmp_path: Path) -> None:
    """The experts here are so small that several would share nf4's scales of scales."""
    target = save_mixture(tmp_path, family)
    texts = []
    for experts in ("auto", "stream"):
        with Engine.from_pretrained(
            target,
            tree=TreeSettings(policy="none"),
            quant=quant,
            experts=experts,
            context_tokens=64,
            limits=MemoryLimits(max_resident_layers=0),
        ) as engine:
            assert (engine.placement.experts is not None) == (experts == "auto")
            texts.append(engine.generate("def main(", max_new_tokens=12).token_ids)
    assert texts[0] == texts[1]
