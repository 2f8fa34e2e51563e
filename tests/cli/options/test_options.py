"""Every option of `edgespec generate` reaches what it is meant for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.cli.generate.command import command
from edgespec.cli.options.distribution import DrawingOptions
from edgespec.cli.options.machine import MachineOptions
from edgespec.cli.options.model import PairNames
from edgespec.cli.options.record import option_names
from edgespec.cli.options.tree import ProfileTreeFlags
from edgespec.cli.spelling import FLAGS
from edgespec.config import MemoryLimits, SamplingSettings
from edgespec.engine import Engine
from edgespec.placement.pair_setup import PairSetup
from edgespec.placement.run_config import RunConfig
from edgespec.text.request import TextRequest
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings
from tests.cli.conftest import RunCli

ROWS = '{"prompt": "def main("}\n{"prompt": "import os"}\n'
# option -> value given
GIVEN = {
    "model": "TARGET",
    "draft_model": "DRAFT",
    "tokenizer": "DRAFT",
    "max_new_tokens": "17",
    "temperature": "0.9",
    "top_k": "11",
    "top_p": "0.8",
    "min_p": "0.03",
    "seed": "99",
    "stop": "END",
    "policy": "dyspec",
    "size": "33",
    "depth": "5",
    "max_children": "6",
    "threshold": "0.02",
    "draft_temperature": "0.7",
    "lookup": "off",
    "repetition_penalty": "1.2",
    "presence_penalty": "0.5",
    "frequency_penalty": "-0.5",
    "logit_bias": "42=-100",
    "logprobs": "3",
    "max_cpu_mem": "3GiB",
    "max_gpu_mem": "2GiB",
    "gpu_margin": "100MiB",
    "ctx_size": "200",
    "quant": "8bit",
    "draft_quant": "4bit",
    "experts": "stream",
    "cuda_graphs": "on",
    "resident_layers": "1",
    "device": "cpu",
    "dtype": "bfloat16",
    "threads": "1",
    "parallel": "1",
}
# Names of models are tested in test_names.py, settings of single policies below, profiles and sampling by themselves
ELSEWHERE = {
    "acceptance", "branching", "classifier", "confidence", "config", "draft_revision", "draft_tokens", "draw",
    "exact",
    "fork", "greedy", "ignore_eos", "online", "profile", "revision", "stop_depths", "stop_gain",
    "stop_log_probability", "stop_model", "target_width", "tree_file",
}  # fmt: skip
RECORDS = (DrawingOptions, MachineOptions, PairNames, ProfileTreeFlags)


class StoppedError(Exception):
    """The command got as far as generating."""


def test_every_setting_of_an_engine_is_listed_here() -> None:
    settings = {name for record in RECORDS for name in option_names(record)}
    assert settings - ELSEWHERE <= GIVEN.keys() <= {parameter.name for parameter in command.params}


def test_every_setting_reaches_the_engine(
    run_cli: RunCli, pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    seen: dict[str, Any] = {}
    build = Engine.__init__

    def remember_engine(self: Engine, setup: PairSetup, **options: Any) -> None:
        seen.update(options, pair=setup.pair, tree=setup.tree, run_config=setup.run_config)
        build(self, setup, **options)

    def remember_request(self: Engine, request: TextRequest, **_: Any) -> None:
        seen.update(request=request, engine=self)
        raise StoppedError

    monkeypatch.setattr(Engine, "__init__", remember_engine)
    monkeypatch.setattr(Engine, "submit", remember_request)
    arguments = ["p.jsonl"]
    for parameter in command.params:
        value = GIVEN.get(str(parameter.name))
        if value is not None:
            folders = {"TARGET": str(pair_folders[0]), "DRAFT": str(pair_folders[1])}
            arguments += [max(parameter.opts, key=len), folders.get(value, value)]
    run_cli(arguments, files={"p.jsonl": ROWS})

    assert seen["pair"].target.folder == pair_folders[0]
    assert seen["pair"].draft.folder == pair_folders[1]
    assert seen["pair"].tokenizer.name_or_path == str(pair_folders[1])
    assert seen["tree"] == TreeSettings(
        policy="dyspec", size=33, depth=5, max_children=6, threshold=0.02, draft_temperature=0.7, lookup=False
    )
    run_config: RunConfig = seen["run_config"]
    assert run_config.limits == MemoryLimits(
        max_cpu_bytes=3 << 30, max_gpu_bytes=2 << 30, gpu_margin_bytes=100 << 20, max_resident_layers=1
    )
    assert (run_config.quant, run_config.draft_quant, run_config.expert_mode, run_config.cuda_graphs) == (
        "int8",
        "nf4",
        "stream",
        True,
    )
    assert (run_config.device, run_config.dtype, run_config.threads) == (torch.device("cpu"), torch.bfloat16, 1)
    assert run_config.num_texts == 1  # of two rows, which would share passes
    request: TextRequest = seen["request"]
    assert request.sampling == SamplingSettings(
        temperature=0.9, top_k=11, top_p=0.8, min_p=0.03, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={42: -100},
    )  # fmt: skip
    assert (request.max_new_tokens, request.seed, request.stop.strings) == (17, 99, ("END",))
    assert request.num_logprobs == 3
    assert seen["engine"].placement.num_resident == 1


class _Planned(Exception):  # noqa: N818
    """The engine was asked for."""


POLICY_OPTIONS: list[tuple[list[str], TreeSettings]] = [
    (["--policy", "adaptive", "--draw", "coupled", "--acceptance", "a.json", "--tree-size", "9"],
     TreeSettings(policy="adaptive", draw="coupled", acceptance=Path("a.json"), size=9)),
    (["--policy", "opt-tree", "--draw", "chosen", "--stop-gain", "0.2"],
     TreeSettings(policy="opt-tree", draw="chosen", stop_gain=0.2)),
    (["--policy", "eagle2", "--stop-depths", "4,6", "--stop-logprob", "-0.5", "--tree-width", "8"],
     TreeSettings(policy="eagle2", stop_depths=(4, 6), stop_log_probability=-0.5, max_children=8)),
    (["--policy", "c2t", "--classifier", "c.json", "--confidence", "0.3"],
     TreeSettings(policy="c2t", classifier=Path("c.json"), confidence=0.3)),
    (["--policy", "sequoia", "--draw", "sampled", "--tree-depth", "7"],
     TreeSettings(policy="sequoia", draw="sampled", depth=7)),
    (["--policy", "specinfer", "--branching", "3,2,1"], TreeSettings(policy="specinfer", branching=(3, 2, 1))),
    (["--policy", "mcsd", "--fork", "8x3", "--stop-model", "s.safetensors", "--confidence", "0.4"],
     TreeSettings(policy="mcsd", fork=(8, 3), stop_model=Path("s.safetensors"), confidence=0.4)),
    (["--policy", "mcsd", "--target-width", "2"], TreeSettings(policy="mcsd", target_width=2)),
    (["--policy", "chain", "--draft-tokens", "6"], TreeSettings(policy="chain", draft_tokens=6)),
    (["--policy", "static", "--tree-file", "tree.json"], None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"), POLICY_OPTIONS, ids=lambda value: " ".join(value[1:3]) if isinstance(value, list) else ""
)
def test_every_policys_settings_reach_the_engine(
    options: list[str], expected: TreeSettings | None, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def remember(self: Engine, setup: PairSetup, **_: Any) -> None:
        seen["tree"] = setup.tree
        raise _Planned

    monkeypatch.setattr(Engine, "__init__", remember)
    run_cli(["p.jsonl", *options], files={"p.jsonl": ROWS, "tree.json": "[[0], [1]]"})
    assert seen["tree"] == (expected or TreeSettings(policy="static", tree_file=Path("tree.json")))


def test_the_options_above_are_all_that_there_are() -> None:
    given = {word for options, _ in POLICY_OPTIONS for word in options if word.startswith("--")}
    # dyspec's threshold is tried above, and training alone asks for trees that are not reranked.
    settings = {name for policy in POLICIES.values() for name in policy.settings}
    assert given - {"--policy", "--draw"} == {FLAGS[name] for name in settings if name not in {"threshold", "reranked"}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--policy", "chain", "--tree-size", "9"], "--tree-size is not used by --policy chain"),
        (["--policy", "dyspec", "--branching", "2,1"], "--branching is not used by --policy dyspec"),
        (["--policy", "none", "--tree-depth", "24"], "--tree-depth is not used by --policy none"),
        (["--policy", "specinfer", "--branching", "2,0"], "2,0"),
        (["--policy", "specinfer", "--branching", "30,30"], "930"),
        (["--policy", "specinfer", "--branching", "x"], "'x'"),
        (["--policy", "mcsd", "--fork", "3"], "'3'"),
        (["--policy", "mcsd", "--fork", "3x3", "--branching", "2"], "two shapes"),
        (["--policy", "static"], "--tree-file"),
        (["--policy", "static", "--tree-file", "none.json"], "none.json"),
        (["--policy", "chain", "--confidence", "0.3"], "--confidence"),
        (["--policy", "c2t", "--classifier", "none.json"], "none.json"),
        (["--policy", "adaptive", "--draw", "guessed"], "--draw guessed is unknown."),
        (["--policy", "dyspec", "--draw", "coupled"], "--policy dyspec has no children of --draw coupled."),
        (["--policy", "adaptive", "--draw", "sampled"], "--policy adaptive has no children of --draw sampled."),
        (["--policy", "dyspec", "--draw", "coupled"], "Its own: sampled. Policies with coupled children: adaptive,"),
        (["--policy", "mcsd", "--target-width", "2", "--draw", "coupled"], "which --draw coupled has not"),
        (["--policy", "mcsd", "--target-width", "2", "--draw", "coupled"], "Use --draw sampled or --draw chosen."),
        (["--policy", "oracle"], "oracle"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_policy_does_not_use_or_cannot_is_one_error(options: list[str], named: str, run_cli: RunCli) -> None:
    outcome = run_cli(["p.jsonl", *options], files={"p.jsonl": ROWS})
    assert outcome.code in {2, 4}
    assert named in outcome.err
    assert "Traceback" not in outcome.err


def test_policy_none_uses_no_draft(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    options = ["-m", str(pair_folders[0]), "-md", str(pair_folders[1]), "-n", "4", "--policy", "none", "--temp", "0"]
    outcome = run_cli(["p.jsonl", *options], files={"p.jsonl": ROWS}).ended()
    assert '"draft_model": null' in outcome.out
    assert '"mode": "off"' in outcome.out


def test_requests_that_are_not_honoured_are_named(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    rows = '{"prompt": "a", "n": 2}\n{"prompt": "b", "category": "x"}\n'
    options = ["-m", str(pair_folders[0]), "-n", "2", "--max-gpu-mem", "1GiB", "--device", "cpu"]
    outcome = run_cli(["p.jsonl", *options], files={"p.jsonl": rows})
    assert "handed through to the records: n (" in outcome.err
    assert "--max-gpu-mem is not used" in outcome.err


def test_greedy_is_temperature_0(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    options = ["p.jsonl", "-m", str(pair_folders[0]), "-n", "1", "--greedy"]
    assert '"temperature": 0.0' in run_cli(options, files={"p.jsonl": ROWS}).out
    assert run_cli([*options, "--temp", "0.5"], files={"p.jsonl": ROWS}).code == 2


def test_all_layers_resident_is_a_demand(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    options = ["-m", str(pair_folders[0]), "-n", "2", "-ngl", "all", "--policy", "none"]
    assert run_cli(["p.jsonl", *options], files={"p.jsonl": ROWS}).code == 0
    plain = TreeSettings(policy="none")
    with Engine.from_pretrained(pair_folders[0], tree=plain, context_tokens=11, prompt_tokens=9) as engine:
        placement = engine.placement
    layers = next(num_bytes for what, num_bytes in placement.device_bytes.items() if "resident" in what)
    # The stream of all layers needs a little less than all layers; room for that only.
    enough_to_stream = placement.planned_bytes - layers + 100_000
    outcome = run_cli(["p.jsonl", *options, "--max-cpu-mem", str(enough_to_stream)], files={"p.jsonl": ROWS}).ended(5)
    assert "of 3 layers fit" in outcome.err


def test_a_context_size_bounds_the_text(run_cli: RunCli, pair_folders: tuple[Path, Path]) -> None:
    options = ["-m", str(pair_folders[0]), "--temp", "0", "-n", "50", "-o", "out.jsonl", "--overwrite"]
    files = {"p.jsonl": '{"prompt": "def main("}\n'}  # nine bytes, nine tokens
    assert run_cli(["p.jsonl", *options, "-c", "12"], files=files).code == 0
    record = json.loads(Path("out.jsonl").read_text())
    assert (record["finish_reason"], len(record["token_ids"])) == ("context", 3)
    assert "the prompt has 9 tokens" in run_cli(["p.jsonl", *options, "-c", "9"], files=files).ended(2).err
    assert "256 positions" in run_cli(["p.jsonl", *options, "-c", "1k"], files=files).err
