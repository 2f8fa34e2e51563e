"""A config.json that asks for what no model has is refused at once, before anything of it is made."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec import EdgespecError
from edgespec.pair.config_bounds import check_bounds
from edgespec.pair.folder import open_architecture, open_model
from tests.support.families import FAMILIES, RECURRENT

MANY = 1_000_000


def changed(source: Path, folder: Path, **changes: Any) -> Path:
    """A folder of the config.json alone."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_hidden_layers", value) for value in (MANY, 10**400, 0, -1, True, 1e300)),
        ("text_config", {"num_hidden_layers": MANY}),
        ("vision_config", {"depth": MANY}),
        ("num_local_experts", MANY),
        ("vocab_size", 10**12),
        ("hidden_size", 10**12),
        ("num_attention_heads", MANY),
        ("max_position_embeddings", float("inf")),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
    ],
)
def test_what_no_model_has_is_named_at_once(
    name: str, value: Any, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = changed(pair_folders[1], tmp_path / "model", **{name: value})
    started = time.perf_counter()
    with pytest.raises(EdgespecError) as caught:
        open_architecture(folder)
    assert time.perf_counter() - started < 5
    assert caught.value.code == "E_CONFIG_INVALID"
    inner = next(iter(value)) if isinstance(value, dict) else name
    assert f"has {inner} " in caught.value.what


def test_more_layers_than_tensors_are_named_with_both_numbers(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = changed(pair_folders[1], tmp_path / "model", num_hidden_layers=500)
    shutil.copy(pair_folders[1] / "model.safetensors", folder)
    with pytest.raises(EdgespecError, match="asks for 500 layers, and the checkpoint has 12 tensors") as caught:
        open_model(folder)
    assert caught.value.code == "E_CONFIG_INVALID"


@pytest.mark.parametrize("value", ["3", 3.5, [3]])
def test_what_is_no_number_is_named_by_its_field(
    value: object, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(EdgespecError, match=r"num_hidden_layers.*expected int") as caught:
        open_architecture(changed(pair_folders[1], tmp_path / "model", num_hidden_layers=value))
    assert caught.value.code == "E_CONFIG_INVALID"


@pytest.mark.parametrize("value", [["llama"], 5, None])
def test_a_model_type_that_is_no_word_is_named(value: object, pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(EdgespecError) as caught:
        open_architecture(changed(pair_folders[1], tmp_path / "model", model_type=value))
    assert caught.value.code == "E_UNSUPPORTED_ARCHITECTURE"


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_every_family_is_within_the_bounds(family: str) -> None:
    make = (FAMILIES | RECURRENT)[family]
    check_bounds(json.loads(make().to_json_string(use_diff=False)), Path("config.json"))
