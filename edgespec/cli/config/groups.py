"""Groups of commands whose options take defaults from the configuration and the environment."""

import difflib
import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgespec.cli.config.defaults import defaults_of, known_keys, name_variables, named_model, options_on_the_line
from edgespec.hub.user_config import UserConfig, read_config
from edgespec.user_paths import config_files

READ_CONFIG_THEMSELVES = {"cache", "completion", "config", "doctor"}  # or need none: they go on where it is damaged


class ConfiguredGroup(click.Group):
    """A group that gives a command its configured defaults when the command is used; a group below gives its own.

    `modules` are names of commands and of the modules that hold them as `command`, imported when they are used,
    so that --help stays fast.
    """

    def __init__(self, *arguments: Any, modules: Mapping[str, str] | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.modules = modules or {}

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands, also of those whose modules are not imported yet."""
        return sorted({*self.modules, *super().list_commands(context)})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the command, whose options know their environment variables."""
        if name not in self.modules:
            command = super().get_command(context, name)
        else:
            command = importlib.import_module(self.modules[name]).command
        if command is not None:
            # One prefix for all below `train`: the flags of its commands are alike.
            name_variables(name if self is context.find_root().command else str(self.name), command)
        return command

    def invoke(self, context: click.Context) -> Any:
        """Run the command of a line; a mistake that click's parser finds names that command."""
        try:
            return super().invoke(context)
        except click.UsageError as error:
            name = context.invoked_subcommand
            command = self.get_command(context, name) if name is not None else None
            if error.ctx is None and command is not None:
                error.ctx = click.Context(command, info_name=name, parent=context)
            raise

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a line, and put its configured defaults into the context."""
        try:
            name, command, rest = super().resolve_command(context, arguments)
        except click.UsageError as error:
            # click looks among the commands that are imported, and there are none yet.
            near = difflib.get_close_matches(arguments[0], self.list_commands(context), n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{near[0]}'?", context) from error
        is_group = isinstance(command, ConfiguredGroup)
        if command is not None and not is_group and not context.resilient_parsing:
            _refuse_swallowed(click.Context(command, info_name=name, parent=context), rest)
        if command is None or is_group or name in READ_CONFIG_THEMSELVES or context.resilient_parsing:
            return name, command, rest
        on_the_line = options_on_the_line(context, command, rest)
        if not on_the_line.get("help"):  # which must work whatever the configuration holds
            own = on_the_line.get("config")
            context.obj = load_config(context, Path(own) if isinstance(own, str) else None)
            if context.obj.files:
                others = all_commands(context).values()
                defaults = defaults_of(command, context.obj, named_model(command, on_the_line), others)
                context.default_map = {str(name): defaults}
        return name, command, rest


def _refuse_swallowed(context: click.Context, arguments: list[str]) -> None:
    """Raise click.UsageError where an option lacks its value, and would take the option behind it for one."""
    options = {name: option for option in context.command.params for name in (*option.opts, *option.secondary_opts)
               if isinstance(option, click.Option)}  # fmt: skip
    for name, value in itertools.pairwise(arguments):
        if name == "--":
            return
        option = options.get(name)
        if option is None or option.is_flag or option.count or option._flag_needs_value:  # which may have none
            continue
        if value in options:
            long = next((other for other in option.opts if other.startswith("--")), name)
            raise click.UsageError(
                f"{name} has no value: {value} is an option. Write {long}={value} where that is meant.", context
            )


def all_commands(context: click.Context) -> dict[str, click.Command]:
    """Return every command of the program that one of its commands belongs to, imported, by names as `train head`."""
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    found: dict[str, click.Command] = {}
    for name in root.command.list_commands(root):
        command = root.command.get_command(root, name)
        if isinstance(command, ConfiguredGroup):
            context = click.Context(command, info_name=name, parent=root)
            below = {f"{name} {part}": command.get_command(context, part) for part in command.list_commands(context)}
            found |= {part: leaf for part, leaf in below.items() if leaf is not None}
        elif command is not None:
            found[name] = command
    return found


def load_config(context: click.Context, own_file: Path | None = None) -> UserConfig:
    """Read `own_file`, or the file that `edgespec --config FILE` names, and the user's own; raises EdgespecError."""
    paths = config_files(own_file or context.find_root().params.get("config"))
    if not paths:
        return UserConfig()
    known = known_keys(all_commands(context))
    return UserConfig(files=tuple(read_config(path, known) for path in paths))
