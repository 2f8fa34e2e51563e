"""Bad input: one Error line, one Try line, the right exit code, no traceback, and no weight read before."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoConfig

from edgespec.placement import place
from offload.file_names import INDEX_NAME
from tests.cli.conftest import Outcome, RunCli
from tests.support.damage import ADAPTER, POINTER, Damage, both, edited, removed, shard_written, stored_in, written
from tests.support.families import FAMILIES, make_model, make_tokenizer, save_folder

SMALL_TABLE = both(edited("config.json", vocab_size=50), edited("generation_config.json", eos_token_id=0))
GOOD_ROWS = '{"prompt": "def main("}\n{"prompt": "import os"}\n'


@pytest.fixture
def folder(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A target to damage."""
    return shutil.copytree(pair_folders[0], tmp_path / "target")


def assert_error(outcome: Outcome, code: int, *named: str) -> None:
    lines = outcome.err.strip().splitlines()
    assert outcome.code == code, outcome.err
    assert len([line for line in lines if line.startswith("Error: ")]) == 1
    assert lines[-1].startswith("Try: ")
    assert "Traceback" not in outcome.err
    for part in named:
        assert part in outcome.err, outcome.err


def code_in_the_folder(folder: Path) -> None:
    """A tokenizer that asks to be run: it must be neither run nor asked about."""
    edited("tokenizer_config.json", tokenizer_class="Nowhere", auto_map={"AutoTokenizer": ["tok.Tok"] * 2})(folder)
    edited("config.json", auto_map={"AutoConfig": "tok.Config"})(folder)
    (folder / "tok.py").write_text("raise SystemExit('code of the model folder was run')")


@pytest.mark.parametrize(
    ("damage", "code", "named"),
    [
        (shutil.rmtree, 4, "there is no folder"),
        (removed("*"), 4, "no model.safetensors"),
        (removed("*.safetensors", INDEX_NAME), 4, "no model.safetensors"),
        (removed("*-00002-of-*"), 4, "-00002-of-"),
        (shard_written(1, lambda data: data[:-1]), 2, "truncated"),
        (stored_in("model.norm.weight", "../elsewhere.safetensors"), 2, "../elsewhere.safetensors"),
        (removed("config.json"), 4, "config.json"),
        (edited("config.json", model_type="perceptron9"), 2, "perceptron9"),
        (edited("config.json", model_type="t5"), 2, "t5"),
        (written("config.json", "{not json"), 2, "config.json"),
        (edited("config.json", hidden_size="wide"), 2, "config.json"),
        (edited("config.json", quantization_config={"quant_method": "hqq", "bits": 4}), 2, "quantised"),
        (edited("config.json", intermediate_size=48), 2, "[48, 32]"),
        (removed("tokenizer*"), 2, "has no usable tokenizer: there is no tokenizer.json."),
        (both(removed("tokenizer*"), edited("config.json", model_type="qwen3")), 2, "there is no tokenizer.json."),
        (written("tokenizer.json", "{"), 2, "has no usable tokenizer ("),
        (written("config.json", POINTER), 2, "config.json' is a Git LFS pointer"),
        (written("tokenizer.json", POINTER), 2, "tokenizer.json' is a Git LFS pointer"),
        (written("adapter_config.json", ADAPTER), 2, "holds an adapter of 'acme/base-7b'"),
        (edited("config.json", hidden_act="swoosh"), 2, "swoosh"),
        (edited("config.json", num_hidden_layers=0), 2, "num_hidden_layers 0"),
        (edited("generation_config.json", eos_token_id="</s>"), 2, "</s>"),
        (edited("generation_config.json", do_sample=True, temperature="hot"), 2, "generation_config.json"),
        (written("chat_template.jinja", "{{ raise_exception('no users here') }}"), 2, "no users here"),
        (SMALL_TABLE, 2, "50 tokens"),
    ],
)
@pytest.mark.usefixtures("no_weights_read")
def test_a_damaged_model_folder_is_refused_before_weights_are_read(
    damage: Damage, code: int, named: str, folder: Path, run_cli: RunCli
) -> None:
    damage(folder)
    assert_error(run_cli(["p.jsonl", "-m", str(folder)], files={"p.jsonl": GOOD_ROWS}), code, named)


def test_code_in_a_model_folder_is_neither_run_nor_asked_about(folder: Path, run_cli: RunCli) -> None:
    code_in_the_folder(folder)
    outcome = run_cli(["p.jsonl", "-m", str(folder), "-n", "2"], files={"p.jsonl": GOOD_ROWS}, stdin="y\n")
    assert_error(outcome, 2, "never run")
    assert outcome.out == ""
    assert "was run" not in outcome.err


@pytest.mark.usefixtures("no_weights_read")
def test_a_file_in_place_of_a_folder_is_called_a_file(folder: Path, run_cli: RunCli) -> None:
    outcome = run_cli(["p.jsonl", "-m", str(folder / "config.json")], files={"p.jsonl": GOOD_ROWS})
    assert_error(outcome, 4, "is a file")


@pytest.mark.usefixtures("no_weights_read")
def test_a_damaged_draft_is_refused_as_a_target_is(
    folder: Path, pair_folders: tuple[Path, Path], run_cli: RunCli
) -> None:
    shard_written(1, lambda data: data[:-1])(folder)
    outcome = run_cli(["p.jsonl", "-m", str(pair_folders[0]), "-md", str(folder)], files={"p.jsonl": GOOD_ROWS})
    assert_error(outcome, 2, "truncated")


@pytest.mark.usefixtures("no_weights_read")
def test_a_draft_with_other_token_ids_is_refused_with_the_first_differences(
    pair_folders: tuple[Path, Path], tmp_path: Path, run_cli: RunCli
) -> None:
    draft = save_folder(tmp_path / "draft", make_model(FAMILIES["llama"]()), tokenizer=make_tokenizer(swapped=True))
    outcome = run_cli(["p.jsonl", "-m", str(pair_folders[0]), "-md", str(draft)], files={"p.jsonl": GOOD_ROWS})
    assert_error(outcome, 2, "differ from the target's in 2 of 257", "id 0 is '!'", "id 1 is")


@pytest.mark.usefixtures("no_weights_read")
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    pair_folders: tuple[Path, Path], run_cli: RunCli
) -> None:
    rows = GOOD_ROWS + json.dumps({"prompt": "x" * 256}) + "\n"
    outcome = run_cli(["p.jsonl", "-m", str(pair_folders[0]), "--truncate", "fail"], files={"p.jsonl": rows})
    assert_error(outcome, 2, "line 3", "256 tokens", "256 with at least one new")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON: expecting value at column 12."),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n', "line 2 has id 'x'"),
        ("\n\n", "no prompt"),
        ("[" * 100_000 + "\n", "line 1"),
        ('{"prompt": "\\ud800"}\n', "line 1"),
        ('{"prompt": "a", "weight": NaN}\n', "line 1"),
    ],
)
@pytest.mark.usefixtures("no_weights_read")
def test_a_malformed_row_is_named_by_its_line(rows: str, named: str, run_cli: RunCli) -> None:
    assert_error(run_cli(["p.jsonl"], files={"p.jsonl": rows}), 2, named)


def test_a_file_that_is_not_utf8_is_named_by_its_line(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"one\ntwo\n\xff\xfe\n")
    assert_error(run_cli([str(tmp_path / "p.txt")]), 2, "line 3", "UTF-8")


def test_a_mistake_in_a_json_array_has_one_line_number(run_cli: RunCli) -> None:
    content = '[\n  {"prompt": "a"},\n  {"prompt": }\n]\n'
    assert_error(
        run_cli(["p.json"], files={"p.json": content}), 2, "is not JSON: expecting value at line 3, column 14."
    )


def test_an_empty_name_is_no_standard_input(run_cli: RunCli) -> None:
    assert_error(run_cli([""], stdin="def main("), 4, "cannot read ''")


def test_a_missing_prompt_file_is_named(run_cli: RunCli) -> None:
    assert_error(run_cli(["nowhere.txt"]), 4, "nowhere.txt")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temp", "-1"], "--temp -1.0"),
        (["--temp", "nan"], "--temp nan"),
        (["--temp", "1e-40"], "--temp 1e-40"),
        (["--draft-temp", "1e-40"], "--draft-temp 1e-40"),
        (["--seed", "18446744073709551616"], "18446744073709551616"),
        (["--max-cpu-mem", "9" * 400], "--max-cpu-mem"),
        (["--max-gpu-mem", "lots"], "--max-gpu-mem: 'lots'"),
        (["--top-p", "0"], "--top-p 0.0"),
        (["--top-p", "1.5"], "--top-p 1.5"),
        (["--top-k", "-3"], "--top-k -3"),
        (["--min-p", "2"], "--min-p 2.0"),
        (["--tree-size", "0"], "--tree-size 0"),
        (["--tree-size", "769"], "--tree-size 769"),
        (["--tree-size", "many"], "many"),
        (["--tree-depth", "0"], "--tree-depth 0"),
        (["--tree-width", "0"], "--tree-width 0"),
        (["--tree-threshold", "1"], "--tree-threshold 1.0"),
        (["--draft-temp", "-2"], "--draft-temp -2.0"),
        (["--policy", "dyspeck"], "dyspeck"),
        (["-np", "0"], "--parallel 0"),
        (["-np", "-2"], "--parallel -2"),
        (["-np", "many"], "many"),
        (["-n", "0"], "--max-new-tokens 0"),
        (["-n", "-5"], "--max-new-tokens -5"),
        (["--max-cpu-mem", "lots"], "lots"),
        (["-ngl", "few"], "few"),
        (["--seed", "-2"], "-2"),
        (["-md", "somewhere"], "-md needs a target"),
        (["--tre-size", "5"], "--tree-size"),
        (["--lines"], "--lines"),
        (["--stop"], "'--stop' requires an argument.\nTry: edgespec generate --help"),
        (["--stop", "--raw"], "--stop has no value: --raw is an option. Write --stop=--raw where that is meant."),
        (["--stop", "-n", "5"], "--stop has no value: -n is an option."),
        (["-o", "--resume"], "-o has no value: --resume is an option. Write --output=--resume"),
        (["--stop=-n", "--lines", "-vv", "-q", "--seed", "-2"], "-2 is not in the range"),
        (["--stop", ""], "--stop is empty"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("no_weights_read")
def test_a_wrong_setting_is_named_with_its_value(options: list[str], named: str, run_cli: RunCli) -> None:
    assert_error(run_cli(["p.jsonl", *options], files={"p.jsonl": GOOD_ROWS}), 2, named)


@pytest.mark.usefixtures("no_weights_read")
def test_devices_and_dtypes_that_are_not_there_are_named(pair_folders: tuple[Path, Path], run_cli: RunCli) -> None:
    options = ["p.jsonl", "-m", str(pair_folders[0])]
    for device in ("tpu", "xpu", "cuda:99"):
        assert_error(run_cli([*options, "--device", device], files={"p.jsonl": GOOD_ROWS}), 2, device)
    assert_error(run_cli([*options, "--dtype", "int3"], files={"p.jsonl": GOOD_ROWS}), 2, "int3")


@pytest.mark.usefixtures("no_weights_read")
def test_memory_that_cannot_suffice_is_refused_with_the_table(pair_folders: tuple[Path, Path], run_cli: RunCli) -> None:
    outcome = run_cli(["p.jsonl", "-m", str(pair_folders[0]), "--max-cpu-mem", "1MiB"], files={"p.jsonl": GOOD_ROWS})
    assert_error(outcome, 5, "keys and values", "more than the limit", "Raise the limit", "--quant nf4", "--dtype")


@pytest.mark.usefixtures("no_weights_read")
def test_memory_that_others_have_is_to_be_freed(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "free_host_bytes", lambda: 0)
    assert_error(run_cli(["p.jsonl"], files={"p.jsonl": GOOD_ROWS}), 5, "more than the limit", "Free memory or set a")


def test_an_output_that_cannot_be_written_is_refused_at_once(run_cli: RunCli, tmp_path: Path) -> None:
    outcome = run_cli(["p.jsonl", "-o", str(tmp_path / "no" / "out.jsonl")], files={"p.jsonl": GOOD_ROWS})
    assert_error(outcome, 1, "/no'")
    assert_error(run_cli(["p.jsonl", "-o", str(tmp_path)], files={"p.jsonl": GOOD_ROWS}), 1, "is a folder")
    assert_error(run_cli(["p.jsonl", "-o", "p.jsonl", "--overwrite"], files={"p.jsonl": GOOD_ROWS}), 1, "are one file")


def poison(folder: Path) -> None:
    """Make the last layer's weights NaN."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if "layers.2.mlp.up_proj" in name:
                tensors[name] = torch.full_like(tensor, float("nan"))
        save_file(tensors, path, metadata={"format": "pt"})


def test_nan_logits_end_one_text_with_an_error(folder: Path, run_cli: RunCli) -> None:
    poison(folder)
    assert_error(run_cli(["p.txt", "-m", str(folder), "-n", "4"], files={"p.txt": "def main("}), 1, "NaN")


def test_nan_logits_of_many_texts_are_recorded_row_by_row(folder: Path, run_cli: RunCli) -> None:
    poison(folder)
    outcome = run_cli(["p.jsonl", "-m", str(folder), "-n", "4", "-q", "--seed", "5"], files={"p.jsonl": GOOD_ROWS})
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.code == 3
    assert [row["finish_reason"] for row in rows] == ["error", "error"]
    assert rows[0]["error"]["type"] == "E_NAN_LOGITS"
    assert rows[0]["sampling"]["seed"] == 5
    lines = outcome.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Error", "Try", "Error", "Try"]
    assert "line 2" in lines[2]


def test_a_family_that_reads_trees_wrongly_is_decoded_by_chains_unless_the_check_is_off(
    run_cli: RunCli, tmp_path: Path
) -> None:
    layers = [[["global", "local"], 1]]  # the local ones count slots of the cache
    config = GPTNeoConfig(hidden_size=32, num_layers=2, attention_types=layers, num_heads=4, vocab_size=257)
    folder = save_folder(tmp_path / "gpt-neo", make_model(config))
    options = ["p.txt", "-m", str(folder), "-n", "3", "--temp", "0"]
    plain = run_cli(options, files={"p.txt": "def main("}).ended()
    assert "gpt_neo: decoded by chains, trees without branches, because" in plain.err
    assert "cannot draft" in run_cli([*options, "-md", str(folder)], files={"p.txt": "def main("}).ended(2).err
    branched = run_cli([*options, "--policy", "mcsd", "--fork", "4x3"], files={"p.txt": "def main("}).ended(2)
    assert "gpt_neo' grows no trees of --fork 4x3" in branched.err
    run_cli([*options, "--no-self-check"], files={"p.txt": "def main("}).ended()


def test_a_trace_is_for_those_who_ask_and_changes_nothing_else(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_cli(["nowhere.txt"])
    assert "Traceback" not in plain.err
    asked = run_cli(["nowhere.txt", "-vv"])
    monkeypatch.setenv("EDGESPEC_DEBUG", "1")
    for outcome in (asked, run_cli(["nowhere.txt"])):
        assert "Traceback" in outcome.err
        assert outcome.err.endswith(plain.err)
        assert outcome.code == plain.code == 4
