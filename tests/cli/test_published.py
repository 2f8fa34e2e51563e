"""A model in a published format is named as such by every command, and runs without being told."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from offload.layouts.int4_lanes import LANES
from offload.layouts.int4_orders import kernel_order
from offload.native.compiler import is_available
from tests.cli.conftest import RunCli, jsonl, written
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import WHOLE_BLOCKS, publish
from tests.support.families import FAMILIES, make_model, save_folder

needs_kernel = pytest.mark.skipif(kernel_order() is None, reason="torch has no such kernel for this processor")
needs_compiler = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")
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
    outcome = run_cli([str(tmp_path / "model"), "--dtype", "float32"], command="estimate").ended()
    assert f"layers as {PUBLISHED[form].name})" in outcome.out
    assert re.search(r"weights while unpacked +0\.006 GiB", outcome.out)


def test_a_config_alone_of_a_format_that_is_not_read_is_refused_by_its_name(run_cli: RunCli, tmp_path: Path) -> None:
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "aqlm"}}))
    outcome = run_cli([str(tmp_path)], command="estimate").ended(2)
    assert "is quantised with aqlm, which edgespec does not read" in outcome.err


def test_a_classifier_that_is_run_as_a_language_model_is_said(tmp_path: Path, run_cli: RunCli) -> None:
    """Its texts are those of transformers, which reports the same weight."""
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = True
    folder = save_folder(tmp_path / "model", make_model(config))
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)
    outcome = run_cli(["-p", "hello", "-m", str(folder), "--policy", "none", "--dry-run"]).ended()
    assert "target: 'score.weight' of the folder is no part of LlamaForCausalLM" in outcome.err


@pytest.fixture
def four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An AWQ checkpoint whose numbers torch's kernel multiplies."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    publish(save_folder(tmp_path / "model", make_model(WHOLE_BLOCKS)), PUBLISHED["awq"])
    return str(tmp_path / "model")


@needs_kernel
def test_four_bits_are_kept_in_the_kernels_order_once_and_said(four_bits: str, run_cli: RunCli) -> None:
    run = ["-m", four_bits, "--policy", "none", "-n", "4", "-p", "x", "-v"]
    for is_first in (True, False):
        outcome = run_cli(run).ended()
        assert "bfloat16 from int4 (from awq), multiplied as packed, on cpu" in outcome.err
        assert "target: 100% of the layers' weights are multiplied as packed" in outcome.err
        assert outcome.err.count("packing once: ") == is_first
    assert "float32 from awq on cpu" in run_cli([*run, "--quant", "none"]).err
    assert "layers as int4 (from awq))" in run_cli([four_bits], command="estimate").out
    in_float32 = run_cli([*run, "--dtype", "float32"]).err
    is_multiplied = kernel_order() == LANES
    assert f"float32 from {'int4 (from awq), multiplied as packed,' if is_multiplied else 'awq'} on cpu" in in_float32


@needs_kernel
def test_a_run_that_was_made_with_other_weights_or_numbers_is_not_resumed(four_bits: str, run_cli: RunCli) -> None:
    files = jsonl([{"id": "a", "prompt": "x"}])
    run = ["p.jsonl", "-m", four_bits, "--policy", "none", "-n", "4", "-o", "out.jsonl"]
    assert run_cli(run, files=files).code == 0
    assert (written()[0]["config"]["quant"], written()[0]["config"]["dtype"]) == ("repacked", "bfloat16")
    assert run_cli([*run, "--resume", "--quant", "auto"]).code == 0  # the same weights
    outcome = run_cli([*run, "--resume", "--quant", "none"]).ended(2)
    assert "quant" in outcome.err
    assert "dtype" in outcome.err


@needs_kernel
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=needs_compiler)])
def test_weights_that_other_numbers_would_let_a_cpu_multiply_are_named(
    compiles: bool, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's kernel knows bf16 alone."""
    if not compiles:
        monkeypatch.setattr("offload.layouts.bitsandbytes.is_available", lambda: False)
    folder = str(save_folder(tmp_path / "model", make_model(WHOLE_BLOCKS)))
    run = ["-m", folder, "--policy", "none", "-n", "4", "-p", "x"]
    note = "weights are unpacked in each pass; --dtype bfloat16 multiplies them as they are"
    for options, is_said in (("int8 --dtype float32", not compiles), ("int8", False), ("nf4 --dtype float32", False)):
        assert run_cli([*run, "--quant", *options.split()]).ended().err.count(note) == is_said
