"""Tables whose models are fitted first: scripts take what they are given, and what is there is not fitted again."""

import argparse
import importlib
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from edgespec.grow.classifier import INPUTS, default_classifier
from scripts.papers import fit_classifiers
from scripts.papers.run import FITTED, TABLES
from scripts.papers.tables import fitted


class ParsedError(Exception):
    """A script has read its options."""


def ran(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The scripts that a table runs, each with its options."""
    commands: list[list[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(fitted.subprocess, "run", lambda command, **_: commands.append(command[2:]))
        FITTED[name].run(out, contexts=3, processes=1)
    return commands


@pytest.mark.parametrize("name", FITTED)
def test_scripts_take_the_options_that_a_table_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parsed(self: argparse.ArgumentParser) -> None:
        parse(self)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parsed)
    for script, *options in ran(name, tmp_path / "a folder", monkeypatch):
        monkeypatch.setattr(sys, "argv", [script, *options])
        with pytest.raises(ParsedError):
            importlib.import_module(script).main()


@pytest.mark.parametrize(
    ("name", "folder", "initial"),
    [("c2t-1", "variants", None), ("c2t-b3", "variants", None), ("c2t-transfer", "tuned", default_classifier())],
)
def test_classifiers_that_are_compared_are_among_those_that_are_fitted(
    name: str, folder: str, initial: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_classifiers, "fit_classifier", lambda *_, **__: (default_classifier(), MagicMock()))
    records = {column: torch.ones(9) for column in (*INPUTS, "acceptance", "parent_value")}
    made = [of[0] for of in fit_classifiers.variants({**records, "prompt": torch.arange(9)}, initial)]
    compared = [Path(option) for option in ran(name, tmp_path, monkeypatch)[-1] if option.endswith(".json")]
    asked = [path.stem for path in compared if path.parent == tmp_path / folder]
    assert len(asked) > 4
    assert set(asked) <= set(made)
    assert f"{{out}}/{folder}/{made[-1]}.json" in [last for last, _ in FITTED[name].fits]


def test_what_is_there_is_not_fitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, printing = ran("c2t-1", tmp_path, monkeypatch)
    (tmp_path / "many-trees.json").touch()
    assert ran("c2t-1", tmp_path, monkeypatch) == [second, printing]
    (tmp_path / "variants").mkdir()
    (tmp_path / "variants" / f"epochs-{fit_classifiers.EPOCHS}.json").touch()
    assert ran("c2t-1", tmp_path, monkeypatch) == [printing]
    assert first[0] == "scripts.make.demo_fits"


def test_no_name_means_two_tables() -> None:
    assert not {*TABLES} & {*FITTED}
