"""What -m, -md and TARGET mean on a command line: names become folders here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from edgespec.cli.config.defaults import load_config
from edgespec.cli.console import Console, OnProgress
from edgespec.errors import EdgespecError
from edgespec.pair.hub_names import Progress, cached_repositories, resolve_model
from edgespec.pair.user_config import UserConfig

GIB = 1 << 30


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
    """Replace the names of `target`, `model` and `draft_model` by folders; raises EdgespecError.

    A command without TARGET has no such value. The values of --revision, --draft-revision and --online are taken out.
    """
    values = _without_other_pairs(context, values)
    revisions = {"model": values.pop("revision"), "draft_model": values.pop("draft_revision")}
    online = values.pop("online")
    role = "target" if values.get("target") is not None else "model"
    if values[role] is None and revisions["model"] is not None:
        raise click.UsageError("--revision belongs to a model's name: -m NAME.")
    if values["draft_model"] is None and revisions["draft_model"] is not None:
        raise click.UsageError("--draft-revision belongs to a draft's name: -md NAME.")
    if values[role] is None:
        # Commands refuse a draft without its target themselves.
        return values if values["draft_model"] is None else {**values, "draft_model": Path(values["draft_model"])}
    config = context.find_object(UserConfig) or UserConfig()
    console = Console(quiet=bool(values.get("quiet")), verbose=False)
    for name in (role, "draft_model"):
        if values[name] is None:
            continue
        # A path that click made of TARGET has backslashes on Windows, where names have none.
        wanted = values[name].as_posix() if isinstance(values[name], Path) else values[name]
        with console.progress_bar(wanted=online) as bar:
            values[name] = resolve_model(
                wanted,
                revision=revisions["draft_model" if name == "draft_model" else "model"],
                aliases=config.aliases,
                online=online,
                progress=_download_progress(console.task(bar, f"downloading {wanted}")) if online else None,
            )
    return values


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
