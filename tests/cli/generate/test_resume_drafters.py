"""--resume with an EAGLE-3 head and with a DFlash2 drafter: the file is the one that is written in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunCli, jsonl, written
from tests.edgespec.draft.contract import DRAFTS

ROWS = jsonl([{"id": str(number), "prompt": f"def read_{number}(path):\n    return "} for number in range(4)])
KEPT = ("id", "prompt", "text", "token_ids", "finish_reason", "error", "config", "config_hash")


def options_of(draft: str, temperature: str, folder: Path) -> list[str]:
    target, drafter = DRAFTS[draft].write(folder / "pair", "llama")
    tree = ["--tree-size", "60", "--lookup", "off"]  # a draft grows in every step
    return ["-m", str(target), "-md", str(drafter), "--temp", temperature, "--seed", "3", "-n", "8", *tree]


def of_texts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what was measured, in the rows' order."""
    return sorted(({key: one[key] for key in KEPT} for one in found), key=lambda one: str(one["id"]))


@pytest.mark.parametrize(("draft", "temperature"), [("DFlash2", "0.8"), ("EAGLE-3", "0")])
def test_a_file_that_is_gone_on_with_is_the_one_written_in_one_go(
    draft: str, temperature: str, run_cli: RunCli, tmp_path: Path
) -> None:
    command = [*options_of(draft, temperature, tmp_path), "-o", "out.jsonl"]
    run_cli(["p.jsonl", *command], files=ROWS).ended()
    whole = written()
    assert any(sum(one["spec"]["accept_lengths"]) for one in whole)
    lines = Path("out.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    # The last line is torn
    Path("out.jsonl").write_text("".join([*lines[:2], lines[2][:40]]), encoding="utf-8")
    assert "2 of 4 prompts are done" in run_cli(["p.jsonl", *command, "--resume"]).ended().err
    assert of_texts(written()) == of_texts(whole)
