"""`edgespec profile`, and `edgespec generate` with what it measured."""

import importlib.util
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.cli import run
from edgespec.cli.profile.report import describe, sparkline, speeds_of, write_report
from edgespec.doctor import profile_pair
from edgespec.doctor.profile_pair import Effort
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.policies import OpenPolicy
from edgespec.pair.pair import open_pair
from edgespec.placement.profile_trees import tree_settings
from edgespec.placement.run_config import resolve_run_config
from edgespec.tuning import threads
from edgespec.tuning.memory import known_costs
from edgespec.user_paths import profiles_folder
from profiles.files import read_profile, write_profile
from profiles.schema import SCHEMA, Profile
from tests.cli.conftest import Outcome, RunCli
from tests.offload.experts.mixtures import save_mixture
from tests.profiles.examples import PLAIN, example_plan, example_profile
from tests.support.families import FAMILIES, make_model, save_folder

TINY = Effort(budget_s=2.0, max_s=2.0, steps=16)
PROMPTS = '{"prompt": "def read_lines(path):"}\n{"prompt": "import os\\n\\nclass Folder:"}\n'
FILES = {"p.jsonl": PROMPTS}
GENERATE = ["p.jsonl", "-n", "12", "--temp", "0.8", "--seed", "1"]


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_pair, "QUICK", TINY)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A home in which the built-in pair was profiled once, and what that printed."""
    home = tmp_path_factory.mktemp("measured")
    (home / "p.jsonl").write_text(PROMPTS)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setenv("EDGESPEC_HOME", str(home))
        patch.setattr(profile_pair, "QUICK", TINY)
        patch.setattr(profile_pair, "SIZES", (1, 4, 16))
        code = run(["profile", "--prompts", str(home / "p.jsonl"), "--temps", "0,0.8"])
    return home, Outcome(code=code, out=out.getvalue(), err=err.getvalue())


@pytest.fixture
def outcome(measured: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """What measuring printed, in its home."""
    monkeypatch.setenv("EDGESPEC_HOME", str(measured[0]))
    return measured[1]


@pytest.fixture
def profile(outcome: Outcome) -> Profile:
    (path,) = profiles_folder().iterdir()
    return read_profile(path)


def records(found: Outcome) -> list[dict[str, Any]]:
    assert found.code == 0, found.err
    return [json.loads(line) for line in found.out.splitlines()]


def test_measuring_shows_the_plans_and_keeps_the_profile(outcome: Outcome, profile: Profile) -> None:
    assert outcome.code == 0, outcome.err
    assert f"kept as {profiles_folder() / profile.name}.toml" in outcome.err
    assert "temperature 0.8" in outcome.out
    assert "→" in outcome.out
    assert outcome.out.count("times plain decoding") + outcome.out.count("is switched off") == 2
    assert "calibration error" not in outcome.out, "no acceptance model was fitted"
    assert [plan.temperature for plan in profile.plans] == [0.0, 0.8]
    assert [curve.num_texts for curve in profile.passes] == [1, 16]
    assert profile.passes[0].points[0].rows == 1
    assert profile.passes[0].points[-1].rows > 1
    for plan in profile.plans:
        assert [found.num_texts for found in plan.by_texts] == [16]
        assert plan.best.num_trees > 1
        assert sum(plan.best.promised) > 0


def test_the_table_and_the_sentence_below_it_have_the_same_seconds(profile: Profile) -> None:
    """They are what is known in the end: the machine may have become slower since a tree was chosen."""
    for plan in profile.plans:
        speeds = dict(speeds_of(profile, plan.best))
        if plan.best.size in speeds:
            assert plan.best.trees_per_s == pytest.approx(speeds[plan.best.size])
        for found in (plan.best, *plan.by_texts):
            assert found.plain_per_s == pytest.approx(found.num_texts / known_costs(profile).plain_s(found.num_texts))
            assert found.pays == (found.trees_per_s > found.plain_per_s)


def test_other_programs_that_ran_meanwhile_are_named_once(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_pair, "QUICK", Effort(budget_s=0.5, max_s=0.5, steps=2))
    monkeypatch.setattr(profile_pair, "SIZES", (1,))
    for busy, times in ((1.5, 1), (0.1, 0), (None, 0)):
        monkeypatch.setattr(threads.OthersLoad, "__call__", lambda _load, busy=busy: busy)
        found = run_cli(["--prompts", "p.jsonl", "--temps", "0"], files=FILES, command="profile").ended()
        said = "other programs kept 1.5 processors busy while this was measured"
        assert " ".join(found.err.split()).count(said) == times


def test_sixteen_texts_are_measured_and_of_a_mixture_no_more_than_there_are_prompts(tmp_path: Path) -> None:
    """Texts of one prompt would ask for the same experts."""
    mixture = save_mixture(tmp_path / "mixture", "qwen3-moe")
    for pair, num_prompts, expected in ((open_pair(None, None), 2, 16), (open_pair(mixture, mixture), 5, 4)):
        run_config = resolve_run_config(
            pair.target, pair.max_context, draft=pair.draft, context_tokens=256, device="cpu"
        )
        found = profile_pair.set_up_to_measure(pair, run_config, num_prompts=num_prompts)
        assert found.run_config.num_texts == expected
        assert expected * found.largest_tree.size == 1024, "a text alone may have a quarter of these nodes"


def test_a_full_profile_fits_the_pairs_own_acceptance_and_runs_grow_trees_on_it(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    effort = Effort(budget_s=0.5, max_s=0.5, steps=8, fits_acceptance=True)
    monkeypatch.setattr(profile_pair, "FULL", effort)
    monkeypatch.setattr(profile_pair, "SIZES", (1, 4))
    monkeypatch.setattr(profile_pair, "FIT_STEPS", 20)
    monkeypatch.setattr(profile_pair, "MIN_TREES", 8)
    found = run_cli(["--full", "--prompts", "p.jsonl", "--temps", "0.8"], files=FILES, command="profile").ended()
    assert "expected calibration error of the acceptance model: 0." in found.out
    (path,) = profiles_folder().iterdir()
    profile = read_profile(path)
    used: list[AcceptanceModel] = []
    right = OpenPolicy.with_acceptance
    monkeypatch.setattr(OpenPolicy, "with_acceptance", lambda self, model: (used.append(model), right(self, model))[1])
    assert run_cli(GENERATE, files=FILES).code == 0
    assert used[0].to_document() == profile.acceptance != default_acceptance().to_document()

    monkeypatch.setattr(profile_pair, "MIN_TREES", 10**6)
    found = run_cli(["--full", "--prompts", "p.jsonl", "--temps", "0.8"], files=FILES, command="profile")
    assert "these prompts give too few trees" in " ".join(found.err.split())


def test_runs_find_the_profile_and_their_records_compare_it_with_what_came_out(
    run_cli: RunCli, profile: Profile
) -> None:
    found = run_cli([*GENERATE, "-np", "1"], files=FILES)
    predicted = profile.plans[1].best.tokens_per_s
    assert f"profile {profile.name}: plan for temperature 0.8, {predicted:.3g} tokens/s predicted" in found.err
    for record in records(found):
        plan = record["spec"]["plan"]
        assert plan["profile"] == profile.name
        assert plan["predicted_tps"] == pytest.approx(predicted, abs=1e-3)
        assert plan["actual_tps"] == record["timings"]["decode_tps"] > 0
        tree, spec = tree_settings(profile.plans[1].best), record["spec"]
        assert spec["policy"] == tree.policy
        # Coupled trees go on from the plan; others are held to it.
        assert spec["tree_size"] == (tree.num_nodes or None) or (spec["tuned"] and spec["tree_size"] > tree.num_nodes)


@pytest.mark.usefixtures("outcome")
def test_profile_none_leaves_it_aside(run_cli: RunCli) -> None:
    found = run_cli([*GENERATE, "--profile", "none"], files=FILES)
    assert "profile" not in found.err
    plan = records(found)[0]["spec"]["plan"]
    assert (plan["profile"], plan["predicted_tps"]) == (None, None)
    assert plan["actual_tps"] > 0


@pytest.fixture
def followed(profile: Profile, tmp_path: Path) -> Path:
    """The same profile, with a plan that is known."""
    best = example_plan(threshold=0.01)
    path = tmp_path / "followed.toml"
    write_profile(replace(profile, plans=tuple(replace(plan, best=best) for plan in profile.plans)), path)
    return path


def test_a_flag_overrides_the_plan_and_that_is_said(run_cli: RunCli, followed: Path) -> None:
    found = run_cli([*GENERATE, "--profile", str(followed), "--tree-size", "9"], files=FILES)
    assert "plan for temperature 0.8, overridden by flags" in found.err
    assert "adaptive trees of 9 nodes, depth 24" in found.err
    spec = records(found)[0]["spec"]
    assert (spec["tree_size"], spec["plan"]["predicted_tps"]) == (9, None)


# Lists, files, pictures


def test_profiles_are_listed_with_those_that_cannot_be_read(run_cli: RunCli) -> None:
    empty = run_cli(["--list"], command="profile")
    assert (empty.code, empty.out) == (0, f"no profiles in {profiles_folder()}\n")
    write_profile(example_profile(), profiles_folder() / "a.toml")
    (profiles_folder() / "b.toml").write_text("name =")
    good, bad = run_cli(["--list"], command="profile").out.splitlines()
    assert good.startswith("some-gpu-big-small-12345678  big + small")
    assert "T=0.8 adaptive trees of at most 16 nodes, threshold 0.02 4 tok/s" in good
    assert "b.toml' cannot be read" in bad


def test_names_in_a_profile_that_came_from_elsewhere_are_shown_not_obeyed(run_cli: RunCli) -> None:
    profile = example_profile()
    write_profile(replace(profile, pair=replace(profile.pair, target="\x1b[2Jbig")), profiles_folder() / "a.toml")
    assert r"\x1b[2Jbig + small" in run_cli(["--list"], command="profile").out


def test_an_exported_profile_can_be_imported(
    run_cli: RunCli, profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile_pair._Texts, "visit_sizes", None)  # nothing is measured
    (kept,) = profiles_folder().iterdir()
    before = kept.stat().st_mtime_ns
    exported = tmp_path / "exported.toml"
    found = run_cli(["--export", str(exported)], command="profile")
    assert (found.code, kept.stat().st_mtime_ns) == (0, before), found.err
    assert "temperature 0.8" in found.out
    assert f"copied to {exported}" in found.err
    assert read_profile(exported) == profile
    refused = run_cli(["--export", str(exported)], command="profile").ended(2)
    assert f"'{exported}' exists.\nTry: Choose another file, or give --overwrite." in refused.err
    assert run_cli(["--export", str(exported), "--overwrite"], command="profile").code == 0

    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    assert "elsewhere" not in run_cli(["--import", str(exported)], command="profile").ended().err
    (kept,) = profiles_folder().iterdir()
    assert read_profile(kept) == profile
    assert f"kept already as {kept}" in run_cli(["--import", str(exported)], command="profile").err
    assert f"profile {profile.name}" in run_cli(GENERATE, files=FILES).err


def test_without_a_kept_profile_there_is_nothing_to_export(
    run_cli: RunCli, profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    for why in ("", "cores was 999, is "):
        found = run_cli(["--export", "copy.toml"], command="profile")
        assert (found.code, found.out) == (4, "")
        assert f"no profile of target + draft on this machine is kept in '{profiles_folder()}'" in found.err
        assert why in found.err
        assert found.err.endswith("Try: Measure it: edgespec profile.\n")
        assert not Path("copy.toml").exists()
        other = replace(profile, machine=replace(profile.machine, num_cores=999))
        write_profile(other, profiles_folder() / "old.toml")


def test_an_import_replaces_no_other_profile_unasked(run_cli: RunCli, profile: Profile, monkeypatch: pytest.MonkeyPatch,
                                                     tmp_path: Path) -> None:  # fmt: skip
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    kept = profiles_folder() / f"{profile.name}.toml"
    write_profile(profile, kept)
    write_profile(replace(profile, created="2030-01-01T00:00:00Z"), tmp_path / "given.toml")
    command = ["--import", str(tmp_path / "given.toml")]
    refused = run_cli(command, command="profile")
    assert (refused.code, refused.out) == (2, "")
    assert f"another profile is kept as '{kept}', measured {profile.created}" in refused.err
    assert "this one was measured 2030-01-01T00:00:00Z.\nTry: Give --overwrite" in refused.err
    assert read_profile(kept) == profile
    assert run_cli([*command, "--overwrite"], command="profile").code == 0
    assert read_profile(kept).created == "2030-01-01T00:00:00Z"
    kept.write_text("damaged")
    assert "another profile is kept" in run_cli(command, command="profile").err


def test_an_import_checks_pair_and_machine_as_a_run_does(
    run_cli: RunCli, profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    given = tmp_path / "given.toml"
    write_profile(replace(profile, pair=replace(profile.pair, draft_fingerprint="00ff")), given)
    other_pair = run_cli(["--import", str(given)], command="profile")
    assert (other_pair.code, other_pair.out) == (2, "")
    assert f"'{given}' was measured with draft 'draft' (00ff), this is 'draft' (" in other_pair.err
    assert not profiles_folder().exists()
    write_profile(replace(profile, machine=replace(profile.machine, num_cores=999)), given)
    elsewhere = run_cli(["--import", str(given)], command="profile").ended()
    assert "was measured elsewhere: cores was 999, is " in elsewhere.err
    assert f"runs here leave it aside, unless --profile {given} names it" in elsewhere.err
    assert "not used: cores was 999" in run_cli(GENERATE, files=FILES).err


def test_a_profile_of_other_threads_promises_nothing(run_cli: RunCli, profile: Profile, followed: Path) -> None:
    """What one thread does is no measure of two."""
    here = profile.pair.threads
    assert here is not None
    pair = replace(profile.pair, threads=here + 1)
    (kept,) = profiles_folder().iterdir()
    content = kept.read_bytes()
    try:
        write_profile(replace(profile, pair=pair), kept)
        found = run_cli(GENERATE, files=FILES)
    finally:
        kept.write_bytes(content)
    assert f"the profile of this pair is not used: threads was {here + 1}, is {here}" in found.err
    write_profile(replace(read_profile(followed), pair=pair), followed)
    found = run_cli([*GENERATE, "--profile", str(followed)], files=FILES)
    assert f"measured elsewhere: threads was {here + 1}, is {here}" in found.err
    assert "plan for temperature 0.8, no promise here" in found.err
    assert records(found)[0]["spec"]["plan"]["predicted_tps"] is None
    assert "no time estimate: profile" in run_cli([*GENERATE, "--profile", str(followed), "--dry-run"], files=FILES).err


@pytest.fixture
def of_the_pair(profile: Profile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Profile:
    """The example, as if measured of the built-in pair, elsewhere."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    return example_profile(pair=profile.pair)


def test_json_is_all_that_goes_to_stdout(run_cli: RunCli, tmp_path: Path, of_the_pair: Profile) -> None:
    write_profile(of_the_pair, tmp_path / "given.toml")
    found = run_cli(["--import", str(tmp_path / "given.toml"), "--json"], command="profile")
    content = json.loads(found.out)
    assert content["plans"][1]["best"]["threshold"] == 0.02
    assert content["machine"]["accelerator"] == "Some GPU"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize(("name", "starts"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")])
def test_a_plot_is_drawn(name: str, starts: bytes, run_cli: RunCli, tmp_path: Path, of_the_pair: Profile) -> None:
    write_profile(of_the_pair, tmp_path / "given.toml")
    run_cli(["--import", str(tmp_path / "given.toml"), "--plot", name], command="profile").ended()
    assert Path(name).read_bytes().startswith(starts)


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else right(name))
    assert "edgespec[plot]" in run_cli(["--plot", "plot.png"], command="profile").ended(2).err


# Reports


def test_names_with_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    profile = example_profile()
    write_report(replace(profile, pair=replace(profile.pair, target="big[v2]", draft="small[/i]")))
    assert "big[v2] + small[/i] on Some GPU, bfloat16 from nf4" in capsys.readouterr().out


def test_a_report_has_rates_passes_and_the_size_where_trees_ended(capsys: pytest.CaptureFixture[str]) -> None:
    write_report(example_profile(example_plan(), PLAIN))
    lines = capsys.readouterr().out.splitlines()
    marked = [line.split() for line in lines if line.startswith("→")]
    assert [(line[1], line[4]) for line in marked] == [("16", "4.00"), ("0", "1.00")]
    assert "copies from pinned RAM 22.35 GiB/s" in "\n".join(lines)
    assert ["17", "217.0"] in [line.split() for line in lines]
    assert "a pass of the target, 4 texts share it" in lines
    # A step over 14.4 nodes in 4 layers: 0.2154 s for the pass, 0.012 s for the draft's calls
    assert float(marked[0][5]) == pytest.approx(4 / 0.2274, abs=0.1)


def test_plans_are_told_in_a_few_words() -> None:
    assert describe(PLAIN) == "no tree"
    assert describe(example_plan(threshold=0.01)) == "adaptive trees of at most 16 nodes, threshold 0.01"


def test_bars_go_from_the_lowest_to_the_highest() -> None:
    assert sparkline([1.0, 4.5, 8.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_sentences_break_between_words_at_the_width_that_somebody_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = example_profile()
    why = profile.plans[0].why
    write_report(profile)
    assert why in capsys.readouterr().out
    monkeypatch.setattr("edgespec.cli.console.terminal_width", lambda _stream: 40)
    write_report(profile)
    out = capsys.readouterr().out
    assert why not in out
    assert why in " ".join(out.split())
    (first, *_) = out[out.index("T=") :].splitlines()
    assert len(first) <= 40


# Mistakes


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (["--plot", "plot.gif"], 1, "neither .png nor .svg"),
        (["--plot", "nowhere/plot.png"], 1, "no folder 'nowhere'"),
        (["-md", "DRAFT"], 2, "-md needs a target"),
        (["TARGET", "-m", "TARGET"], 2, "Give the target once"),
        (["TARGET"], 2, "no draft"),
        (["TARGET", "-md", "elsewhere"], 4, "elsewhere"),
        (["--temps", "0,warm"], 2, "0,warm"),
        (["--prompts", "none.jsonl"], 4, "none.jsonl"),
        (["--import", "none.toml"], 4, "none.toml"),
        (["--import", "p.jsonl"], 2, "p.jsonl"),
        (["--import", "given.toml", "--full"], 2, "nothing is measured"),
        (["--export", "given.toml", "--temps", "0"], 2, "nothing is measured"),
        (["--export", "a.toml", "--import", "b.toml"], 2, "go alone"),
        (["--overwrite"], 2, "belongs to --export and --import"),
    ],
)
def test_mistakes_are_named_and_nothing_is_kept(
    options: list[str], code: int, named: str, run_cli: RunCli, pair_folders: tuple[Path, Path]
) -> None:
    folders = {"TARGET": str(pair_folders[0]), "DRAFT": str(pair_folders[1])}
    found = run_cli([folders.get(option, option) for option in options], files=FILES, command="profile")
    assert (found.code, found.out) == (code, "")
    assert named in found.err
    assert "Traceback" not in found.err
    assert not profiles_folder().exists()


def test_a_profile_of_an_older_version_that_a_run_names_says_what_to_do(run_cli: RunCli) -> None:
    found = run_cli([*GENERATE, "--profile", "g.toml"], files={**FILES, "g.toml": 'schema = "edgespec.profile/1"'})
    said = " ".join(found.err.split())
    assert f"'g.toml' has schema 'edgespec.profile/1', not '{SCHEMA}'." in said
    assert "Measure it: edgespec profile." in said


def test_prompts_leave_room_in_a_short_context(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a family whose positions end: longer prompts would run over."""
    monkeypatch.setattr(profile_pair, "SIZES", (1, 4))
    model = save_folder(tmp_path / "model", make_model(FAMILIES["gpt2"]()))
    draft = save_folder(tmp_path / "draft", make_model(FAMILIES["gpt2"](), seed=1))
    found = run_cli([str(model), "-md", str(draft), "--temps", "0", "--json"], command="profile").ended()
    assert json.loads(found.out)["context_tokens"] == 128


def test_ctrl_c_ends_it_and_leaves_no_file(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_pair._Texts, "visit_sizes", interrupted)
    found = run_cli(["--prompts", "p.jsonl"], files=FILES, command="profile")
    assert (found.code, found.out) == (130, "")
    assert "Traceback" not in found.err
    assert not profiles_folder().exists()
