"""`edgespec cache`: what is kept, with sizes, and its removal, which is asked about; `edgespec completion`."""

import datetime
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

from edgespec.cli import run
from edgespec.prefix_cache.prompt_files import HEADER, SCHEMA, note_use
from edgespec.user_paths import cache_folder, machine_file, profiles_folder, prompt_notes_folder


@pytest.fixture
def kept() -> dict[str, Path]:
    """Two quantised copies, one of them cut, a tokenizer's merges, a profile, speeds, and a draft's yields."""
    copies = cache_folder() / "quantized"
    places = {
        "nf4-abc": copies / "nf4-abc" / "layer-00000.safetensors",
        "int8-def.partial": copies / "int8-def.partial" / "layer-00000.safetensors",
        "0f3a": cache_folder() / "tokenizers" / "0f3a.merges",
        "1c4b": cache_folder() / "kernels" / "1c4b.o",
        "cpu-pair": profiles_folder() / "cpu-pair.toml",
        "machine": machine_file(),
        "ab-cd": cache_folder() / "drafts" / "ab-cd.json",
    }
    for path in places.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * (3 << 20))
    return places


def kept_names(capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    capsys.readouterr()
    assert run(["cache", "list", "--json"]) == 0
    return {entry["name"]: entry["bytes"] for entry in json.loads(capsys.readouterr().out)["kept"]}


def test_all_that_can_be_made_again_is_listed_with_sizes(
    capsys: pytest.CaptureFixture[str], kept: dict[str, Path]
) -> None:
    assert kept_names(capsys) == dict.fromkeys(kept, 3 << 20)
    assert run(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "quantized     3.0 MiB" in out
    assert "together 21.0 MiB" in out


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ([], set()),
        (["quantized"], {"0f3a", "1c4b", "cpu-pair", "machine", "ab-cd"}),
        (["drafts", "quantized"], {"0f3a", "1c4b", "cpu-pair", "machine"}),
        (["nf4-abc", "tokenizers", "speeds", "kernels"], {"int8-def.partial", "cpu-pair", "ab-cd"}),
    ],
)
def test_what_is_named_is_removed_and_nothing_else(
    names: list[str], left: set[str], capsys: pytest.CaptureFixture[str], kept: dict[str, Path]
) -> None:
    other = profiles_folder() / "notes.txt"
    other.write_text("mine")
    assert run(["cache", "clear", *names, "--yes"]) == 0
    assert set(kept_names(capsys)) == left
    assert other.exists()


@pytest.mark.parametrize(("answer", "is_removed"), [("y\n", True), ("\n", False), ("n\n", False)])
def test_it_asks_first(
    answer: str, is_removed: bool, capsys: pytest.CaptureFixture[str], kept: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _text: answer.strip())
    assert run(["cache", "clear", "profiles"]) == 0
    assert kept["cpu-pair"].exists() != is_removed


def test_where_nobody_can_be_asked_and_for_unknown_names_nothing_is_removed(
    capsys: pytest.CaptureFixture[str], kept: dict[str, Path]
) -> None:
    for arguments, message in ((["clear"], "give --yes"), (["clear", "nf4-xyz", "--yes"], "'nf4-xyz' is neither")):
        assert run(["cache", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert len(kept_names(capsys)) == len(kept)


def test_the_users_own_files_are_neither_listed_nor_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: dict[str, Path]
) -> None:
    """Whoever names one is told so."""
    own = tmp_path / "talk.json"
    own.write_text("a saved chat")
    assert len(kept_names(capsys)) == len(kept)
    assert run(["cache", "clear", str(own), "--yes"]) == 2
    assert "a file of your own, to be removed by hand" in capsys.readouterr().err
    assert own.exists()


def prompt_file(path: Path, schema: str = SCHEMA) -> Path:
    """A file of a prompt's beginning, which was used here."""
    header = {"schema": schema, "target": {"name": "large"}}
    save_file({"target.keys.0": torch.zeros(1 << 18)}, path, metadata={HEADER: json.dumps(header)})
    note_use(path)
    return path


def test_prompt_caches_are_listed_wherever_they_lie_with_model_and_last_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: dict[str, Path]
) -> None:
    path = prompt_file(tmp_path / "system.safetensors")
    (note,) = prompt_notes_folder().iterdir()
    os.utime(path, (0, 3600 * 24 * 365))
    os.utime(note, (0, 3600 * 24 * 730))
    assert run(["cache", "list", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)["kept"][-1]
    assert (entry["kind"], entry["name"], entry["path"]) == ("prompts", str(path), str(path))
    assert (entry["model"], entry["bytes"]) == ("large", path.stat().st_size)
    assert (entry["changed"][:4], entry["used"][:4]) == ("1971", "1972")
    note_use(path)
    assert run(["cache", "list"]) == 0
    today = datetime.datetime.now().astimezone().strftime("%Y-%m-%d")
    assert f"{path} (of large, last used {today})" in capsys.readouterr().out


@pytest.mark.parametrize("names", [[], ["prompts"], ["b/../a.safetensors"]], ids=str)
def test_prompt_caches_are_removed_as_others_are_and_said_to_lie_elsewhere(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, other = prompt_file(tmp_path / "a.safetensors"), prompt_file(tmp_path / "other.safetensors")
    assert run(["cache", "clear", *names, "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"prompts: {path}\nprompt" in out.replace(f"prompts: {other}\n", "")
    assert "lie where --prompt-cache put them" in out
    assert not path.exists()
    assert other.exists() == (names == ["b/../a.safetensors"])
    assert len(list(prompt_notes_folder().iterdir())) == other.exists()


def test_prompt_caches_that_are_gone_or_another_file_by_now_are_no_part_of_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt_file(tmp_path / "gone").unlink()
    others = [prompt_file(tmp_path / name) for name in ("text", "folder")]
    others.append(prompt_file(tmp_path / "of another schema", schema="edgespec.prompt/0"))
    others[0].write_text("notes of mine")
    others[1].unlink()
    others[1].mkdir()
    (prompt_notes_folder() / "torn.json").write_text('{"path')
    assert kept_names(capsys) == {}
    assert len(list(prompt_notes_folder().iterdir())) == 4, "the note of a file that is gone is dropped"
    assert run(["cache", "clear", "--yes"]) == 0
    assert all(path.exists() for path in others)


def test_a_copy_that_is_being_written_stays(capsys: pytest.CaptureFixture[str], kept: dict[str, Path]) -> None:
    with FileLock(str(cache_folder() / "quantized" / "int8-def.lock")):
        assert run(["cache", "clear", "--yes"]) == 0
    assert "is being written, and stays" in capsys.readouterr().err
    assert set(kept_names(capsys)) == {"int8-def.partial"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_asks_this_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_EDGESPEC_COMPLETE={shell}_complete" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
