"""The configuration: who counts more than whom, what is refused, and what `edgespec config` tells."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.cli import cli
from edgespec.cli.config.command import TEMPLATE
from edgespec.cli.config.defaults import defaults_of, known_keys, opposites, spellings
from edgespec.cli.config.groups import all_commands
from edgespec.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.hub.user_config import UserConfig, read_config, read_pairs
from edgespec.pair.pair import ModelPair
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeOptions, TreeSettings
from edgespec.user_paths import config_file
from tests.cli.conftest import Outcome, RunCli

COMMANDS = all_commands(click.Context(cli))
KNOWN = known_keys(COMMANDS)
WriteConfig = Callable[[str], Path]


@pytest.fixture
def write_config() -> WriteConfig:
    """Writes the user's own configuration."""

    def write(text: str) -> Path:
        path = config_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def context_tokens(run_cli: RunCli, *arguments: str) -> int:
    found = json.loads(run_cli([*arguments, "--json"], command="estimate").ended().out)["context_tokens"]
    assert isinstance(found, int)
    return found


def test_flag_then_environment_then_given_file_then_own_file_then_built_in(
    run_cli: RunCli, write_config: WriteConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer counts as soon as those above it are silent."""
    assert context_tokens(run_cli) == 2048
    write_config("[defaults]\nctx_size = 101\n")
    assert context_tokens(run_cli) == 101
    asked = tmp_path / "asked.toml"
    asked.write_text("[defaults]\nctx-size = '102'\n")
    monkeypatch.setenv("EDGESPEC_CONFIG", str(asked))
    assert context_tokens(run_cli) == 102
    other = tmp_path / "other.toml"
    other.write_text("[defaults]\nmax_model_len = '103'\n")
    assert context_tokens(run_cli, "--config", str(other)) == 103
    monkeypatch.setenv("EDGESPEC_CTX_SIZE", "104")
    assert context_tokens(run_cli, "--config", str(other)) == 104
    monkeypatch.setenv("EDGESPEC_ESTIMATE_CTX_SIZE", "105")
    assert context_tokens(run_cli, "--config", str(other)) == 105
    assert context_tokens(run_cli, "--config", str(other), "-c", "106") == 106


def test_a_file_is_taken_before_the_command_too(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "asked.toml").write_text("[defaults]\nctx_size = 77\n")
    outcome = run_cli([str(tmp_path / "asked.toml"), "estimate", "--json"], command="--config")
    assert json.loads(outcome.out)["context_tokens"] == 77


class _Planned(Exception):  # noqa: N818
    """The engine was asked for."""


@pytest.fixture
def set_up_of(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> Callable[..., dict[str, Any]]:
    """What `edgespec bench` asks of an engine, and with which sampling."""
    from edgespec.placement import pair_setup

    seen: dict[str, Any] = {}
    set_up = pair_setup.set_up_by_profile

    def remember_options(
        pair: ModelPair, run_config: RunConfig, trees: TreeOptions, **options: Any
    ) -> pair_setup.PairSetup:
        seen.update(options, given=trees.explicit)
        return set_up(pair, run_config, trees, **options)

    def remember(self: Engine, setup: pair_setup.PairSetup, **_: Any) -> None:
        seen["tree"] = setup.tree
        raise _Planned

    monkeypatch.setattr(pair_setup, "set_up_by_profile", remember_options)
    monkeypatch.setattr(Engine, "__init__", remember)

    def call(*arguments: str) -> dict[str, Any]:
        seen.clear()
        run_cli(list(arguments), command="bench")
        return dict(seen)

    return call


def test_sampling_is_the_flags_then_the_configurations_then_the_models(
    set_up_of: Callable[..., dict[str, Any]], write_config: WriteConfig
) -> None:
    """The built-in target's generation_config.json asks for temperature 0.8."""
    assert set_up_of()["temperature"] == 0.8
    write_config("[sampling]\ntemperature = 0.5\n")
    assert set_up_of()["temperature"] == 0.5
    assert set_up_of("--temp", "0.3")["temperature"] == 0.3


def test_penalties_of_the_configuration_are_those_of_the_same_flags(run_cli: RunCli, write_config: WriteConfig) -> None:
    """They change the text, and a flag counts more."""
    ask = ["-p", "def main(", "-n", "12", "--seed", "3", "--format", "jsonl", "--profile", "none"]
    flags = ["--repeat-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.1",
             "--logit-bias", "42=-100", "--logit-bias", "self=5", "--ignore-eos"]  # fmt: skip
    plain, flagged = (json.loads(run_cli([*ask, *more]).out) for more in ([], flags))
    penalties = "repetition_penalty = 1.3\npresence_penalty = 0.5\nfrequency_penalty = 0.1\n"
    write_config(f"[sampling]\n{penalties}logit_bias = {{42 = -100, self = 5}}\nignore_eos = true\n")
    configured, overridden = (json.loads(run_cli([*ask, *more]).out) for more in ([], ["--repeat-penalty", "1.2"]))
    assert configured["sampling"] == flagged["sampling"] != plain["sampling"]
    assert configured["text"] == flagged["text"] != plain["text"]
    assert overridden["sampling"]["repetition_penalty"] == 1.2
    assert overridden["sampling"]["presence_penalty"] == 0.5


def test_trees_are_the_configurations_before_a_profiles(
    set_up_of: Callable[..., dict[str, Any]], write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `set_up_by_profile` is given overrides a plan; nothing is given where nobody says anything."""
    assert set_up_of()["given"] == {}
    write_config("[defaults]\ntree_size = 48\npolicy = 'dyspec'\n")
    assert set_up_of()["given"] == {"size": 48, "policy": "dyspec"}
    assert set_up_of()["tree"] == TreeSettings(policy="dyspec", size=48)
    monkeypatch.setenv("EDGESPEC_TREE_SIZE", "32")
    assert set_up_of()["given"]["size"] == 32
    assert set_up_of("--tree-size", "16")["given"]["size"] == 16


def test_a_default_that_the_policy_does_not_use_is_left_out(
    set_up_of: Callable[..., dict[str, Any]], write_config: WriteConfig, run_cli: RunCli
) -> None:
    write_config("[defaults]\ntree_size = 48\n")
    assert set_up_of("--policy", "chain")["tree"] == TreeSettings(policy="chain")
    assert "--tree-size is not used" in run_cli(["--policy", "chain", "--tree-size", "48"], command="bench").err


def test_settings_of_other_commands_do_not_disturb(run_cli: RunCli, write_config: WriteConfig) -> None:
    """`estimate` has a --temp that means something else, `train` a --max-new-tokens that cannot be -1."""
    write_config(
        "[defaults]\nmax_new_tokens = -1\nrepeats = 2\nonline = false\n[sampling]\ntemperature = 0.5\nseed = 3\n"
    )
    assert run_cli([], command="estimate").code == 0
    config = UserConfig(files=(read_config(config_file(), KNOWN),))
    found = {name: defaults_of(command, config, None, COMMANDS.values()) for name, command in COMMANDS.items()}
    assert "temperature" not in found["estimate"]
    assert "max_new_tokens" not in found["train acceptance"]
    assert "seed" not in found["train acceptance"]
    assert found["bench"] == {"repeats": "2", "temperature": "0.5", "seed": "3", "online": False}


def test_flags_lists_and_opposites_are_taken_as_they_are_meant(write_config: WriteConfig) -> None:
    path = write_config("[defaults]\nquiet = true\nfull = true\nbranching = [3, 2]\noffline = false\n")
    config = UserConfig(files=(read_config(path, KNOWN),))
    found = defaults_of(COMMANDS["profile"], config, None, COMMANDS.values())
    assert found == {"quiet": True, "full": True, "online": True}
    found = defaults_of(COMMANDS["estimate"], config, None, COMMANDS.values())
    assert found == {"branching": "3,2", "online": True}


def test_every_flag_has_one_name_in_configurations() -> None:
    """The same spelling is never two keys in two commands."""
    for command in COMMANDS.values():
        for option in command.params:
            own, *others = spellings(option) or [""]
            assert all(KNOWN.spellings[name] == own for name in (own, *others) if name), option.opts
            assert all(KNOWN.spellings[name] == name for name in opposites(option))


def test_no_flag_is_set_by_a_variable_that_means_something_else() -> None:
    reserved = {"EDGESPEC_HOME", "EDGESPEC_CACHE", "EDGESPEC_CONFIG", "EDGESPEC_DEBUG"}
    for command in COMMANDS.values():
        for option in command.params:
            assert not reserved & set(option.envvar or ()), option.opts


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[defaults]\nctx_sise = 5\n", ["'ctx_sise'", "Did you mean 'ctx_size'?"]),
        ("[default]\nctx_size = 5\n", ["[default]", "Did you mean 'defaults'?"]),
        ("ctx_size = 5\n", ["[ctx_size]"]),
        ("[sampling]\ntemprature = 5\n", ["'temprature'", "Did you mean 'temperature'?"]),
        ("[sampling]\nctx_size = 5\n", ["not about sampling"]),
        ("[defaults]\ntemp = 0.5\n", ["Put it into [sampling]"]),
        ("[defaults]\nctx_size = 5\nmax_model_len = 6\n", ["'ctx_size' twice"]),
        ("[defaults]\nctx_size = 1979-05-27\n", ["ctx_size is neither text"]),
        ("[defaults]\nctx_size = [[1]]\n", ["ctx_size is neither text"]),
        ("[defaults]\ndraft_model = 'x'\n", ["no model that it belongs to"]),
        ("[defaults]\nctx_size = 'many'\n", ["[defaults] ctx_size = 'many'", "not auto or a number of tokens"]),
        ("[defaults]\nmax_cpu_mem = 'lots'\n", ["[defaults] max_cpu_mem = 'lots'", "is not a size"]),
        ("[sampling]\npresence_penalty = 7\n", ["presence_penalty = 7", "not in [-2, 2]"]),
        ("[sampling]\nrepetition_penalty = nan\n", ["repetition_penalty = nan", "not in (0, 100)"]),
        ("[sampling]\nlogit_bias = '42'\n", ["logit_bias = '42'", "no TOKEN=BIAS"]),
        ("[sampling]\nlogit_bias = {42 = 101}\n", ["logit_bias = {'42': 101}", "not in [-100, 100]"]),
        ("[sampling]\ntop_k = {a = 1}\n", ["top_k = {'a': 1}", "no table"]),
        ("[sampling]\nlogit_bias = {42 = {a = 1}}\n", ["logit_bias is neither text"]),
        ("[defaults]\nquiet = 'yes'\n", ["true or false"]),
        ("[defaults]\nctx_size = true\n", ["for flags"]),
        ("[defaults]\nhelp = true\n", ["'help'"]),
        ('[defaults]\nprompts = "a\\u0000"\n', ["zero byte"]),
        ("[models]\nbig = 'x'\n", ["models.big is no section"]),
        ("[models.big]\nquant = 'nf4'\n", ["[models.big] names no model"]),
        ("[models.big]\nmodel = 5\n", ["[models.big] names no model"]),
        ("defaults = 5\n", ["defaults is no section"]),
        ("[defaults\n", ["cannot be read as TOML"]),
        ("x = " + "9" * 5000, ["cannot be read as TOML"]),
        ("x = " + "[" * 5000, ["cannot be read as TOML"]),
    ],
)
def test_what_is_wrong_is_named_with_its_file(
    text: str, named: list[str], run_cli: RunCli, write_config: WriteConfig
) -> None:
    path = write_config(text)
    # No command takes all of the keys; some command takes each.
    outcomes = [run_cli([], command=command) for command in ("estimate", "models", "bench")]
    failed: list[Outcome] = [outcome for outcome in outcomes if outcome.code == 2]
    assert failed
    for part in [str(path), *named]:
        assert part in failed[0].err, failed[0].err
    assert all("Traceback" not in outcome.err for outcome in outcomes)


def test_a_file_that_was_asked_for_must_be_there(run_cli: RunCli) -> None:
    outcome = run_cli(["--config", "nowhere.toml"], command="estimate")
    assert (outcome.code, "nowhere.toml" in outcome.err) == (4, True)


def test_help_config_and_doctor_go_on_where_the_configuration_is_damaged(
    run_cli: RunCli, write_config: WriteConfig
) -> None:
    path = write_config("[defaults")
    assert run_cli(["--help"], command="estimate").code == 0
    assert run_cli(["target", "-h"], command="estimate").code == 0
    assert run_cli(["path"], command="config").out == f"{path}\n"
    outcome = run_cli(["show"], command="config")
    assert (outcome.code, str(path) in outcome.err) == (2, True)


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=120)
    | st.text(max_size=120).map(str.encode)
    | st.builds(
        lambda section, key, value: f"[{section}]\n{key} = {value}\n".encode(),
        st.sampled_from(["defaults", "sampling", "models.x", "models", "'a.b'"]),
        st.sampled_from([*sorted(KNOWN.spellings), "model.x", "'~/m'"]),
        st.sampled_from(["nan", "inf", "-1", "''", "'\\u0000'", "[]", "[1, 'a']", "{}", "true", "1e400", "12:00:00"])
        | st.integers().map(str)
        | st.text(max_size=20).map(json.dumps),
    )
)
def test_any_file_is_read_or_refused_in_words(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Only EdgespecError, down to what each command's options make of the values."""
    path = tmp_path_factory.mktemp("fuzz") / "config.toml"
    path.write_bytes(content)
    config = refused(path, lambda: UserConfig(files=(read_config(path, KNOWN),)))
    pairs = refused(path, functools.partial(read_pairs, path))  # what a program reads of it
    if config is not None:
        assert {name: pair["model"] for name, pair in pairs.items()} == config.aliases
    for command in COMMANDS.values() if config else ():
        refused(path, functools.partial(defaults_of, command, config, None, COMMANDS.values()))


def refused(path: Path, make: Callable[[], Any]) -> Any:
    """What is made, or None where it is refused by naming the file."""
    try:
        return make()
    except EdgespecError as refusal:
        if str(path) not in refusal.what:
            raise
    return None


def test_init_writes_a_template_that_is_valid_with_and_without_its_comments(run_cli: RunCli) -> None:
    outcome = run_cli(["init"], command="config")
    path = config_file()
    assert (outcome.code, outcome.out) == (0, f"{path}\n")
    assert path.read_text() == TEMPLATE
    read_config(path, KNOWN)
    uncommented = re.sub(r"^# (\[|\w+ = )", r"\1", TEMPLATE, flags=re.MULTILINE)
    path.write_text(uncommented)
    assert read_config(path, KNOWN).models["big"]["quant"] == "nf4"
    again = run_cli(["init"], command="config")
    assert (again.code, "exists" in again.err) == (2, True)
    assert path.read_text() == uncommented


def test_show_tells_each_value_and_its_source(
    run_cli: RunCli, write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config("[defaults]\nctx_size = 300\n[sampling]\ntop_k = 5\n")
    monkeypatch.setenv("EDGESPEC_BENCH_TREE_SIZE", "32")
    outcome = run_cli(["show", "bench", "--origin"], command="config")
    lines = {line.split(" = ")[0]: line for line in outcome.out.splitlines()}
    assert lines["ctx_size"].startswith("ctx_size = 300 ")
    assert lines["ctx_size"].endswith(f"# '{path}' [defaults]")
    assert lines["top_k"].endswith(f"# '{path}' [sampling]")
    assert lines["tree_size"].endswith("# EDGESPEC_BENCH_TREE_SIZE")
    assert "generation_config.json" in lines["temperature"]
    assert lines["device"].endswith("# built-in")
    everything = json.loads(run_cli(["show", "bench", "--all", "--json"], command="config").out)
    assert everything["tree_depth"] == {"value": None, "origin": "a machine profile where one fits, else built-in"}
    assert run_cli(["show", "nothing"], command="config").code == 2


def test_completion_knows_commands_and_options() -> None:
    environment = {"_EDGESPEC_COMPLETE": "bash_complete", "COMP_WORDS": "edgespec est", "COMP_CWORD": "1"}
    assert CliRunner().invoke(cli, prog_name="edgespec", env=environment).output == "plain,estimate\n"
    environment |= {"COMP_WORDS": "edgespec estimate --ctx", "COMP_CWORD": "2"}
    assert "plain,--ctx-size" in CliRunner().invoke(cli, prog_name="edgespec", env=environment).output


def test_errors_are_json_where_results_are(run_cli: RunCli) -> None:
    for arguments, code, status in [
        (["nowhere/at-all"], "E_MODEL_NOT_FOUND", 4),
        (["--tree-size", "0"], "E_SETTING", 2),
        (["--no-such-option"], "E_USAGE", 2),
    ]:
        outcome = run_cli([*arguments, "--json"], command="estimate")
        assert (outcome.code, outcome.out) == (status, "")
        (line,) = outcome.err.splitlines()
        error = json.loads(line)["error"]
        assert error.keys() == {"code", "message", "fix"}
        assert error["code"] == code


def test_a_fault_of_our_own_is_json_too(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("edgespec.cli.doctor.check_versions", fail)
    assert json.loads(run_cli(["--json"], command="doctor").err)["error"]["code"] == "E_UNEXPECTED"
    assert os.environ.get("EDGESPEC_DEBUG") is None
