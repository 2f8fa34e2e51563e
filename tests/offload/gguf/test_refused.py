"""Whatever a file states beyond what is understood refuses it by name: ignored, it would make other texts."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.pair.folder import open_model
from offload.errors import CheckpointError
from offload.gguf.checkpoint import gguf_checkpoint
from offload.gguf.header import GgufHeader, read_gguf
from offload.gguf.settings import config_fields
from tests.offload.gguf.files import copy_gguf
from tests.offload.gguf.test_tiny_models import NAMES, TINY

REFUSED = ("E_UNSUPPORTED_ARCHITECTURE", "E_CONFIG_INVALID")  # a setting that is not read, and a wrong value of one
SETTINGS = {
    "a new setting": ("llama", {"llama.attention.temperature_scale": 0.5}, "attention.temperature_scale = 0.5"),
    "experts": ("qwen2", {"qwen2.expert_count": 8}, "expert_count = 8"),
    "yarn": ("gemma2", {"gemma2.rope.scaling.type": "yarn", "gemma2.rope.scaling.factor": 4.0}, "scaling.type = yarn"),
    "yarn without its factor": ("qwen2", {"qwen2.rope.scaling.type": "yarn"}, "scaling.factor = None"),
    "yarn in part": ("qwen2-yarn", {"qwen2.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
    "queries that grow without yarn": (
        "mistral3",
        {"mistral3.rope.scaling.type": "none"},
        "rope.scaling.yarn_beta_fast = 16.0",
    ),
    "queries that grow from nowhere": (
        "mistral3",
        {
            f"mistral3.rope.scaling.{name}": None
            for name in (
                "type",
                "factor",
                "original_context_length",
                "yarn_beta_fast",
                "yarn_beta_slow",
                "yarn_log_multiplier",
            )
        },
        "attention.temperature_scale = 0.1",
    ),
    "a longer list of windows": (
        "cohere2",
        {"cohere2.attention.sliding_window_pattern": [True] * 5},
        "sliding_window_pattern = ",
    ),
    "no window": (
        "cohere2",
        {"cohere2.attention.sliding_window": None},
        "lacks the setting cohere2.attention.sliding_w",
    ),
    "no list of windows": (
        "gemma4",
        {"gemma4.attention.sliding_window_pattern": None},
        "lacks the setting gemma4.attention.sliding_window_pattern",
    ),
    "three kinds of heads": (
        "gemma4-same",
        {"gemma4.attention.head_count_kv": [2, 4, 1]},
        r"head_count_kv = \[2, 4, 1\]",
    ),
    "three widths": (
        "gemma4",
        {"gemma4.feed_forward_length": [16, 16, 16, 32]},
        r"feed_forward_length = \[16, 16, 16, 32\]",
    ),
    "a rotation of another length": ("gemma4", {"gemma4.rope.dimension_count": 4}, "rope.dimension_count = 4 of 8"),
    "other experts": ("gemma4", {"gemma4.expert_count": 4}, "lacks the setting gemma4.expert_feed_forward_length"),
    "a cut of nothing": (
        "gemma3n",
        {"gemma3n.activation_sparsity_scale": [1.5, 1.5, 1.5, float("inf")]},
        "activation_sparsity_scale = ",
    ),
    "more layers than tensors": ("llama", {"llama.block_count": 1999}, "21 tensors and states 1999 layers"),
    "more layers than any model has": (
        "llama",
        {"llama.block_count": 1 << 31},
        "block_count = 2147483648, which is not",
    ),
    "no heads": ("llama", {"llama.attention.head_count": 0}, "attention.head_count = 0"),
    "a model that does not rotate": (
        "granite",
        {"granite.rope.scaling.finetuned": False},
        "rope.scaling.finetuned = False",
    ),
    "heads of a layer each": ("llama", {"llama.attention.head_count": [4, 2]}, r"head_count = \[4, 2\]"),
    "a rotation in part": ("qwen3", {"qwen3.rope.dimension_count": 4}, "rope.dimension_count = 4 of 8"),
    "values of another width": ("llama", {"llama.attention.value_length": 16}, "value_length = 16, with heads of 8"),
    "another vocabulary": ("llama", {"llama.vocab_size": 99}, "another llama.vocab_size"),
    "a window that llama has not": ("llama", {"llama.attention.sliding_window": 8}, "attention.sliding_window = 8"),
    "soft caps of another family": ("qwen3", {"qwen3.final_logit_softcapping": 20.0}, "final_logit_softcapping = 20"),
    "no number": ("llama", {"llama.rope.freq_base": float("nan")}, "rope.freq_base = nan"),
    "an architecture": ("llama", {"general.architecture": "rwkv7"}, "is of the architecture 'rwkv7'"),
    "nothing at all": ("llama", {"llama.block_count": None}, "lacks the setting llama.block_count"),
    "an attention factor": ("qwen2", {"qwen2.rope.scaling.attn_factor": 2.0}, "attn_factor = 2.0"),
    "weights of DeepSeek V2's experts that add up to one": (
        "deepseek2",
        {"deepseek2.expert_weights_norm": True},
        "expert_weights_norm = True",
    ),
    "a text that is read both ways": ("llama", {"llama.attention.causal": False}, "attention.causal = False"),
    "rows for embeddings": ("qwen3", {"qwen3.pooling_type": 3}, "pooling_type = 3"),
    "Llama 4 without chunks": ("llama4", {"llama4.attention.sliding_window": 0}, "sliding_window = 0"),
    "an old factor": ("gemma2", {"gemma2.rope.scale_linear": 4.0}, "rope.scaling.factor = 4.0"),
    "another layout": ("llama", {"llama.tensor_data_layout": "mine"}, "tensor_data_layout = mine"),
    "soft caps of attention in Gemma 3": ("gemma3", {"gemma3.attn_logit_softcapping": 20.0}, "softcapping = 20"),
    "other layers that are recurrent": ("lfm2", {"lfm2.attention.recurrent_layers": [0, 1]}, "recurrent_layers"),
    "another scale of attention": ("gemma2", {"gemma2.attention.scale": 0.25}, "attention.scale = 0.25"),
}
TENSORS = {
    "a layer's": ("llama", "blk.0.attn_sinks.weight"),
    "one outside": ("llama", "position_embd.weight"),
    "a bias outside": ("llama", "output.bias"),
    "another family's norm": ("qwen2", "blk.0.attn_q_norm.weight"),
    "another family's frequencies": ("qwen3", "rope_freqs.weight"),
    "frequencies beside yarn": ("llama-yarn", "rope_freqs.weight"),
    "frequencies beside one factor": ("llama-linear", "rope_freqs.weight"),
    "short factors without long ones": ("phi3", "rope_factors_short.weight"),
    "a norm that Olmo 2 has not": ("olmo2", "blk.0.attn_norm.weight"),
    "a bias beside those of Qwen": ("qwen2", "blk.0.attn_output.bias"),
    "a bias behind the gate": ("llama", "blk.0.ffn_up.bias"),
    "a layer beyond the last": ("llama", "blk.2.attn_norm.weight"),
    "a gate beside the fused one": ("phi3", "blk.0.ffn_gate.weight"),
    "a part of a layer beyond the last": ("granitehybrid", "blk.2.ssm_a"),
}


def changed(path: Path, name: str, settings: dict[str, Any], *further: str, **copies: str) -> Path:
    """A tiny model's file with other settings, further tensors, and copies of its own under other names."""
    source = TINY / f"{name}.gguf"
    stored, header = source.read_bytes(), read_gguf(source)
    added: list[tuple[str, tuple[int, ...], int, bytes]] = [(tensor, (4,), 0, bytes(16)) for tensor in further]
    for copied, one in ((copied, header.tensors[tensor]) for copied, tensor in copies.items()):
        added.append((copied, one.shape, one.block.number, stored[one.offset : one.offset + one.num_bytes]))
    return copy_gguf(source, path / "a.gguf", settings=settings, further=added)


def read(path: Path) -> None:
    header = read_gguf(path)
    gguf_checkpoint(header, config_fields(header))


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_is_not_understood_refuses_the_file(tmp_path: Path, case: str) -> None:
    name, settings, reason = SETTINGS[case]
    with pytest.raises(CheckpointError, match=reason) as caught:
        read(changed(tmp_path, name, settings))
    assert caught.value.code in REFUSED


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_is_not_understood_refuses_the_file(tmp_path: Path, case: str) -> None:
    name, tensor = TENSORS[case]
    with pytest.raises(CheckpointError, match=f"has a tensor '{tensor}'"):
        read(changed(tmp_path, name, {}, tensor))


def in_other_layers(name: str) -> dict[str, str]:
    """Tensors that some layer of a tiny model lacks, by their names in the first such layer -> in one that has them."""
    header = read_gguf(TINY / f"{name}.gguf")
    further = header.settings.get(f"{header.architecture}.nextn_predict_layers", 0)
    layers = range(header.settings[f"{header.architecture}.block_count"] - further)
    found = {}
    for tensor in header.tensors:
        layer, _, part = tensor.removeprefix("blk.").partition(".")
        lacking = [other for other in layers if f"blk.{other}.{part}" not in header.tensors]
        found |= {f"blk.{other}.{part}": tensor for other in lacking[:1] if layer in map(str, layers)}
    return found


# The last layers of Gemma 3n and 4 take keys and values from others; published files have such weights all the same.
SEVERAL_KINDS = [name for name in NAMES if in_other_layers(name) and not name.startswith("gemma")]


@pytest.mark.parametrize("name", SEVERAL_KINDS)
def test_a_tensor_in_a_layer_of_another_kind_refuses_the_file(tmp_path: Path, name: str) -> None:
    for tensor, existing in in_other_layers(name).items():
        model = open_model(changed(tmp_path, name, {}, **{tensor: existing}))
        with pytest.raises(CheckpointError, match=f"has a tensor '{tensor}' in a layer that lacks it") as caught:
            model.skeleton(model.checkpoint, dtype=torch.float32)
        assert caught.value.code == "E_UNSUPPORTED_ARCHITECTURE"


def test_factors_of_no_llama_refuse_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' with numbers that are no factors"):
        read(changed(tmp_path, "llama", {}, "rope_freqs.weight"))


def test_factors_of_no_gemma_refuse_the_file(tmp_path: Path) -> None:
    place = read_gguf(TINY / "gemma4.gguf").tensors["rope_freqs.weight"].offset
    stored = bytearray((TINY / "gemma4.gguf").read_bytes())
    stored[place + 4 : place + 8] = struct.pack("<f", 8.0)
    (tmp_path / "a.gguf").write_bytes(stored)
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' of other numbers than Gemma 4's"):
        read(tmp_path / "a.gguf")


def test_factors_that_stop_no_frequency_refuse_gemma_4(tmp_path: Path) -> None:
    settings = {
        "gemma4.attention.key_length": 16,
        "gemma4.attention.value_length": 16,
        "gemma4.rope.dimension_count": 16,
    }
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' of other numbers than Gemma 4's"):
        read(changed(tmp_path, "gemma4", settings))


ODD = (0, -1, 1 << 31, 1.5, float("nan"), float("inf"), "a text", [], [0], [1.5, -1.0, 3.0, 1e30], [True, False])


def error_of(header: GgufHeader) -> str | None:
    """The code of a header that is refused."""
    try:
        gguf_checkpoint(header, config_fields(header))
    except CheckpointError as error:
        return error.code
    return None


@pytest.mark.parametrize("name", sorted(path.stem for path in TINY.glob("*.gguf")))
def test_odd_values_give_the_one_error_or_a_config(name: str) -> None:
    header = read_gguf(TINY / f"{name}.gguf")
    for key in [key for key in header.settings if key.startswith(header.architecture)]:
        for value in ODD:
            assert error_of(replace(header, settings={**header.settings, key: value})) in (None, *REFUSED), (key, value)


def test_the_unchanged_file_is_read(tmp_path: Path) -> None:
    for name in (
        "llama",
        "qwen2",
        "qwen3",
        "phi3",
        "phi3-long",
        "mistral3",
        "cohere2",
        "granite",
        "olmo2",
        "qwen2-yarn",
    ):
        read(changed(tmp_path, name, {}))
