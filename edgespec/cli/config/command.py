"""`edgespec config`: where the configuration lies, what it comes to, and a template to start from."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgespec.cli.config.defaults import SAMPLES, SAMPLING_KEYS, named_model, settings_of, spellings
from edgespec.cli.config.groups import all_commands, load_config
from edgespec.cli.options.record import FOLDER
from edgespec.cli.options.tree import TREE_FIELDS
from edgespec.errors import EdgespecError
from edgespec.hub.names import BUILT_IN_TARGET, resolve_model
from edgespec.hub.user_config import Setting, UserConfig
from edgespec.user_paths import SET_HOME, config_file, config_files, make_folder, require_place, shown_place
from edgespec.validation import parse_json

BUILT_IN = "built-in"

TEMPLATE = """\
# edgespec reads this file before every command. Keys are the long flags' names:
# `edgespec generate --help` lists them, `edgespec config show --origin` says what holds and why.
# A flag counts more than EDGESPEC_CTX_SIZE and the like, and those more than this file.

[defaults]
# model = "big"                  # a folder, a name below, or a name in the Hugging Face cache
# ctx_size = "8k"
# max_gpu_mem = "10GiB"
# gpu_margin = "512MiB"
# device = "cuda:0"

[sampling]                       # left out, the model's own generation_config.json counts
# temperature = 0.7
# top_p = 0.95
# repetition_penalty = 1.1
# logit_bias = {"42" = -100}     # a token's id, or its text

# A name for a pair: `edgespec generate prompts.jsonl -m big`. Settings here count more than [defaults].
# [models.big]
# model = "Qwen/Qwen2.5-72B-Instruct"
# draft_model = "Qwen/Qwen2.5-1.5B-Instruct"
# quant = "nf4"
"""


@click.group(
    name="config",
    epilog="""\b
Examples:
  edgespec config init                      a commented template
  edgespec config show --origin             what `generate` would run with, and why
  edgespec config show estimate --all
  $EDITOR "$(edgespec config path)"

Order: flag, EDGESPEC_GENERATE_KEY, EDGESPEC_KEY, --config or EDGESPEC_CONFIG,
the user's own file, a machine profile (trees only), the model's
generation_config.json (sampling only), built-in.
""",
)
def command() -> None:
    """Show or begin the configuration.

    A TOML file with defaults, sampling settings and names for pairs.
    """


@command.command(name="path")
@click.pass_context
def show_path(context: click.Context) -> int:
    """Print where the user's configuration lies, or would lie."""
    own = config_file()
    sys.stdout.write(f"{shown_place(own)}\n")
    if not own.exists():
        sys.stderr.write("it does not exist; edgespec config init writes a template\n")
    for path in config_files(context.find_root().params.get("config")):
        if path != own:
            sys.stderr.write(f"read above it: {path}\n")
    return 0


@command.command(name="init")
def write_template() -> int:
    """Write a commented template, unless there is a configuration."""
    path = config_file()
    require_place(path)
    try:
        make_folder(path.parent)
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE)
    except OSError as error:
        if path.exists():
            raise EdgespecError("E_OUTPUT_EXISTS", f"'{path}' exists.", "Edit it, or move it away first.") from error
        raise EdgespecError("E_OUTPUT", f"'{path}' cannot be written ({error.strerror}).", SET_HOME) from error
    sys.stdout.write(f"{path}\n")
    return 0


@command.command(name="show")
@click.argument("name", default="generate", metavar="[COMMAND]")
@click.option("--origin", "with_origin", is_flag=True, help="Say where each value comes from.")
@click.option("--all", "with_unset", is_flag=True, help="Show also what is not set.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
@click.option("--config", type=FOLDER, help="Read this configuration above the user's own.")
@click.pass_context
def show(
    context: click.Context, *, name: str, with_origin: bool, with_unset: bool, as_json: bool, config: Path | None
) -> int:
    """What COMMAND (generate) would run with where no flag says otherwise."""
    commands = all_commands(context)
    if name not in commands:
        raise click.UsageError(f"There is no command '{name}'.")
    settings = _settings(name, commands, load_config(context, config))
    shown = {key: setting for key, setting in settings.items() if with_unset or setting.value not in (None, False, ())}
    if as_json:
        found = {key: asdict(setting) for key, setting in shown.items()}
        sys.stdout.write(json.dumps(found, default=str) + "\n")
        return 0
    lines = [f"{key} = {_written(setting.value)}" for key, setting in shown.items()]
    width = max(map(len, lines), default=0)
    for line, setting in zip(lines, shown.values(), strict=True):
        sys.stdout.write(f"{line:<{width}}  # {setting.origin}\n" if with_origin else f"{line}\n")
    return 0


def _settings(name: str, commands: Mapping[str, click.Command], config: UserConfig) -> dict[str, Setting]:
    """Return every option that can be configured, by its key, with the value that the command would take."""
    command = commands[name]
    model = named_model(command, {})
    found = settings_of(command, config, model, commands.values())
    configured = {option.name: (value, setting) for option, value, setting in found}
    context = click.Context(command, info_name=name)
    context.default_map = {str(option): value for option, (value, _) in configured.items()}
    samples = any(option.name == SAMPLES for option in command.params)
    if model is None and "model" in configured:
        model = configured["model"][0]
    sampling, model_origin = _generation_config(model, config) if samples else ({}, "")
    settings: dict[str, Setting] = {}
    for option in command.params:
        key = next(iter(spellings(option)), None)
        if key is None:
            continue
        value, source = option.consume_value(context, {})
        if source is ParameterSource.ENVIRONMENT:
            settings[key] = Setting(value=value, origin=_variable(option))
        elif source is ParameterSource.DEFAULT_MAP:
            settings[key] = configured[option.name][1]
        elif key in sampling:
            settings[key] = Setting(value=sampling[key], origin=model_origin)
        else:
            value = _plain(option.get_default(context))
            is_planned = option.name in TREE_FIELDS and value is None
            origin = "a machine profile where one fits, else built-in" if is_planned else BUILT_IN
            settings[key] = Setting(value=value, origin=origin)
    return settings


def _variable(option: click.Parameter) -> str:
    """Return the environment variable that an option's value comes from."""
    names = option.envvar if isinstance(option.envvar, list) else [str(option.envvar)]
    return next(name for name in names if os.environ.get(name))


def _generation_config(model: str | None, config: UserConfig) -> tuple[dict[str, Any], str]:
    """Return the sampling of the model's own file, and the file's name; nothing where there is no file."""
    try:
        folder = BUILT_IN_TARGET if model is None else resolve_model(model, aliases=config.aliases)
        path = folder if folder.suffix == ".gguf" else folder / "generation_config.json"
        content = _of_gguf(path) if path == folder else parse_json(path.read_text(encoding="utf-8"))
    except (EdgespecError, OSError, ValueError):
        return {}, ""
    if not isinstance(content, dict):
        return {}, ""
    keys = SAMPLING_KEYS if content.get("do_sample") else ("repetition_penalty",)
    return {key: content[key] for key in keys if content.get(key) is not None}, f"'{path}'"


def _of_gguf(path: Path) -> Any:
    from edgespec.pair.folder import read_generation_config

    return read_generation_config(path)


def _plain(value: Any) -> Any:
    """Return a default as people know it: None in place of the object that click marks unset values with."""
    return value if isinstance(value, str | int | float | tuple | list) else None


def _written(value: Any) -> str:
    return "(not set)" if value is None else json.dumps(value, default=str)
