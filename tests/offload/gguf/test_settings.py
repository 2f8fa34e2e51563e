"""What a file may leave out, or state in another way, is what llama.cpp takes it for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.gguf.checkpoint import gguf_checkpoint
from offload.gguf.families import FAMILIES
from offload.gguf.header import read_gguf
from offload.gguf.settings import config_fields
from tests.offload.gguf.test_refused import TINY, changed

ALL, WINDOW = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# tiny model, what is changed in its file, what its config then has
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no base": ("smollm3", {"smollm3.rope.freq_base": None}, {"rope_theta": 10000.0}),
    "the whole head rotates": ("glm4", {"glm4.rope.dimension_count": None}, {"partial_rotary_factor": 1.0}),
    "no pattern of windows": (
        "olmo3", {"olmo2.attention.sliding_window_pattern": None}, {"layer_types": [WINDOW, WINDOW, WINDOW, ALL]}
    ),
    "every second layer": (
        "cohere2", {"cohere2.attention.sliding_window_pattern": 2}, {"layer_types": [WINDOW, ALL, WINDOW, ALL]}
    ),
    "another first layer": (
        "cohere2", {"cohere2.attention.sliding_window_pattern": [False, True, True, True]},
        {"layer_types": [ALL, WINDOW, WINDOW, WINDOW]},
    ),
    "no windows": (
        "gemma3", {"gemma3.attention.sliding_window": None}, {"sliding_window": 256, "layer_types": [ALL] * 6}
    ),
    "the usual window": ("gemma2", {"gemma2.attention.sliding_window": None}, {"sliding_window": 4096}),
    "Olmo 3 with one base": (
        "olmo3", {"olmo2.rope.freq_base_swa": None, "olmo2.rope.freq_base": 70.0},
        {"model_type": "olmo3", "rope_parameters": {
            ALL: {**YARN, "attention_factor": 1.25, "rope_theta": 70.0},
            WINDOW: {"rope_type": "default", "rope_theta": 70.0},
        }},
    ),
    "no scales": (
        "granite", {f"granite.{name}": None for name in ("attention.scale", "embedding_scale", "residual_scale")},
        {"attention_multiplier": 0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0},
    ),
    "logits as they are": ("command-r", {"command-r.logit_scale": None}, {"logit_scale": 1.0}),
    "yarn's ramp": (
        "llama-yarn", {"llama.rope.scaling.finetuned": True, "llama.rope.scaling.yarn_ext_factor": 1.0},
        {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "yarn from all positions": (
        "qwen2-yarn", {"qwen2.rope.scaling.original_context_length": None},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 256}},
    ),
    "Mistral Small 3": (
        "mistral3", {"mistral3.attention.temperature_scale": None, "mistral3.rope.scaling.yarn_log_multiplier": None},
        {"model_type": "llama"},
    ),
    "HunYuan's base": (
        "hunyuan-dense", {},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}},
    ),
    "HunYuan's smaller base": (
        "hunyuan-dense", {"hunyuan-dense.rope.freq_base": 1842015.75},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}},
    ),
    "a HunYuan that is not scaled": (
        "hunyuan-dense",
        {f"hunyuan-dense.rope.scaling.{name}": None for name in ("type", "factor", "original_context_length")}
        | {"hunyuan-dense.rope.freq_base": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
    ),
    "a part of the head": (
        "gemma4", {}, {"head_dim": 4, "global_head_dim": 8, "intermediate_size": 8, "use_double_wide_mlp": True,
                       "vocab_size_per_layer_input": 64, "attention_k_eq_v": False},
    ),
    "keys that are values": (
        "gemma4-same", {}, {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    ),
    "the usual windows of Gemma 3n": (
        "gemma3n", {"gemma3n.attention.sliding_window_pattern": None, "gemma3n.rope.freq_base_swa": None},
        {"layer_types": [WINDOW] * 4, "rope_parameters": {
            ALL: {"rope_type": "default", "rope_theta": 1000000.0},
            WINDOW: {"rope_type": "default", "rope_theta": 10000.0},
        }},
    ),
    "layers of several widths": (
        "gemma3n", {"gemma3n.feed_forward_length": [16, 16, 32, 32], "gemma3n.activation_sparsity_scale": [0.0] * 4},
        {"intermediate_size": [16, 16, 32, 32], "activation_sparsity_pattern": [0.5] * 4},
    ),
    "experts in groups": (
        "deepseek2", {"deepseek2.expert_group_count": 2},
        {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    "V2's yarn": (
        "deepseek2",
        {"deepseek2.rope.scaling.type": "yarn", "deepseek2.rope.scaling.factor": 40.0,
         "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707},
        {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 256,
                          "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "V3's yarn": (
        "deepseek3", {"deepseek2.rope.scaling.yarn_log_multiplier": 0.0707},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.707,
                          "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "a whole number as the first files of Gemma 3n have it": (
        "gemma3n", {"gemma3n.attention.shared_kv_layers": 2.0}, {"num_kv_shared_layers": 2}
    ),
    "weights of experts that do not add up to one": (
        "glm4moe", {"glm4moe.expert_weights_norm": None}, {"norm_topk_prob": False}
    ),
    "no expert for all tokens": (
        "granitemoe", {"granitemoe.expert_shared_feed_forward_length": 0}, {"model_type": "granitemoe"}
    ),
    "attention that rotates": (
        "granitehybrid", {"granitehybrid.rope.scaling.finetuned": True}, {"position_embedding_type": "rope"}
    ),
    "a layer with attention by their interval": (
        "qwen35", {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 2},
        {"layer_types": ["linear_attention", ALL]},
    ),
    "no layer with attention": (
        "qwen3next", {"qwen3next.attention.recurrent_layers": None, "qwen3next.full_attention_interval": None},
        {"layer_types": ["linear_attention"] * 2},
    ),
    "a padding token beyond the tokens": (
        "llama",
        {"tokenizer.ggml.padding_token_id": 1 << 20, "tokenizer.ggml.eos_token_id": 5000},
        {"pad_token_id": None, "eos_token_id": None, "bos_token_id": 259},
    ),
    "one width": ("gemma3n", {"gemma3n.feed_forward_length": 16}, {"intermediate_size": 16, "laurel_rank": 4}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_file_leaves_out_is_what_llama_cpp_takes_it_for(tmp_path: Path, case: str) -> None:
    name, settings, expected = CASES[case]
    fields = config_fields(read_gguf(changed(tmp_path, name, settings)))
    assert {field: fields.get(field) for field in expected} == expected


def test_yarn_has_the_multiplier_of_its_length_alone_as_in_llama_cpp(tmp_path: Path) -> None:
    """DeepSeek's alone is both."""
    changes = {"mistral3.rope.scaling.yarn_log_multiplier": 0.5}
    scaling = config_fields(read_gguf(changed(tmp_path, "mistral3", changes)))["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("name", "tensor", "field"),
    [
        ("granitehybrid", "ssm_conv1d.bias", "mamba_conv_bias"),
        ("falcon-h1", "ssm_conv1d.bias", "mamba_conv_bias"),
        ("falcon-h1", "ssm_norm.weight", "mamba_rms_norm"),
        ("mamba2", "ssm_conv1d.bias", "use_conv_bias"),
        ("nemotron_h", "ssm_conv1d.bias", "use_conv_bias"),
        ("glm4moe", "attn_q_norm.weight", "use_qk_norm"),
        ("glm4moe", "attn_q.bias", "attention_bias"),
        ("command-r", "attn_q_norm.weight", "use_qk_norm"),
        ("seed_oss", "attn_output.bias", "attention_out_bias"),
    ],
)
def test_a_model_has_what_its_file_has_a_tensor_of(name: str, tensor: str, field: str) -> None:
    header = read_gguf(TINY / f"{name}.gguf")
    without = {name: one for name, one in header.tensors.items() if not name.endswith(f".{tensor}")}
    assert config_fields(header)[field] is True
    assert config_fields(replace(header, tensors=without))[field] is False


def test_the_page_of_models_lists_every_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    section = page.split("### Architectures of GGUF")[1].split("###")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert {name for line in lines for name in line.split("|")[1].split("`")[1::2]} == set(FAMILIES)


def test_keys_of_a_layer_that_takes_another_ones_are_left_in_the_file(tmp_path: Path) -> None:
    header = read_gguf(changed(tmp_path, "gemma4", {}, "blk.2.attn_k.weight", "blk.3.attn_k_norm.weight"))
    names = gguf_checkpoint(header, config_fields(header)).tensors
    assert "model.layers.1.self_attn.k_proj.weight" in names
    assert not any(name.startswith(("model.layers.2.self_attn.k", "model.layers.3.self_attn.k")) for name in names)
