"""A run is that of its folder's template, tokenizer and stop tokens, and of one day: --resume mixes no others."""

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunCli, jsonl, written

FILES = jsonl({"id": name, "messages": [{"role": "user", "content": name}]} for name in ("ab", "cd", "ef"))
TEMPLATE = '{{ strftime_now("%A %d %B %Y") }}: {% for m in messages %}{{ m.content }}{% endfor %}'


@pytest.fixture
def folder(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A model whose template tells the day."""
    made = tmp_path / "model"
    shutil.copytree(pair_folders[0], made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> list[str]:
    return ["p.jsonl", "-m", str(folder), "-n", "6", "--temp", "1", "--seed", "7", "-o", str(tmp_path / "out.jsonl")]


def records(tmp_path: Path) -> dict[str, Any]:
    return {record["id"]: record for record in written(tmp_path / "out.jsonl")}


def _edit(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


CHANGES: dict[str, Callable[[Path], object]] = {
    "chat template": lambda folder: (folder / "chat_template.jinja").write_text("!" + TEMPLATE),
    "stop tokens [256] there, [12, 256] here": lambda folder: _edit(
        folder / "generation_config.json", "eos_token_id", [256, 12]
    ),
    "suppress_tokens default there, [12] here": lambda folder: _edit(
        folder / "generation_config.json", "suppress_tokens", [12]
    ),
    "tokenizer": lambda folder: _edit(folder / "tokenizer.json", "normalizer", {"type": "Lowercase"}),
    "tokenizer ": lambda folder: _edit(folder / "tokenizer.json", "post_processor", {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_in_the_folder_is_named(
    change: str, run_cli: RunCli, folder: Path, options: list[str], tmp_path: Path
) -> None:
    assert run_cli([*options, "--limit", "1"], files=FILES).code == 0
    CHANGES[change](folder)
    assert f"was made with other settings: {change.strip()}" in run_cli([*options, "--resume"]).ended(2).err
    assert list(records(tmp_path)) == ["ab"]


def test_a_template_that_is_not_used_is_no_part_of_a_run(run_cli: RunCli, folder: Path, options: list[str]) -> None:
    assert run_cli([*options, "--raw", "--limit", "1"], files=FILES).code == 0
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert run_cli([*options, "--raw", "--resume"]).code == 0


def test_a_run_goes_on_with_its_first_day(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    """And a day that is given makes the same texts of the same seed on any other."""
    assert run_cli([*options, "--day", "2001-02-03"], files=FILES).code == 0
    whole = records(tmp_path)
    first = json.dumps(whole["ab"]) + "\n"
    (tmp_path / "out.jsonl").write_text(first)
    assert run_cli([*options, "--resume"]).code == 0
    resumed = records(tmp_path)
    assert {name: record["text"] for name, record in resumed.items()} == {n: r["text"] for n, r in whole.items()}
    assert {record["config"]["day"] for record in resumed.values()} == {"2001-02-03"}
    refused = run_cli([*options, "--resume", "--day", "2001-02-04"]).ended(2)
    assert 'day "2001-02-03" there, "2001-02-04" here' in refused.err


def test_another_day_is_another_configuration(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    days = [datetime.date.today().isoformat()]
    assert run_cli(options, files=FILES).code == 0
    today = records(tmp_path)["ab"]
    assert today["config"]["day"] in [*days, datetime.date.today().isoformat()]
    assert run_cli([*options, "--overwrite", "--day", "2001-02-03"]).code == 0
    other = records(tmp_path)["ab"]
    assert other["config_hash"] != today["config_hash"]
    assert run_cli([*options, "--overwrite", "--day", "2026-11-25"]).code == 0
    third = records(tmp_path)["ab"]
    # "Saturday 03 February 2001" and "Wednesday 25 November 2026" have different lengths; not all days have
    assert other["usage"]["prompt_tokens"] != third["usage"]["prompt_tokens"]


def test_a_day_that_nothing_asks_for_is_said_to_change_nothing(
    run_cli: RunCli, folder: Path, options: list[str], tmp_path: Path
) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    done = run_cli([*options, "--day", "2001-02-03"], files=FILES)
    assert "--day changes nothing: no chat template asks for it" in done.err
    assert records(tmp_path)["ab"]["config"]["day"] is None
    assert run_cli([*options, "--resume", "--day", "yesterday"]).code == 2
