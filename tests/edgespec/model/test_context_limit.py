"""A text may be as long as the scaled rotation reaches, and no longer than a family's own positions."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, MambaConfig

from edgespec.model.context_limit import context_of

YARN = {"rope_type": "yarn", "factor": 4.0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def limit_of(folder: Path, model_type: str, **fields: Any) -> int | None:
    """Of a config.json, as transformers reads it."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **fields}))
    return context_of(AutoConfig.from_pretrained(folder).get_text_config(decoder=True))


@pytest.mark.parametrize(
    ("limit", "model_type", "positions", "scaling"),
    [
        # added by hand, as model cards say: the positions are those before it
        (131072, "qwen2", 32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        (131072, "qwen2", 32768, YARN),
        (131072, "qwen3", 40960, {**YARN, "original_max_position_embeddings": 32768}),
        (512, "llama", 128, {"type": "linear", "factor": 4}),
        (192, "llama", 128, {"type": "dynamic", "factor": 1.5}),
        (512, "llama", 128, {"type": "longrope", "factor": 4.0, **FACTORS}),
        # the positions count all of it
        (163840, "deepseek_v3", 163840, {**YARN, "factor": 40, "original_max_position_embeddings": 4096}),
        (131072, "llama", 131072, {**LLAMA3, "original_max_position_embeddings": 8192}),
        (131072, "phi3", 131072, {"type": "longrope", **FACTORS}),
        (131072, "gemma3_text", 131072, {"rope_type": "linear", "factor": 8.0}),
        (4096, "llama", 4096, {"type": "dynamic", "factor": 0.5}),
        (4096, "llama", 4096, None),
    ],
)
def test_a_limit_is_the_length_before_scaling_times_the_factor_where_that_is_more(
    limit: int, model_type: str, positions: int, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    fields = {"original_max_position_embeddings": 4096} if model_type == "phi3" else {}
    stated = {"max_position_embeddings": positions, "rope_scaling": scaling, "rope_theta": 10000.0, **fields}
    assert limit_of(tmp_path, model_type, **stated) == limit


def test_a_family_without_positions_has_no_limit() -> None:
    assert context_of(MambaConfig()) is None


def test_a_kind_of_layer_counts_with_the_length_that_it_states(tmp_path: Path) -> None:
    full = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 65536}
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": full}
    assert limit_of(tmp_path, "gemma3_text", max_position_embeddings=131072, rope_parameters=kinds) == 262144


@pytest.mark.parametrize("odd", [{"rope_type": ["yarn"]}, {"factor": "4"}, {"original_max_position_embeddings": [128]}])
def test_what_is_no_number_or_kind_scales_nothing(odd: dict[str, Any]) -> None:
    """Where transformers takes it."""
    config = AutoConfig.for_model("llama", max_position_embeddings=128)
    config.rope_parameters = {**YARN, **odd}
    assert context_of(config) == 128
