"""A model in a published format is named as such by every command, and runs without being told."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from tests.cli.conftest import RunCli
from tests.conftest import FAMILIES, make_model, save_folder
from tests.offload.formats.published_checkpoints import PUBLISHED, publish

NOTE = "other programs quantise its activations too; here they stay as they are"


@pytest.fixture(params=["fp8-blocks", "awq"])
def form(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    publish(save_folder(tmp_path / "model", make_model(FAMILIES["qwen3"]())), PUBLISHED[request.param])
    return str(request.param)


def test_a_run_says_the_format_and_once_what_is_different(form: str, run_cli: RunCli, tmp_path: Path) -> None:
    outcome = run_cli(["-m", str(tmp_path / "model"), "--policy", "none", "-n", "4", "-p", "x", "--dtype", "bfloat16"])
    assert outcome.code == 0, outcome.err
    assert f"bfloat16 from {PUBLISHED[form].name} on cpu" in outcome.err
    assert outcome.err.count(NOTE) == (form == "fp8-blocks")


def test_models_and_estimates_name_it_and_count_what_it_stands_for(form: str, run_cli: RunCli, tmp_path: Path) -> None:
    packed, plain = json.loads(run_cli([str(tmp_path), "--json"], command="models").out)["models"]
    assert packed["quant"] == PUBLISHED[form].name
    assert (plain["quant"], plain["parameters"]) == (None, packed["parameters"])
    outcome = run_cli([str(tmp_path / "model"), "--dtype", "float32"], command="estimate")
    assert f"layers as {PUBLISHED[form].name})" in outcome.out
    assert re.search(r"weights while unpacked +0\.006 GiB", outcome.out)


def test_a_config_alone_is_planned_as_it_is_published(form: str, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    outcome = run_cli([str(tmp_path / "model"), "--dtype", "float32"], command="estimate")
    assert outcome.code == 0, outcome.err
    assert f"layers as {PUBLISHED[form].name})" in outcome.out
    assert re.search(r"weights while unpacked +0\.006 GiB", outcome.out)


def test_a_config_alone_of_a_format_that_is_not_read_is_refused_by_its_name(run_cli: RunCli, tmp_path: Path) -> None:
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "aqlm"}}))
    outcome = run_cli([str(tmp_path)], command="estimate")
    assert outcome.code == 2
    assert "is quantised with aqlm, which edgespec does not read" in outcome.err


def test_a_classifier_that_is_run_as_a_language_model_is_said(tmp_path: Path, run_cli: RunCli) -> None:
    """Its texts are those of transformers, which reports the same weight."""
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = True
    folder = save_folder(tmp_path / "model", make_model(config))
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)
    outcome = run_cli(["-p", "hello", "-m", str(folder), "--policy", "none", "--dry-run"])
    assert outcome.code == 0
    assert "target: 'score.weight' of the folder is no part of LlamaForCausalLM" in outcome.err
