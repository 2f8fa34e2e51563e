"""`edgespec generate` as a person sees it: text, records, exit codes."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec.cli import run
from edgespec.cli.prompts.read import read_prompts
from tests.cli.conftest import RunCli, records
from tests.support.families import greedy_tokens, make_tokenizer

ROWS = '{"id": "a", "prompt": "def main("}\n{"prompt": "import os", "category": "x"}\n'


@pytest.fixture
def pair_options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["-m", str(pair_folders[0]), "-md", str(pair_folders[1])]


def plain_greedy(folder: Path, prompt: str, new_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return greedy_tokens(model, make_tokenizer().encode(prompt), new_tokens)


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "none"],
        ["--tree-size", "1"],
        ["--tree-size", "64"],
        ["--tree-size", "768"],
        ["--tree-size", "64", "-ngl", "0"],
        ["--tree-size", "64", "-ngl", "1", "--tree-depth", "2", "--tree-width", "3", "--tree-threshold", "0.01"],
    ],
    ids=" ".join,
)
def test_greedy_records_hold_the_tokens_of_plain_decoding(
    options: list[str], run_cli: RunCli, pair_options: list[str], pair_folders: tuple[Path, Path]
) -> None:
    command = ["prompts.jsonl", *pair_options, "-n", "24", "--temp", "0", "--ordered", *options]
    first, second = records(run_cli(command, files={"prompts.jsonl": ROWS}))
    assert first["token_ids"] == plain_greedy(pair_folders[0], "def main(", 24)
    assert second["token_ids"] == plain_greedy(pair_folders[0], "import os", 24)


def test_a_record_has_the_fields_that_are_promised(run_cli: RunCli, pair_options: list[str]) -> None:
    options = ["p.jsonl", *pair_options, "-n", "9", "--temp", "0.7", "--seed", "3", "--ordered"]
    record = records(run_cli(options, files={"p.jsonl": ROWS}))[1]
    assert record["schema"] == "edgespec.result/1"
    assert (record["index"], record["id"], record["category"], record["meta"]) == (1, "1", "x", {})
    assert record["finish_reason"] == "length"
    assert record["usage"] == {
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "completion_tokens": 9,
        "reasoning_tokens": 0,
        "total_tokens": 18,
    }
    assert len(record["token_ids"]) == 9
    spec = record["spec"]
    assert (spec["mode"], spec["policy"], spec["draw"], spec["tuned"]) == ("tree", "adaptive", "coupled", True)
    assert spec["mean_tree_size"] <= spec["tree_size"] == 256
    assert sum(spec["accept_lengths"]) == 8  # the first token comes from the prompt's pass
    assert spec["passes"] == len(spec["accept_lengths"])
    assert spec["draft_n_accepted"] == 8 - spec["passes"]
    assert record["sampling"] == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "logit_bias": {}, "ignore_eos": False, "seed": 3,
    }  # fmt: skip
    assert {"ttft_s", "prefill_s", "prefill_tps", "decode_s", "decode_tps", "total_s"} == record["timings"].keys()
    assert record["memory"]["cpu_peak_bytes"] > 0
    assert {"model", "draft_model", "quant", "config_hash", "edgespec", "created", "error"} <= record.keys()


def test_the_same_seed_gives_the_same_text_and_another_seed_another(run_cli: RunCli, pair_options: list[str]) -> None:
    def texts(seed: str) -> list[list[int]]:
        command = ["p.jsonl", *pair_options, "-n", "24", "--temp", "0.8", "--seed", seed, "--ordered"]
        outcome = run_cli(command, files={"p.jsonl": ROWS})
        return [record["token_ids"] for record in records(outcome)]

    assert texts("7") == texts("7")
    assert texts("7") != texts("8")


def test_one_prompt_streams_its_text_to_stdout_and_the_rest_to_stderr(run_cli: RunCli, pair_options: list[str]) -> None:
    options = [*pair_options, "-n", "12", "--temp", "0", "--seed", "1"]
    outcome = run_cli(["p.txt", *options], files={"p.txt": "def main("}).ended()
    record = records(run_cli(["p.jsonl", *options, "--ordered"], files={"p.jsonl": ROWS}))[0]
    assert outcome.out == record["text"] + "\n"
    assert "tok/pass" in outcome.err
    assert "layers resident" in outcome.err
    assert run_cli(["p.txt", *options, "-q"], files={"p.txt": "def main("}).err == ""


def test_stdin_lines_and_files_give_the_same_prompts(run_cli: RunCli, pair_options: list[str]) -> None:
    options = [*pair_options, "-n", "4", "--temp", "0", "-q", "--ordered"]
    by_lines = records(run_cli(["-", "--lines", *options], stdin="def main(\n\nimport os\r\n"))
    by_rows = records(run_cli(["-f", "p.jsonl", *options], files={"p.jsonl": ROWS}))
    assert [r["token_ids"] for r in by_lines] == [r["token_ids"] for r in by_rows]


@pytest.mark.parametrize("piped", ["+ a line\n", ""])
def test_a_pipe_beside_a_prompt_is_not_read_and_that_is_said(
    piped: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin, end = os.pipe()
    os.write(end, piped.encode())
    os.close(end)
    with os.fdopen(begin, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run(["generate", "-p", "def main(", "-md", "none", "--policy", "none", "--dry-run"]) == 0
        assert stdin.read() == piped
    assert ("stdin is not read" in capsys.readouterr().err) == bool(piped)


def test_an_output_file_is_never_overwritten_unasked(run_cli: RunCli, pair_options: list[str], tmp_path: Path) -> None:
    options = ["p.jsonl", *pair_options, "-n", "2", "--temp", "0", "-o", str(tmp_path / "out.jsonl")]
    assert run_cli(options, files={"p.jsonl": ROWS}).code == 0
    written = (tmp_path / "out.jsonl").read_text()
    assert len(written.splitlines()) == 2
    assert "--overwrite" in run_cli(options, files={"p.jsonl": ROWS}).ended(2).err
    assert (tmp_path / "out.jsonl").read_text() == written
    assert run_cli([*options, "--overwrite"], files={"p.jsonl": ROWS}).code == 0


def test_a_text_ends_at_the_stop_token_and_says_so(
    run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The stop token is made one that greedy decoding reaches, inside an accepted path or not."""
    import shutil

    tokens = plain_greedy(pair_folders[0], "def main(", 24)
    stop = tokens[10]
    folder = shutil.copytree(pair_folders[0], tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 256]}))
    for size in ("1", "64"):
        pair = ["-m", str(folder), "-md", str(folder)]
        command = ["p.jsonl", *pair, "-n", "24", "--temp", "0", "--tree-size", size, "--ordered"]
        record = records(run_cli(command, files={"p.jsonl": ROWS}))[0]
        assert record["token_ids"] == tokens[: tokens.index(stop) + 1]
        assert record["finish_reason"] == "stop"


def test_a_text_that_fills_the_context_says_so(run_cli: RunCli, pair_options: list[str]) -> None:
    outcome = run_cli(["p.txt", *pair_options, "-n", "-1", "--temp", "0"], files={"p.txt": "x" * 240}).ended()
    assert "stopped: context" in outcome.err
    assert "16 tokens" in outcome.err


def test_without_a_draft_trees_have_what_the_text_repeats_or_decoding_is_plain(
    run_cli: RunCli, pair_folders: tuple[Path, Path]
) -> None:
    arguments = ["p.txt", "-m", str(pair_folders[0]), "-n", "4", "--temp", "0"]
    outcome = run_cli(arguments, files={"p.txt": "def main("}).ended()
    assert "no draft (-md): trees have what the text repeats" in outcome.err
    outcome = run_cli([*arguments, "--lookup", "off"], files={"p.txt": "def main("})
    assert "no draft (-md): decoding plainly" in outcome.err
    assert "1.00 tok/pass" in outcome.err


def test_the_generation_config_decides_what_the_flags_leave_open(
    run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    folder = shutil.copytree(pair_folders[0], tmp_path / "target")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 256})
    )
    outcome = run_cli(["p.jsonl", "-m", str(folder), "-n", "2", "--top-k", "7"], files={"p.jsonl": ROWS})
    sampling = records(outcome)[0]["sampling"]
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.6, 7, 0.95)


def test_a_chat_template_is_applied_unless_raw(
    run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    folder = shutil.copytree(pair_folders[0], tmp_path / "target")
    (folder / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    options = ["p.jsonl", "-m", str(folder), "-n", "1"]
    assert records(run_cli(options, files={"p.jsonl": ROWS}))[0]["usage"]["prompt_tokens"] == 11
    assert records(run_cli([*options, "--raw"], files={"p.jsonl": ROWS}))[0]["usage"]["prompt_tokens"] == 9


def test_help_lists_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--max-new-tokens", "--draft-model", "--tree-threshold", "--max-cpu-mem", "-ngl", "--draft-temp"):
        assert option in shown
    assert "Examples:" in shown


def test_prompt_files_keep_their_text(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n  two\r\n\r\n")
    assert [row.prompt for row in read_prompts(str(path), lines=False)] == ["one\n  two\n"]
    assert [row.prompt for row in read_prompts(str(path), lines=True)] == ["one", "  two"]


def test_prompts_that_end_with_a_stop_token_are_counted_in_one_line(run_cli: RunCli) -> None:
    rows = "".join(json.dumps({"prompt": f"a = 1{end}"}) + "\n" for end in ("<|endoftext|>", "<|endoftext|>", ""))
    outcome = run_cli(["rows.jsonl", "-n", "1", "--dry-run"], files={"rows.jsonl": rows})
    assert outcome.err.count("2 of 3 prompts: ends with '<|endoftext|>'") == 1, outcome.err
