"""From the configuration and the environment to defaults of one command's options.

Keys are the long flags' names, with underscores. A flag counts more than EDGESPEC_COMMAND_KEY, that more
than EDGESPEC_KEY, and that more than the configuration; click keeps this order. Values of a file are
checked here, so that an error names the file.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import click

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.hub.user_config import KnownKeys, Setting, UserConfig

NO_KEYS = {"help", "version", "config"}
SAMPLING_KEYS = (*(setting.name for setting in fields(SamplingSettings)), "seed")
# A command with this option samples; others may have a temperature or a seed that means something else.
SAMPLES = "top_p"
# What options raise for a value; the last for text that no command line can hold, as a path with a zero byte
REFUSALS = (click.ClickException, EdgespecError, ValueError)


def spellings(option: click.Parameter) -> list[str]:
    """Return an option's names in configurations, its own first.

    Arguments and options without a sensible default have none.
    """
    found = [name[2:].replace("-", "_") for name in option.opts if name.startswith("--")]
    if not isinstance(option, click.Option) or not found or option.name in NO_KEYS:
        return []
    own = option.name if option.name in found else found[0]
    return [own, *(name for name in found if name != own)]


def opposites(option: click.Parameter) -> list[str]:
    """Return the names that switch a flag off, as `offline` does for --online."""
    return [name[2:].replace("-", "_") for name in option.secondary_opts if spellings(option)]


def known_keys(commands: Mapping[str, click.Command]) -> KnownKeys:
    """Return every key that some command has a flag for."""
    found: dict[str, str] = {}
    for command in commands.values():
        for option in command.params:
            own, *others = spellings(option) or [""]
            found |= {name: own for name in (own, *others) if name and name not in found}
            found |= {name: name for name in opposites(option) if name not in found}
    return KnownKeys(spellings=found, sampling=frozenset(key for key in SAMPLING_KEYS if key in found))


def name_variables(name: str, command: click.Command) -> None:
    """Let every option be set by EDGESPEC_COMMAND_KEY and EDGESPEC_KEY."""
    for option in command.params:
        keys = [key.upper() for key in spellings(option)]
        if keys:
            prefixes = (f"EDGESPEC_{name.upper()}", "EDGESPEC")
            option.envvar = [f"{prefix}_{key}" for prefix in prefixes for key in keys]


def options_on_the_line(parent: click.Context, command: click.Command, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what a command line gives, before conversion; nothing where the line is not valid.

    A call for help stands under `help`.
    """
    context = click.Context(command, parent=parent, resilient_parsing=True)
    try:
        values, _, _ = command.make_parser(context).parse_args(list(arguments))
    except click.UsageError:  # said when the line is parsed in earnest
        return {}
    help_option = command.get_help_option(context)
    return {**values, "help": help_option is not None and bool(values.get(str(help_option.name)))}


def named_model(command: click.Command, on_the_line: Mapping[str, Any]) -> str | None:
    """Return the model that a command line or the environment names."""
    context = click.Context(command)
    for name in ("target", "model"):
        if isinstance(on_the_line.get(name), str):
            return str(on_the_line[name])
    option = next((option for option in command.params if option.name == "model"), None)
    return option.resolve_envvar_value(context) if option is not None else None


def settings_of(
    command: click.Command, config: UserConfig, model: str | None, commands: Iterable[click.Command]
) -> Iterator[tuple[click.Option, Any, Setting]]:
    """Yield the options that the configuration sets, with values as click takes them; raises EdgespecError.

    A value that this command refuses is left out where another of `commands` has a flag of that name for it.
    """
    found = config.settings(model)
    samples = any(option.name == SAMPLES for option in command.params)
    context = click.Context(command)
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        own = spellings(option)[:1]
        for key in [*own, *opposites(option)]:
            setting = found.get(key)
            if setting is None or (key in SAMPLING_KEYS and not samples):
                continue
            try:
                value = _checked(context, option, setting, is_opposite=key not in own)
            except REFUSALS as error:
                if any(_accepts(other, key, setting) for other in commands if other is not command):
                    continue
                reason = getattr(error, "what", None) or getattr(error, "message", None) or str(error)
                what = f"{setting.origin} {key} = {setting.value!r}: {reason}"
                raise EdgespecError("E_USER_CONFIG", what, "Correct the value, or leave the key out.") from error
            if value is not None:
                yield option, value, setting


def defaults_of(
    command: click.Command, config: UserConfig, model: str | None, commands: Iterable[click.Command]
) -> dict[str, Any]:
    """Return the command's defaults by parameter, for click's `default_map`; raises EdgespecError."""
    return {str(option.name): value for option, value, _ in settings_of(command, config, model, commands)}


def _accepts(command: click.Command, key: str, setting: Setting) -> bool:
    """Return whether a command has a flag of this name that takes such a value."""
    for option in command.params:
        if isinstance(option, click.Option) and key in spellings(option)[:1]:
            try:
                _checked(click.Context(command), option, setting, is_opposite=False)
            except REFUSALS:
                continue
            return True
    return False


def _checked(context: click.Context, option: click.Option, setting: Setting, *, is_opposite: bool) -> Any:
    """Return a file's value as the command line would have it; where the option refuses it, raise what click would."""
    value = _as_click_takes_it(option, setting, is_opposite=is_opposite)
    if value is not None:
        option.process_value(context, value)
    return value


def _as_click_takes_it(option: click.Option, setting: Setting, *, is_opposite: bool) -> Any:
    """Return a file's value as the command line would have it; None where it changes nothing."""
    value = setting.value
    if option.count:
        if isinstance(value, bool) or not isinstance(value, int):
            raise click.BadParameter("it must be a number.")
        return value
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.BadParameter("it must be true or false.")
        if not option.is_bool_flag:  # one of several flags for one value
            return option.flag_value if value else None
        return value != is_opposite
    if isinstance(value, bool):
        raise click.BadParameter("true and false are for flags.")
    if isinstance(value, dict):
        if "=" not in (option.metavar or ""):
            raise click.BadParameter("it is no table.")
        return [f"{name}={number}" for name, number in value.items()]
    if option.multiple:
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
