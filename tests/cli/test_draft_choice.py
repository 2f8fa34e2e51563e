"""`-md A,B` and `-md auto`: one of several drafts is taken, a line says why, and a run goes on whichever it was."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from edgespec.cli.serve import command as serve
from edgespec.errors import EdgespecError
from edgespec.estimate import choice
from edgespec.hub.names import NO_DRAFT, resolve_drafts
from tests.cli.conftest import RunCli, jsonl, records, written
from tests.support.families import FAMILIES, make_model, make_tokenizer, save_folder

ROWS = jsonl([{"prompt": "ab"}, {"prompt": "cd"}])
RUN = ["p.jsonl", "-n", "6", "--seed", "3", "-ngl", "0"]


def prefer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(choice, "best_of", lambda found: next(one for one in found if one.draft.name == name))


@pytest.mark.parametrize("name", ["draft", "none"])
def test_the_plan_says_which_draft_is_expected_to_bring_how_much(
    name: str, run_cli: RunCli, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, name)
    target, draft = map(str, pair_folders)
    outcome = run_cli([*RUN, "-m", target, "-md", f"none,{draft}"], files=ROWS)
    assert outcome.err.count(f"draft: {name} expected ") == 1
    other = "none" if name == "draft" else "draft"
    assert f"; {other} " in outcome.err
    first, _ = records(outcome)
    assert (first["draft_model"] is None) == (name == "none")


def test_a_run_goes_on_where_another_draft_is_chosen_by_now(
    run_cli: RunCli, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are the same; one that was begun with a draft by name is refused, as ever."""
    target, draft = map(str, pair_folders)
    several = [*RUN, "-m", target, "-md", f"none,{draft}", "-o", "out.jsonl"]
    prefer(monkeypatch, "draft")
    assert run_cli([*several, "--limit", "1"], files=ROWS).code == 0
    prefer(monkeypatch, "none")
    assert run_cli([*several, "--resume"]).code == 0
    assert [one["draft_model"] is None for one in written()] == [False, True]
    assert "draft_quant" in run_cli([*RUN, "-m", target, "-md", draft, "-o", "out.jsonl", "--resume"]).ended(2).err


MANY = jsonl([{"prompt": "ab"}] * 3)


@pytest.mark.parametrize(
    ("command", "arguments", "num_texts", "temperature", "context_tokens"),
    [
        ("generate", ["p.jsonl", "-n", "6", "-np", "2", "--temp", "0.7"], 2, 0.7, 8),
        ("generate", ["p.jsonl", "-n", "9", "-np", "8"], 3, 0.6, 11),  # no more than there are rows
        ("generate", ["p.jsonl", "-n", "6", "-np", "1", "--greedy"], 1, None, 8),
        ("generate", ["p.jsonl", "-n", "6", "-np", "2", "--stream", "-o", "o.jsonl"], 1, 0.6, 8),  # one is shown
        ("chat", ["-p", "ab", "-st", "--temp", "0.9", "-c", "64"], 1, 0.9, 64),
        ("serve", ["-np", "5", "--temp", "0.4", "-c", "64"], 5, 0.4, 64),
        ("serve", ["-c", "64"], 4, 0.6, 64),
    ],
)
def test_drafts_are_compared_for_the_texts_of_the_run(
    command: str, arguments: list[str], num_texts: int, temperature: float | None, context_tokens: int,
    run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As many as share its passes, as long as they are, and drawn as its options say, above what the model asks for."""
    asked = []

    def reckon(pair: choice.PairOnHardware, *_: Any, temperature: float | None, **__: Any) -> NoReturn:
        asked.append((pair.run_config.num_texts, temperature, pair.run_config.context_tokens))
        raise EdgespecError("E_SETTING", "asked.", "")

    monkeypatch.setattr(choice, "reckon_drafts", reckon)
    monkeypatch.setattr(serve, "listen", lambda _settings: nullcontext())
    target = shutil.copytree(pair_folders[0], tmp_path / "target")
    (target / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    run_cli([*arguments, "-m", str(target), "-md", f"none,{pair_folders[1]}"], files=MANY, command=command)
    assert asked == [(num_texts, temperature, context_tokens)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-md", "none,gone"], "'gone'"),
        (["-md", "none,"], "the model's name is empty"),
        (["-md", "none,mtp", "--draft-revision", "v2"], "is of one draft, and there are 2"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(
    arguments: list[str], said: str, run_cli: RunCli, pair_folders: tuple[Path, Path]
) -> None:
    outcome = run_cli([*RUN, "-m", str(pair_folders[0]), *arguments], files=ROWS)
    assert outcome.code in {2, 4}
    assert said in outcome.err


def test_what_measures_one_draft_takes_no_list(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    target, draft = map(str, pair_folders)
    for command in ("profile", "bench"):
        outcome = run_cli(["-m", target, "-md", f"{draft},self"], command=command).ended(2)
        assert "several drafts are named where one is needed" in outcome.err


def test_other_tokens_in_a_list_are_refused(run_cli: RunCli, pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_folder(tmp_path / "other", make_model(FAMILIES["llama"]()), tokenizer=make_tokenizer(swapped=True))
    outcome = run_cli([*RUN, "-m", str(pair_folders[0]), "-md", f"self,{other}"], files=ROWS).ended(2)
    assert "differ from the target's" in outcome.err


def test_an_estimate_has_them_side_by_side_and_plans_the_best(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    target, draft = map(str, pair_folders)
    arguments = ["-m", target, "-md", f"{draft},self,none", "-ngl", "0", "-c", "64"]
    facts = json.loads(run_cli([*arguments, "--json"], command="estimate").out)
    found = {one["draft"]: one for one in facts["drafts"]}
    assert set(found) == {"draft", "self", "none"}
    best = max(found.values(), key=lambda one: one["tokens_per_s"])
    assert (facts["draft"] or "none").rpartition("/")[2] == best["draft"]
    assert found["none"]["tokens_per_pass"] == 1 < found["draft"]["tokens_per_pass"]
    assert found["none"]["lookup_tokens_per_s"] > found["none"]["tokens_per_s"]
    assert facts["speed"]["plain"]["tokens_per_s"]["likely"] == found["none"]["tokens_per_s"]
    lines = run_cli(arguments, command="estimate").out.splitlines()
    table = lines[lines.index("drafts at hand:") + 1 :]
    assert len(table) == 4
    assert table[-1].startswith("  most tokens a second: -md ")


@pytest.mark.parametrize(("elsewhere", "is_here"), [([], True), (["--hardware", "rtx-4090"], False)])
def test_an_estimate_takes_what_was_measured_here_for_this_machine_alone(
    elsewhere: list[str], is_here: bool, run_cli: RunCli, pair_folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = []

    def reckon(pair: choice.PairOnHardware, _: Any, trees: choice.DraftTrees, **__: Any) -> NoReturn:
        asked.append((pair.is_here, trees.options.profile))
        raise EdgespecError("E_SETTING", "asked.", "")

    monkeypatch.setattr(choice, "reckon_drafts", reckon)
    target, draft = map(str, pair_folders)
    run_cli(["-m", target, "-md", f"none,{draft}", "-c", "64", *elsewhere], command="estimate")
    assert asked == [(is_here, "auto")]


def test_a_path_with_a_comma_is_one_draft(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    place = tmp_path / "a,b"
    place.symlink_to(pair_folders[1], target_is_directory=True)
    assert resolve_drafts(str(place)) == (place,)
    assert resolve_drafts(f"none,{pair_folders[1]},none") == (NO_DRAFT, pair_folders[1])
