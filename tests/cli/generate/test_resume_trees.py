"""--resume where a profile has come or gone since, or trees were changed: a run goes on as it was begun."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.grow.acceptance import default_acceptance
from edgespec.pair.pair import ModelPair
from edgespec.placement.pair_setup import PairSetup, set_up, set_up_by_profile
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeOptions, TreeSettings
from tests.cli.conftest import RunCli, jsonl, written
from tests.profiles.examples import example_profile

CHOSEN = TreeSettings(policy="eagle2", draw="chosen", size=3, depth=2)
FORMATS = {"jsonl": ("text",), "specbench": ("choices", 0, "turns"), "openai-batch": ("response", "body", "choices")}
PROMPTS = jsonl({"id": text, "prompt": text} for text in "abc")


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    """Without a seed: whatever was drawn must be found again."""
    target, draft = map(str, pair_folders)
    return ["p.jsonl", "-m", target, "-md", draft, "--temp", "1", "-n", "12", "-o", "out.jsonl", "--ordered"]


@pytest.fixture
def has_profile(monkeypatch: pytest.MonkeyPatch) -> Callable[[TreeSettings | None], None]:
    """Let a profile be found whose plan has these trees; None: none is there."""

    def let(tree: TreeSettings | None) -> None:
        def found(pair: ModelPair, run_config: RunConfig, trees: TreeOptions, **more: Any) -> PairSetup:
            if trees.profile == "none" or tree is None or trees.explicit:
                return set_up_by_profile(pair, run_config, trees, **more)
            return replace(
                set_up(pair, run_config, tree), profile=example_profile(acceptance=default_acceptance().to_document())
            )

        monkeypatch.setattr("edgespec.placement.pair_setup.set_up_by_profile", found)

    return let


def texts(format_name: str = "jsonl") -> list[Any]:
    found: list[Any] = written()
    for key in FORMATS[format_name]:
        found = [record[key] for record in found]
    return found


def cut() -> None:
    """As if the run was killed behind its first record."""
    path = Path("out.jsonl")
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")


Has = Callable[[TreeSettings | None], None]


def goes_on(run_cli: RunCli, options: list[str], has_profile: Has, *, with_tree: TreeSettings | None,
            changes: Sequence[str] = (), format_name: str = "jsonl") -> str:  # fmt: skip
    """What is said when a run goes on with the texts that it had, whatever profile is there by now."""
    whole = texts(format_name)
    cut()
    has_profile(with_tree)
    outcome = run_cli([*options, *changes, "--resume"]).ended()
    assert texts(format_name) == whole
    return outcome.err


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_profile_that_was_measured_meanwhile_changes_nothing(
    format_name: str, run_cli: RunCli, options: list[str], has_profile: Has
) -> None:
    options += ["--format", format_name]
    assert run_cli(options, files=PROMPTS).code == 0
    said = goes_on(run_cli, options, has_profile, with_tree=CHOSEN, format_name=format_name)
    assert "trees are those that 'out.jsonl' was begun with" in said


def test_a_profile_that_is_gone_leaves_its_trees(run_cli: RunCli, options: list[str], has_profile: Has) -> None:
    """Chosen children have noise of their own: with other trees there would be another text."""
    has_profile(CHOSEN)
    assert run_cli(options, files=PROMPTS).code == 0
    for other in (None, replace(CHOSEN, size=2, depth=1)):
        goes_on(run_cli, options, has_profile, with_tree=other)


@pytest.mark.parametrize("changes", [["--tree-size", "2"], ["--policy", "opt-tree", "--draw", "coupled"]], ids=str)
def test_trees_that_no_text_depends_on_may_change(
    changes: Sequence[str], run_cli: RunCli, options: list[str], has_profile: Has
) -> None:
    assert run_cli([*options, "--tree-size", "8"], files=PROMPTS).code == 0
    goes_on(run_cli, options, has_profile, with_tree=TreeSettings(size=4), changes=changes)


def test_trees_that_texts_depend_on_are_not_mixed_unasked(run_cli: RunCli, options: list[str]) -> None:
    options += ["--draw", "chosen", "--policy", "eagle2", "--tree-size"]
    assert run_cli([*options, "8"], files=PROMPTS).code == 0
    cut()
    before = Path("out.jsonl").read_bytes()
    assert "made with other settings: tree.size 8 there, 4 here" in run_cli([*options, "4", "--resume"]).ended(2).err
    forgotten = run_cli([*options[: options.index("--draw")], "--resume"]).ended(2)
    assert 'tree.draw "chosen" there, default here' in forgotten.err
    assert Path("out.jsonl").read_bytes() == before
