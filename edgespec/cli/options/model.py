"""The options that name models; what -m, -md and TARGET mean: names become folders here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from edgespec.cli.config.defaults import load_config
from edgespec.cli.console import Console, OnProgress
from edgespec.cli.options.group import FOLDER, Command, with_options
from edgespec.errors import EdgespecError
from edgespec.pair.hub_names import BUILT_IN_HEAD, Progress, cached_repositories, resolve_model
from edgespec.pair.user_config import UserConfig

GIB = 1 << 30
DRAFT_SPELLINGS = ("--draft-model", "--draft", "--model-draft", "--assistant-model")
MODEL_HELP = "The target: folder, name in the configuration or in the Hugging Face cache. [default: the built-in pair]"
TARGET_HELP = MODEL_HELP.replace("pair]", "one]")
CONFIG_HELP = "Read this configuration above the user's own."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The folders of target and draft; without a target, the built-in pair."""

    target: Path | None
    draft: Path | None
    chat_template: str | None = None  # in the place of the target's: a name of its own, or a text
    template_args: Mapping[str, Any] = field(default_factory=dict)  # what the template reads beside messages


def config_option(function: Command) -> Command:
    """Add --config, which is read before all other options."""
    return click.option("--config", type=FOLDER, expose_value=False, help=CONFIG_HELP)(function)


def model_options(function: Command) -> Command:
    """Add -m and -md; these names, and TARGET where there is one, are handed on as `models`."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        return function(**find_models(click.get_current_context(), values))

    options: list[Callable[[Command], Command]] = [
        click.option("-m", "--model", metavar="MODEL", shell_complete=complete_model, help=MODEL_HELP),
        click.option("-md", *DRAFT_SPELLINGS, "draft_model", metavar="MODEL", shell_complete=complete_model,
                     help=f"The draft, named likewise, or {BUILT_IN_HEAD}."),
        click.option("--revision", help="Branch, tag or commit of the target, by its name in the cache. [main]"),
        click.option("--draft-revision", help="The same of the draft."),
        click.option("--online/--offline", help="Download what the cache lacks. [default: offline]"),
        config_option,
    ]  # fmt: skip
    return with_options(call, options)


def target_options(function: Command) -> Command:
    """Add -m alone, which is handed on as `models` without a draft."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        values = {**values, "draft_model": None, "draft_revision": None}
        return function(**find_models(click.get_current_context(), values))

    options: list[Callable[[Command], Command]] = [
        click.option("-m", "--model", metavar="MODEL", shell_complete=complete_model, help=TARGET_HELP),
        click.option("--revision", help="Branch, tag or commit of the target, by its name in the cache. [main]"),
        click.option("--online/--offline", help="Download what the cache lacks. [default: offline]"),
        config_option,
    ]
    return with_options(call, options)


def complete_model(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names that the shell may offer, beside folders."""
    from edgespec.cli import all_commands

    try:
        aliases = load_config(context.find_root().params.get("config"), lambda: all_commands(context)).aliases
    except EdgespecError:  # said by the command itself
        aliases = {}
    names = [*aliases, *(name for name, _ in cached_repositories())]
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="dir")]


def find_models(context: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Replace a command's values of names, revisions and --online by `models`, their folders.

    Raises EdgespecError for a name that means nothing, click.UsageError for what belongs to no name.
    """
    values = _without_other_pairs(context, values)
    target, model = values.pop("target", None), values.pop("model")
    target = model if target is None else target
    draft, online = values.pop("draft_model"), values.pop("online")
    revision, draft_revision = values.pop("revision"), values.pop("draft_revision")
    if target is None and revision is not None:
        raise click.UsageError("--revision belongs to a model's name: -m NAME.")
    if draft is None and draft_revision is not None:
        raise click.UsageError("--draft-revision belongs to a draft's name: -md NAME.")
    if target is None and draft not in (None, BUILT_IN_HEAD):
        raise click.UsageError("-md needs a target: a draft goes with one. Name both, or neither.")
    aliases = (context.find_object(UserConfig) or UserConfig()).aliases
    console = Console(quiet=bool(values.get("quiet")), verbose=False)

    def folder(name: str | Path | None, revision: str | None) -> Path | None:
        if name is None:
            return None
        # A path that click made of TARGET has backslashes on Windows, where names have none.
        wanted = name.as_posix() if isinstance(name, Path) else name
        with console.progress_bar(wanted=online) as bar:
            progress = _download_progress(console.task(bar, f"downloading {wanted}")) if online else None
            return resolve_model(wanted, revision=revision, aliases=aliases, online=online, progress=progress)

    return {**values, "models": ModelOptions(target=folder(target, revision), draft=folder(draft, draft_revision))}


def _without_other_pairs(context: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out a model that TARGET replaces, and the environment's draft where its model is not used."""
    values = dict(values)
    source = context.get_parameter_source
    given = values.get("target") is not None
    if given and source("model") is ParameterSource.COMMANDLINE:
        raise click.UsageError("Give the target once: TARGET, or -m TARGET.")
    is_from_environment = source("model") is ParameterSource.ENVIRONMENT and not given
    option = next(option for option in context.command.params if option.name == "model")
    if option.resolve_envvar_value(context) and not is_from_environment:
        for name in ("draft_model", "revision", "draft_revision"):
            if source(name) is ParameterSource.ENVIRONMENT:
                values[name] = None
    if given:
        values["model"] = None
    return values


def _download_progress(show: OnProgress) -> Progress:
    return lambda done, total: show(done, total, f"{done / GIB:.2f} of {total / GIB:.2f} GiB")
