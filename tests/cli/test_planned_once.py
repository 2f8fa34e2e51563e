"""A command reads the free memory once, and builds one skeleton of each model that it loads."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, TreeSettings
from edgespec.doctor import profile_pair
from edgespec.pair import folder
from edgespec.pair.pair import open_pair
from edgespec.placement import place
from tests.cli.conftest import RunCli

PROMPTS = {"p.jsonl": '{"prompt": "a"}\n{"prompt": "def main("}\n{"prompt": "import"}\n'}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Readings of the memory, and the skeletons that were built, by their models' folders."""
    found: Counter[str] = Counter()
    build, read = folder.build_skeleton, place.usable_host_bytes

    def build_skeleton(config: Any, checkpoint: Any, **options: Any) -> Any:
        found[Path(checkpoint.folder).name] += 1
        return build(config, checkpoint, **options)

    def usable_host_bytes() -> int:
        found["readings"] += 1
        return read()

    monkeypatch.setattr(folder, "build_skeleton", build_skeleton)
    monkeypatch.setattr(place, "usable_host_bytes", usable_host_bytes)
    return found


BOTH = {"readings": 1, "target": 1, "draft": 1}
TARGET = {"readings": 1, "target": 1}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], BOTH),
        (["-np", "auto"], BOTH),
        (["-np", "2"], BOTH),
        (["-np", "1"], BOTH),
        (["--profile", "none"], BOTH),
        (["--tree-size", "8"], BOTH),
        (["--policy", "none"], TARGET),
        (["--policy", "none", "-np", "1"], TARGET),
        (["--quant", "int8", "--draft-quant", "int8"], BOTH),
    ],
    ids=" ".join,
)
def test_generate_of_a_file(
    options: list[str], expected: dict[str, int], dry: list[str], run_cli: RunCli, counted: Counter[str]
) -> None:
    run_cli(["p.jsonl", "-n", "4", *options, *dry], files=PROMPTS).ended()
    assert counted == expected


def test_a_chat_that_tries_several_contexts(run_cli: RunCli, counted: Counter[str]) -> None:
    outcome = run_cli(["-p", "hello", "-st", "-n", "2", "--max-cpu-mem", "280M"], command="chat").ended()
    assert "context 1024 tokens" in outcome.err, "two larger ones do not fit"
    assert counted == BOTH


def test_a_profile_that_tries_several_numbers_of_texts(
    run_cli: RunCli, counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_pair, "QUICK", profile_pair.Effort(budget_s=1.0, max_s=1.0, steps=4))
    monkeypatch.setattr(profile_pair, "SIZES", (1,))
    run_cli(["--prompts", "p.jsonl", "--temps", "0"], files=PROMPTS, command="profile").ended()
    assert counted == BOTH


def test_collecting_features(run_cli: RunCli, counted: Counter[str]) -> None:
    texts = {"a.txt": "def main(path):\n    return path\n" * 20}
    options = ["head", "--data", "a.txt", "-o", "head", "--block-tokens", "32", "--training-steps", "1"]
    run_cli([*options, "--held-out-blocks", "1", "--batch", "1"], files=texts, command="train").ended()
    assert counted["readings"] == 1


def test_an_engine(counted: Counter[str]) -> None:
    with Engine.from_pretrained():
        assert counted == BOTH
    counted.clear()
    with Engine.from_pretrained(tree=TreeSettings(policy="none")):
        assert counted == TARGET
    counted.clear()
    with Engine.from_pair(open_pair(None, None), tree=TreeSettings(size=8)):
        assert counted == BOTH
