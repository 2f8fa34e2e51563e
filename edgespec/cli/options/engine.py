"""The options of a command that makes texts: the pair, where it lives, and how it drafts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from edgespec.cli.options.machine import MachineOptions
from edgespec.cli.options.model import AdaptedPairNames, AdaptedPairNamesWithTarget, ModelOptions, find_models
from edgespec.cli.options.record import FOLDER, group, option
from edgespec.cli.options.template import TemplateOptions
from edgespec.cli.options.tree import ProfileTreeFlags, make_tree_options
from edgespec.tree.settings import TreeOptions

PROMPT_CACHE_HELP = (
    "Keep the common beginning of prompts, already read, in this file, and reuse it. `edgespec cache list` lists it, "
    "wherever it lies."
)
CORPUS_HELP = (
    "Look tokens up in this file or folder too; `texts`: in the run's own earlier prompts and answers. Repeatable."
)
DRAFT_CHECK_HELP = (
    "Check once how well a published draft agrees with the target, and read it as it agrees best; `off` reads it as "
    "its config.json says."
)
SELF_CHECK_HELP = "Skip the check that the model's family reads token trees rightly."


OWN_TEXTS = "texts"  # of --corpus


def _there(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for path in value:
        if path != OWN_TEXTS and not Path(path).exists():
            raise click.BadParameter(f"'{path}' is not there.")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The pair, the place where it runs, and how it drafts."""

    models: ModelOptions = group(AdaptedPairNames, find_models)
    template: TemplateOptions = group(TemplateOptions)
    trees: TreeOptions = group(ProfileTreeFlags, make_tree_options)
    machine: MachineOptions = group(MachineOptions)
    corpus: tuple[str, ...] = option("--corpus", multiple=True, metavar="PATH|texts", callback=_there, help=CORPUS_HELP)
    prompt_cache: Path | None = option("--prompt-cache", type=FOLDER, metavar="FILE", help=PROMPT_CACHE_HELP)
    no_self_check: bool = option("--no-self-check", is_flag=True, help=SELF_CHECK_HELP)

    draft_check: Literal["auto", "off"] = option(
        "--draft-check", type=click.Choice(["auto", "off"]), default="auto", show_default=True, help=DRAFT_CHECK_HELP
    )

    @property
    def self_check(self) -> bool:
        """Return whether to check that the model reads token trees rightly."""
        return not self.no_self_check


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptionsWithTarget(EngineOptions):
    """The same, where the target may be the command's argument."""

    models: ModelOptions = group(AdaptedPairNamesWithTarget, find_models)
