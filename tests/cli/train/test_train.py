"""`edgespec train`: collect, fit, report, and use what was fitted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.grow.classifier import DEFAULT_FILE, Classifier
from edgespec.train import collect, fit, networks
from edgespec.train.record_files import read_headers
from tests.cli.conftest import RunCli

PROMPTS = "".join(json.dumps({"prompt": f"def name_{index}(x):\n    return {index}"}) + "\n" for index in range(4))
FILES = {"p.jsonl": PROMPTS}


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLASSIFIER", "TUNING", "STOP"):
        monkeypatch.setattr(fit, name, replace(getattr(fit, name), steps=60))
    settings = networks.FitSettings.__init__
    monkeypatch.setattr(settings, "__kwdefaults__", {**settings.__kwdefaults__, "steps": 60})


@pytest.fixture
def pair_options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["-m", str(pair_folders[0]), "-md", str(pair_folders[1])]


USES = {
    "acceptance": ["--policy", "adaptive", "--acceptance"],
    "classifier": ["--policy", "c2t", "--classifier"],
    "stop": ["--policy", "chain", "--stop-model"],
}


@pytest.mark.parametrize(("what", "options"), [
    ("acceptance", ["--tree-size", "8", "--temps", "0,1"]),
    ("classifier", []),
    ("stop", []),
    ("stop", ["--kind", "probabilities"]),
])  # fmt: skip
def test_what_is_fitted_can_be_used(what: str, options: list[str], run_cli: RunCli, pair_options: list[str]) -> None:
    train = [what, *pair_options, "--prompts", "p.jsonl", "-o", "fitted", "-n", "3", *options]
    outcome = run_cli(train, files=FILES, command="train").ended()
    assert "expected calibration error" in outcome.out
    assert ("recall" in outcome.out) == (what == "classifier")
    used = run_cli(["p.jsonl", *pair_options, *USES[what], "fitted", "-n", "6", "--temp", "0.8", "--seed", "1"]).ended()
    assert len(used.out.splitlines()) == 4


def test_a_classifier_is_fine_tuned_from_another_pairs(
    run_cli: RunCli, pair_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_from: list[object] = []
    right = fit.fit_classifier

    def remember(records: Any, settings: Any, **options: Any) -> Any:
        begun_from.append(options["initial"])
        return right(records, settings, **options)

    monkeypatch.setattr(fit, "fit_classifier", remember)
    train = ["classifier", *pair_options, "--prompts", "p.jsonl", "-o", "fitted", "-n", "3"]
    assert run_cli(train, files=FILES, command="train").code == 0
    run_cli([*train, "--from", str(DEFAULT_FILE), "--overwrite"], command="train").ended()
    nothing, initial = begun_from
    assert nothing is None
    assert isinstance(initial, Classifier)
    assert torch.equal(initial.network.mean, Classifier.load(Path("fitted")).network.mean), (
        "its inputs stay as they are"
    )
    assert "p.jsonl" in run_cli([*train, "--from", "p.jsonl", "--overwrite"], command="train").ended(2).err
    assert run_cli(["stop", *train[1:], "--from", "fitted"], command="train").code == 2, "of classifiers alone"


def test_collecting_goes_on_where_it_stopped(
    run_cli: RunCli, pair_options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ["stop", *pair_options, "--prompts", "p.jsonl", "-o", "fitted", "-n", "3", "--temps", "1"]
    decoded: list[int] = []
    right = collect._decode

    def interrupted(*arguments: object, **options: object) -> None:
        decoded.append(1)
        if len(decoded) == 4:
            raise KeyboardInterrupt
        right(*arguments, **options)

    monkeypatch.setattr(collect, "_decode", interrupted)
    assert run_cli(train, files=FILES, command="train").code == 130
    assert len(read_headers(Path("fitted.records"))) == 3
    assert run_cli(train, command="train").code == 0
    assert len(decoded) == 4 + 8 - 3
    assert run_cli([*train, "--overwrite"], command="train").code == 0
    assert len(decoded) == 9, "another fit needs no collecting"
    other = run_cli([*train, "--overwrite"], files={"p.jsonl": PROMPTS.replace("name_0", "other")}, command="train")
    assert other.code == 2
    assert "other prompts" in other.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--temps", "warm"], "warm"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["-o", "nowhere/fitted"], "nowhere"),
        (["-o", "p.jsonl"], "p.jsonl"),
    ],
)
def test_mistakes_are_named(options: list[str], named: str, run_cli: RunCli, pair_options: list[str]) -> None:
    train = ["stop", *pair_options, "--prompts", "p.jsonl", "-o", "fitted", *options]
    outcome = run_cli(train, files=FILES, command="train")
    assert outcome.code in {1, 2, 4}
    assert named in outcome.err
    assert "Traceback" not in outcome.err
