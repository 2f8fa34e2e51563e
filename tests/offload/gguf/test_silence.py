"""What llama.cpp's own writer states where it has nothing to say changes nothing; old names say what new ones do."""

from dataclasses import replace
from typing import Any

import pytest

from offload.gguf.header import GgufHeader, read_gguf
from offload.gguf.settings import config_fields, family_of
from offload.gguf.silence import OTHERS, ZEROS
from offload.gguf.values import BOOLEANS, FRACTIONS
from tests.offload.gguf.test_tiny_models import TINY

ALL = sorted(path.stem for path in TINY.glob("*.gguf"))


def stating(header: GgufHeader, **settings: Any) -> dict[str, Any]:
    """The fields of a config.json of a file that states these settings, too; None leaves one out."""
    every = {**header.settings, **{f"{header.architecture}.{key}": value for key, value in settings.items()}}
    return config_fields(replace(header, settings={key: value for key, value in every.items() if value is not None}))


def unread(header: GgufHeader) -> dict[str, list[Any]]:
    """The settings that a file does not state and its family does not read, with the values that say nothing."""
    family, start = family_of(header), f"{header.architecture}."
    read = {*family.settings, *family.means, *(key.removeprefix(start) for key in header.settings)}
    values: dict[str, list[Any]] = {key: [0.0 if key in FRACTIONS else key not in BOOLEANS and 0] for key in ZEROS}
    values |= {key: [*values.get(key, ()), *others] for key, others in OTHERS.items()}
    of_layers = {"swiglu_clamp_exp": [[0.0, 0.0]], "deepstack_mapping": [[-1] * 5]}
    return {key: found for key, found in {**values, **of_layers}.items() if key not in read}


@pytest.mark.parametrize("name", ALL)
def test_values_that_say_nothing_change_nothing(name: str) -> None:
    header = read_gguf(TINY / f"{name}.gguf")
    rules = {"nextn_predict_layers", "attention.recurrent_layers", "rope.scaling.attn_factor"}  # of some families
    rules |= {"rope.scaling.finetuned"} if "granite" in name else set()
    rules |= {key for key in OTHERS if "yarn" in key} if "rope.scaling.type" in str(header.settings) else set()
    values = {key: found for key, found in unread(header).items() if key not in rules}
    assert len(values) > 80
    for turn in range(2):
        fields = stating(header, **{key: found[min(turn, len(found) - 1)] for key, found in values.items()})
        assert {**fields, "num_nextn_predict_layers": 0} == {**config_fields(header), "num_nextn_predict_layers": 0}


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("llama", {"rope.scaling.factor": 4.0}, LINEAR),
        ("llama", {"rope.scale_linear": 4.0}, LINEAR),
        ("llama", {"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, LINEAR),
        ("llama", {"rope.scaling.factor": 4.0, "rope.scale_linear": 8.0}, LINEAR),  # the new name counts
        ("llama", {"rope.scaling.factor": 0.0, "rope.scale_linear": 8.0}, None),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        ("llama", {"rope.scaling.type": "linear"}, None),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ("llama", {"rope.scaling.factor": 1.0}, None),
        ("llama", {"rope.scale_linear": 1.0}, None),
        ("gemma2", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        ("gemma3", {"rope.scaling.factor": 4.0}, LINEAR),
    ],
)
def test_a_factor_is_linear_where_nothing_else_is_said(name: str, settings: Any, expected: Any) -> None:
    assert stating(read_gguf(TINY / f"{name}.gguf"), **settings).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("granite", {"attention.scale": 0.0, "logit_scale": 0.0}, {"attention_multiplier": 0.5, "logits_scaling": 1.0}),
        ("command-r", {"logit_scale": 0.0}, {"logit_scale": 1.0}),
        ("deepseek3", {"expert_weights_scale": 0.0, "expert_group_count": 0}, {"routed_scaling_factor": 1.0}),
        ("gemma3", {"final_logit_softcapping": 0.0}, {"final_logit_softcapping": None}),
        ("gemma2", {"attn_logit_softcapping": 0.0}, {"attn_logit_softcapping": None}),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
        ("granitehybrid", {"rope.scaling.finetuned": None}, {"position_embedding_type": "rope"}),
        ("gemma2", {"attention.scale": 0.3535533845424652}, {"query_pre_attn_scalar": 8}),
        ("gpt-oss", {"rope.freq_base_swa": 150000.0, "attention.key_length_swa": 8}, {"rope_theta": 150000.0}),
        ("llama", {"rope.freq_base_swa": 10.0, "attention.sliding_window_pattern": [1, 0]}, {"rope_theta": 10000.0}),
        ("llama4", {"attention.sliding_window": 8192, "attention.sliding_window_pattern": [1, 1, 1, 0]}, {}),
        ("mamba2", {"attention.head_count_kv": 0, "attention.recurrent_layers": 1}, {}),
        ("lfm2", {"attention.recurrent_layers": [1, 0], "leading_dense_block_count": 2}, {}),
    ],
)
def test_a_setting_of_0_is_as_good_as_left_out(name: str, settings: Any, expected: dict[str, Any]) -> None:
    fields = stating(read_gguf(TINY / f"{name}.gguf"), **settings)
    assert {field: fields[field] for field in expected} == expected


def test_the_factor_of_a_long_rotation_is_the_files_or_none() -> None:
    header = read_gguf(TINY / "phi3-long.gguf")
    for stated, expected in ((2.0, 2.0), (None, 1.0)):
        assert stating(header, **{"rope.scaling.attn_factor": stated})["rope_scaling"]["attention_factor"] == expected
    assert 1.06 < config_fields(header)["rope_scaling"]["attention_factor"] < 1.07  # as the file has it
