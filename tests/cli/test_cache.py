"""`edgespec cache`: what is kept, with sizes, and its removal, which is asked about; `edgespec completion`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from edgespec.cli import run
from edgespec.files import cache_folder, machine_file, profiles_folder


@pytest.fixture
def kept() -> dict[str, Path]:
    """Two quantised copies, one of them cut, a profile and measured speeds; a saved chat beside them."""
    copies = cache_folder() / "quantized"
    places = {
        "nf4-abc": copies / "nf4-abc" / "layer-00000.safetensors",
        "int8-def.partial": copies / "int8-def.partial" / "layer-00000.safetensors",
        "cpu-pair": profiles_folder() / "cpu-pair.toml",
        "machine": machine_file(),
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
    assert "together 12.0 MiB" in out


@pytest.mark.parametrize(
    ("names", "left"),
    [
        ([], set()),
        (["quantized"], {"cpu-pair", "machine"}),
        (["nf4-abc", "speeds"], {"int8-def.partial", "cpu-pair"}),
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
    """As those of --prompt-cache are: whoever names one is told so."""
    own = tmp_path / "system.safetensors"
    own.write_text("keys and values")
    assert len(kept_names(capsys)) == len(kept)
    assert run(["cache", "clear", str(own), "--yes"]) == 2
    assert "a file of your own, to be removed by hand" in capsys.readouterr().err
    assert own.exists()


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
