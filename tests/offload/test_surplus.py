"""Stored weights that no part of the model reads are named: the folder may describe another model than it holds."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from edgespec.pair.folder import open_model
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import publish
from tests.support.families import FAMILIES, make_model, save_folder


def surplus(folder: Path) -> tuple[str, ...]:
    model = open_model(folder)
    return model.skeleton(model.checkpoint, dtype=torch.float32).surplus


def with_fields(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields), encoding="utf-8")


def with_tensors(folder: Path, *names: str) -> None:
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(2) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("make_config", FAMILIES.values(), ids=FAMILIES)
def test_of_a_saved_model_nothing_is_surplus(make_config: Callable[[], PretrainedConfig], tmp_path: Path) -> None:
    assert surplus(save_folder(tmp_path / "model", make_model(make_config()))) == ()


@pytest.mark.parametrize("form", PUBLISHED)
def test_of_a_quantised_model_nothing_is_surplus(form: str, tmp_path: Path) -> None:
    publish(save_folder(tmp_path / "model", make_model(FAMILIES["qwen3"]())), PUBLISHED[form])
    assert surplus(tmp_path / "model") == ()


def test_layers_beyond_the_last_are_surplus_unless_they_predict_further_tokens(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama"]()))
    last = len([*re.finditer(r"layers\.(\d+)\.input_layernorm", "\n".join(open_model(folder).checkpoint.tensors))]) - 1
    with_fields(folder, num_hidden_layers=last)
    assert {name.split(".")[2] for name in surplus(folder)} == {str(last)}
    with_fields(folder, num_nextn_predict_layers=1)
    assert surplus(folder) == ()


def test_scales_masks_and_frequencies_beside_weights_are_not_surplus(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(FAMILIES["llama"]()))
    attention = "model.layers.0.self_attn"
    with_tensors(folder, f"{attention}.rotary_emb.inv_freq", f"{attention}.k_scale", f"{attention}.bias")
    assert surplus(folder) == ()
    with_tensors(folder, f"{attention}.q_proj.bias")  # a weight that attention_bias would ask for
    assert surplus(folder) == (f"{attention}.q_proj.bias",)
