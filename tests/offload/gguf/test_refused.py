"""Whatever a file states beyond what is understood refuses it by name: ignored, it would make other texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.errors import CheckpointError
from offload.gguf.checkpoint import gguf_checkpoint
from offload.gguf.header import TextList, read_gguf
from offload.gguf.settings import config_fields
from tests.offload.gguf.files import write_gguf

TINY = Path(__file__).with_name("tiny")
SETTINGS = {
    "a new setting": ("llama", {"llama.attention.temperature_scale": 0.5}, "attention.temperature_scale = 0.5"),
    "experts": ("llama", {"llama.expert_count": 8}, "expert_count = 8"),
    "yarn": ("qwen2", {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}, "scaling.type = yarn"),
    "a factor without a type": ("qwen2", {"qwen2.rope.scaling.factor": 4.0}, "rope.scaling.factor = 4.0"),
    "heads of a layer each": ("llama", {"llama.attention.head_count": [4, 2]}, r"head_count = \[4, 2\]"),
    "a rotation in part": ("qwen3", {"qwen3.rope.dimension_count": 4}, "rope.dimension_count = 4 of 8"),
    "values of another width": ("llama", {"llama.attention.value_length": 16}, "value_length = 16, with heads of 8"),
    "another vocabulary": ("llama", {"llama.vocab_size": 99}, "another llama.vocab_size"),
    "a window that llama has not": ("llama", {"llama.attention.sliding_window": 8}, "attention.sliding_window = 8"),
    "soft caps of another family": ("qwen3", {"qwen3.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
    "no number": ("llama", {"llama.rope.freq_base": float("nan")}, "rope.freq_base = nan"),
    "an architecture": ("llama", {"general.architecture": "mamba2"}, "is of the architecture 'mamba2'"),
    "nothing at all": ("llama", {"llama.block_count": None}, "lacks the setting llama.block_count"),
    "an attention factor": ("phi3-long", {"phi3.rope.scaling.attn_factor": 2.0}, "attn_factor = 2.0, not 1.06"),
}
TENSORS = {
    "a layer's": ("llama", "blk.0.attn_sinks.weight"),
    "one outside": ("llama", "position_embd.weight"),
    "a bias outside": ("llama", "output.bias"),
    "another family's norm": ("qwen2", "blk.0.attn_q_norm.weight"),
    "another family's frequencies": ("qwen3", "rope_freqs.weight"),
    "a gate beside the fused one": ("phi3", "blk.0.ffn_gate.weight"),
}


def changed(path: Path, name: str, settings: dict[str, Any], *further: str) -> Path:
    """A tiny model's file with other settings, and further tensors."""
    header = read_gguf(TINY / f"{name}.gguf")
    every = {**header.settings, **settings}
    every = {key: value.read() if isinstance(value, TextList) else value for key, value in every.items()}
    stored = header.path.read_bytes()
    tensors = [
        (tensor.name, tensor.shape, tensor.block.number, stored[tensor.offset : tensor.offset + tensor.num_bytes])
        for tensor in header.tensors.values()
    ]
    tensors += [(name, (4,), 0, bytes(16)) for name in further]
    return write_gguf(path / "a.gguf", {key: value for key, value in every.items() if value is not None}, tensors)


def read(path: Path) -> None:
    header = read_gguf(path)
    gguf_checkpoint(header, config_fields(header))


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_is_not_understood_refuses_the_file(tmp_path: Path, case: str) -> None:
    name, settings, reason = SETTINGS[case]
    with pytest.raises(CheckpointError, match=reason) as caught:
        read(changed(tmp_path, name, settings))
    assert caught.value.code == "E_UNSUPPORTED_ARCHITECTURE"


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_is_not_understood_refuses_the_file(tmp_path: Path, case: str) -> None:
    name, tensor = TENSORS[case]
    with pytest.raises(CheckpointError, match=f"has a tensor '{tensor}'"):
        read(changed(tmp_path, name, {}, tensor))


def test_factors_of_no_llama_refuse_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' with numbers that are no factors"):
        read(changed(tmp_path, "llama", {}, "rope_freqs.weight"))


def test_the_unchanged_file_is_read(tmp_path: Path) -> None:
    for name in ("llama", "qwen2", "qwen3", "phi3", "phi3-long"):
        read(changed(tmp_path, name, {}))
