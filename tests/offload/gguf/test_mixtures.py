"""What mixtures and hybrids store in another form: nothing of it is guessed, and what is no layer is named."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.checkpoint import TensorEntry, split_number
from offload.errors import CheckpointError
from offload.formats.gguf_blocks import TYPES
from offload.gguf.delta_net import Heads, in_runs
from offload.gguf.entries import numbered, of_one_type, packed
from offload.gguf.header import GgufHeader, GgufTensor, read_gguf
from offload.gguf.settings import config_fields
from tests.offload.gguf.test_refused import changed, read
from tests.offload.gguf.test_tiny_models import TINY

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another size of experts": ("gpt-oss", {"gpt-oss.expert_feed_forward_length": 16}, "feed_forward_length = 16"),
    "scores of another function": ("glm4moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func = 1"),
    "scores of no softmax": ("deepseek2", {"deepseek2.expert_gating_func": 2}, "expert_gating_func = 2"),
    "groups that no file of this size has": ("deepseek2", {"deepseek2.expert_group_count": None}, "group_count = None"),
    "another rank": ("deepseek3", {"deepseek2.attention.key_length": 24}, "attention.key_length = 24"),
    "no experts used": ("mixtral", {"llama.expert_used_count": None}, "lacks the setting llama.expert_used_count"),
    "a window without a size": ("gpt-oss", {"gpt-oss.attention.sliding_window": None}, "lacks the setting gpt-oss"),
    "more further layers than layers": ("glm4moe", {"glm4moe.nextn_predict_layers": 9}, "nextn_predict_layers = 9"),
    "layers without windows": ("llama4", {"llama4.attention.sliding_window": 0}, "attention.sliding_window = 0"),
    "heads that cannot be shared": ("qwen35", {"qwen35.ssm.group_count": 4}, "ssm.group_count = 4"),
    "too few kinds of layers": ("qwen3next", {"qwen3next.attention.recurrent_layers": [True]}, "recurrent_layers = "),
    "heads of keys that differ": ("lfm2", {"lfm2.attention.head_count_kv": [1, 2]}, r"head_count_kv = \[1, 2\]"),
    "no list of heads": ("granitehybrid", {"granitehybrid.attention.head_count_kv": [0]}, r"head_count_kv = \[0\]"),
    "heads that share no width": ("mamba2", {"mamba2.ssm.time_step_rank": 5}, "ssm.time_step_rank = 5"),
    "attention that Mamba 2 has not": ("mamba2", {"mamba2.attention.head_count": 4}, "head_count = 4, which is not 0"),
    "a width that is no multiple": ("mamba2", {"mamba2.ssm.inner_size": 40}, "ssm.inner_size = 40"),
    "a rotation of no layer": ("nemotron_h", {"nemotron_h_moe.rope.scaling.type": "yarn"}, "rope.scaling.type = yarn"),
    "latent experts": ("nemotron_h", {"nemotron_h_moe.moe_latent_size": 8}, "moe_latent_size = 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_a_mixture_does_not_have_refuses_the_file(tmp_path: Path, case: str) -> None:
    name, settings, reason = REFUSED[case]
    with pytest.raises(CheckpointError, match=reason):
        read(changed(tmp_path, name, settings))


def test_a_tied_falcon_h1_is_refused_since_its_head_has_a_multiplier_of_its_own() -> None:
    header = read_gguf(TINY / "falcon-h1.gguf")
    tied = {name: tensor for name, tensor in header.tensors.items() if name != "output.weight"}
    with pytest.raises(CheckpointError, match=r"output\.weight = tied"):
        config_fields(replace(header, tensors=tied))


@pytest.mark.parametrize("tensor", ["blk.0.attn_sinks.weight", "blk.1.ffn_gate_exps.bias", "blk.0.ffn_gate.0.weight"])
def test_a_tensor_that_a_mixture_does_not_have_refuses_the_file(tmp_path: Path, tensor: str) -> None:
    with pytest.raises(CheckpointError, match=f"has a tensor '{tensor}'"):
        read(changed(tmp_path, "mixtral", {}, tensor))


@pytest.mark.parametrize("tensor", ["blk.1.attn_qkv.weight", "blk.1.attn_gate.weight"])
@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_rows_that_are_not_those_of_all_heads_refuse_the_file(tmp_path: Path, name: str, tensor: str) -> None:
    with pytest.raises(CheckpointError, match=rf"has '{tensor}' of the shape \[4\]"):
        read(changed(tmp_path, name, {}, tensor))


def without_routers(header: GgufHeader) -> GgufHeader:
    """A header of which no tensor says how many experts there are."""
    return replace(header, tensors={name: one for name, one in header.tensors.items() if "ffn_gate_inp" not in name})


@pytest.mark.parametrize(("num_experts", "groups"), [(64, (1, 1)), (160, (8, 3)), (256, (8, 4)), (384, (1, 1))])
def test_published_groups_stand_for_those_that_a_file_of_this_size_leaves_out(
    tmp_path: Path, num_experts: int, groups: tuple[int, int]
) -> None:
    settings = {
        "deepseek2.expert_count": num_experts,
        "deepseek2.expert_group_count": None,
        "deepseek2.expert_group_used_count": None,
    }
    fields = config_fields(without_routers(read_gguf(changed(tmp_path, "deepseek3", settings))))
    assert (fields["n_group"], fields["topk_group"]) == groups


@pytest.mark.parametrize(("num_experts", "has_norms"), [(16, True), (128, False)])
def test_of_llama_4_only_the_one_of_128_experts_has_no_norms(tmp_path: Path, num_experts: int, has_norms: bool) -> None:
    header = read_gguf(changed(tmp_path, "llama4", {"llama4.expert_count": num_experts}))
    assert config_fields(without_routers(header))["use_qk_norm"] is has_norms


def test_matrices_of_several_types_in_a_parameter_are_unpacked() -> None:
    def piece(number: int, kind: str) -> TensorEntry:
        block = TYPES[kind]
        place = {"file": Path("a.gguf"), "offset": 0, "num_bytes": 2 * block.num_bytes}
        return numbered(packed("m", GgufTensor(name="t", block=block, shape=(2, 32), **place)), number)

    same = [piece(0, "Q8_0"), piece(1, "Q8_0")]
    assert of_one_type({one.name: one for one in same}) == {one.name: one for one in same}
    mixed = of_one_type({one.name: one for one in (piece(0, "Q8_0"), piece(1, "Q4_0"))})
    assert [(name, one.computed is not None, one.parameter_shape) for name, one in mixed.items()] == [
        ("m.weight[0]", True, (2, 32)),
        ("m.weight[1]", True, (2, 32)),
    ]
    rows = [replace(piece(0, "Q8_0"), is_in_turn=True), replace(piece(1, "Q4_0"), is_in_turn=True)]
    assert all(one.computed is None for one in of_one_type({one.name: one for one in rows}).values())


def test_numbers_behind_names() -> None:
    assert split_number("a.weight[12]") == ("a.weight", 12)
    assert split_number("a.weight") == ("a.weight", None)


def test_more_heads_than_rows_are_not_counted() -> None:
    tensor = GgufTensor(name="ssm_alpha", block=TYPES["F32"], shape=(2, 4), file=Path(), offset=0, num_bytes=32)
    runs = ((0, 1) if number < 3 else pytest.fail("goes on") for number in itertools.count())
    with pytest.raises(ValueError, match="2 rows are not those of all heads"):
        list(in_runs("in_proj_a", tensor, runs))


def test_value_heads_of_a_key_head_come_together() -> None:
    heads = Heads(keys=2, values=6, key_rows=8, value_rows=1)  # in the file: 0a 1a 0b 1b 0c 1c
    stored = torch.tensor([[0.0, 10, 1, 11, 2, 12]])
    assert heads.grouped(stored).tolist() == [[0, 1, 2, 10, 11, 12]]
    assert [first for first, _ in heads.value_runs(0, 1)] == [0, 2, 4, 1, 3, 5]
