"""Options that several commands share, each group handed on as one value."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgespec.cli.options.model_names import complete_model, find_models
from edgespec.config import MAX_TREE_SIZE, QUANT_NAMES, MemoryLimits, parse_quant, parse_size
from edgespec.errors import EdgespecError
from edgespec.tree.settings import (
    DEFAULT_DRAFT_TOKENS,
    POLICIES,
    USED_BY,
    TreeSettings,
    refuse_unused,
    require_policy,
)

TREE = TreeSettings()
FOLDER = click.Path(path_type=Path)
DRAFT_SPELLINGS = ("--draft-model", "--draft", "--model-draft", "--assistant-model")
CONTEXT_SPELLINGS = ("--ctx-size", "--max-model-len")
# All but what training alone asks for.
TREE_FIELDS = [field.name for field in dataclasses.fields(TreeSettings) if field.name != "reranked"]
SIZE_HELP = f"Most nodes of a tree, 1 to {MAX_TREE_SIZE}. [auto: {TREE.size}]"
WIDTH_HELP = "Most children of a node; eagle2: also of a layer; c2t: of a layer. [16; eagle2 10, c2t 15, opt-tree all]"
DRAW_HELP = "How children come about (adaptive and static trees). [adaptive: what pays more; else sampled]"
CPU_MEMORY_HELP = "Most RAM to use, as 10GiB. [default: what is free, less 1 GiB]"
GPU_MEMORY_HELP = "Most GPU memory to use. [default: what is free, less the margin]"
MARGIN_HELP = "GPU memory to leave free. [default: 1GiB without --max-gpu-mem]"
DTYPE_HELP = "To compute in: float32, bfloat16 or float16. [auto: float32 on a CPU, the model's own on a GPU]"
QUANT_HELP = "Quantise the target's layers: none, nf4 or int8. Made once, then kept in the cache."
MODEL_HELP = "The target: folder, name in the configuration or in the Hugging Face cache. [default: the built-in pair]"
TARGET_HELP = MODEL_HELP.replace("pair]", "one]")
CONFIG_HELP = "Read this configuration above the user's own."
PROFILE_HELP = "Tree settings that `edgespec profile` measured; single flags override them."
CONTEXT_HELP = "Tokens of prompt and answer to make room for, as 8k. [auto: what is needed]"

Command = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Where to run, in which number formats, and within which limits."""

    limits: MemoryLimits
    wants_all_resident: bool
    ctx_size: int | None
    device: str
    dtype: str
    quant: str | None
    draft_quant: str | None


def with_options(function: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """Decorate a function with options, which stand in the help in the order of the list."""
    for option in reversed(options):
        function = option(function)
    return function


def config_option(function: Command) -> Command:
    """Add --config, which is read before all other options."""
    return click.option("--config", type=FOLDER, expose_value=False, help=CONFIG_HELP)(function)


def model_options(function: Command) -> Command:
    """Add -m and -md; these names, and TARGET where there is one, are handed on as folders."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        return function(**find_models(click.get_current_context(), values))

    options: list[Callable[[Command], Command]] = [
        click.option("-m", "--model", metavar="MODEL", shell_complete=complete_model, help=MODEL_HELP),
        click.option("-md", *DRAFT_SPELLINGS, "draft_model", metavar="MODEL", shell_complete=complete_model,
                     help="The draft, named likewise."),
        click.option("--revision", help="Branch, tag or commit of the target, by its name in the cache. [main]"),
        click.option("--draft-revision", help="The same of the draft."),
        click.option("--online/--offline", help="Download what the cache lacks. [default: offline]"),
        config_option,
    ]  # fmt: skip
    return with_options(call, options)


def target_options(function: Command) -> Command:
    """Add -m alone; its name is handed on as a folder, `model`."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        values = find_models(click.get_current_context(), {**values, "draft_model": None, "draft_revision": None})
        del values["draft_model"]
        return function(**values)

    options: list[Callable[[Command], Command]] = [
        click.option("-m", "--model", metavar="MODEL", shell_complete=complete_model, help=TARGET_HELP),
        click.option("--revision", help="Branch, tag or commit of the target, by its name in the cache. [main]"),
        click.option("--online/--offline", help="Download what the cache lacks. [default: offline]"),
        config_option,
    ]
    return with_options(call, options)


def tree_options(function: Command) -> Command:
    """Add the options of the tree's shape, which are handed on as `tree`."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        given = {name: values.pop(name) for name in TREE_FIELDS}
        given = {name: value for name, value in given.items() if value is not None}
        policy = given.get("policy", TREE.policy)
        require_policy(policy)
        context = click.get_current_context()
        for name in [name for name in given if name in USED_BY and policy not in USED_BY[name]]:
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                refuse_unused(name, policy)
            # A default of the user's own is for the policies that it means something to.
            context.params[name] = None
            del given[name]
        return function(tree=TreeSettings(**given), **values)

    options = [
        click.option("--policy", help=f"How trees grow: {', '.join(POLICIES)}. [default: {TREE.policy}]"),
        click.option("--draw", metavar="sampled|chosen", help=DRAW_HELP),
        click.option("--tree-size", "size", callback=_tree_size, metavar="N|auto", help=SIZE_HELP),
        click.option("--tree-depth", "depth", type=int, help=f"Most layers of a tree. [default: {TREE.depth}]"),
        click.option("--tree-width", "max_children", type=int, help=WIDTH_HELP),
        click.option("--tree-threshold", "threshold", type=float,
                     help="Least expected value of a node (adaptive, dyspec). [default: 0, off]"),
        click.option("--branching", callback=_numbers, metavar="4,2,2,1",
                     help="Children of every node, by layer (specinfer, mcsd)."),
        click.option("--fork", callback=_fork, metavar="WxD", help="W chains of D tokens (mcsd)."),
        click.option("--draft-tokens", "--num-draft-tokens", "draft_tokens", type=int,
                     help=f"Length of a chain (chain). [default: {DEFAULT_DRAFT_TOKENS}]"),
        click.option("--tree-file", type=FOLDER, help="A preset tree (static): JSON, paths of ranks or parents."),
        click.option("--stop-gain", type=float, help="Stop when a layer adds fewer expected tokens (opt-tree)."),
        click.option("--stop-depths", callback=_numbers, metavar="4,6,8",
                     help="Depths at which to look whether to stop (eagle2)."),
        click.option("--stop-logprob", "stop_log_probability", type=float,
                     help=f"Stop there below this log-probability. [default: {TREE.stop_log_probability}]"),
        click.option("--classifier", type=FOLDER, help="C2T's classifier (c2t, chain). [c2t: the built-in pair's]"),
        click.option("--stop-model", type=FOLDER, help="A decision model that ends drafting early (static trees)."),
        click.option("--confidence", type=float, help="Least confidence of classifier (0.5) or model (0.4)."),
        click.option("--acceptance", type=FOLDER,
                     help="Measured acceptance (adaptive, sequoia). [default: the built-in pair's]"),
        click.option("--target-width", type=int,
                     help="LOSSY above 1: the target starts so many branches, the longest wins (mcsd)."),
        click.option("--draft-temp", "draft_temperature", type=float,
                     help="Of the draft. [default: the target's; 0.2 to 0.8 by policy if that is greedy]"),
    ]  # fmt: skip
    return with_options(call, options)


def given_tree(context: click.Context) -> dict[str, Any]:
    """Return the tree settings that were given, by the names of `TreeSettings`, without defaults."""
    return {name: context.params[name] for name in TREE_FIELDS if context.params.get(name) is not None}


def profile_option(function: Command) -> Command:
    """Add --profile, which is handed on as `profile`."""
    return click.option("--profile", default="auto", show_default=True, metavar="auto|none|FILE", help=PROFILE_HELP)(
        function
    )


def machine_options(function: Command) -> Command:
    """Add the options of memory, device and number formats, which are handed on as `machine`."""

    @functools.wraps(function)
    def call(
        *,
        max_cpu_mem: int | None,
        max_gpu_mem: int | None,
        gpu_margin: int | None,
        resident_layers: int | str,
        ctx_size: int | None,
        device: str,
        dtype: str,
        quant: str,
        draft_quant: str,
        **others: Any,
    ) -> Any:
        machine = MachineOptions(
            limits=MemoryLimits(
                max_cpu_bytes=max_cpu_mem,
                max_gpu_bytes=max_gpu_mem,
                gpu_margin_bytes=gpu_margin,
                max_resident_layers=resident_layers if isinstance(resident_layers, int) else None,
            ),
            wants_all_resident=resident_layers == "all",
            ctx_size=ctx_size,
            device=device,
            dtype=dtype,
            quant=parse_quant(quant),
            draft_quant=parse_quant(draft_quant, setting="draft_quant"),
        )
        return function(machine=machine, **others)

    formats = "|".join(name for name, quant in QUANT_NAMES.items() if name in {"none", quant})
    options = [
        click.option("--max-cpu-mem", callback=_size, metavar="SIZE", help=CPU_MEMORY_HELP),
        click.option("--max-gpu-mem", callback=_size, metavar="SIZE", help=GPU_MEMORY_HELP),
        click.option("--gpu-margin", callback=_size, metavar="SIZE", help=MARGIN_HELP),
        click.option("-ngl", "--gpu-layers", "resident_layers", callback=_resident_layers, default="auto",
                     show_default=True, metavar="auto|all|N",
                     help="Target layers that stay resident; the others stream."),
        click.option("-c", *CONTEXT_SPELLINGS, "ctx_size", callback=_tokens, default="auto", metavar="N|auto",
                     help=CONTEXT_HELP),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
        click.option("--dtype", default="auto", show_default=True, help=DTYPE_HELP),
        click.option("--quant", default="none", show_default=True, metavar=formats, help=QUANT_HELP),
        click.option("--draft-quant", default="none", show_default=True, metavar=formats,
                     help="The same for the draft."),
    ]  # fmt: skip
    return with_options(call, options)


def check_all_resident(machine: MachineOptions, num_resident: int, num_layers: int) -> None:
    """Raise EdgespecError when all layers were asked for and do not fit."""
    if machine.wants_all_resident and num_resident < num_layers:
        raise EdgespecError(
            "E_MEMORY",
            f"only {num_resident} of {num_layers} layers fit the memory.",
            "Raise the limit, or leave out -ngl all and let the others stream.",
        )


def parse_temperatures(text: str) -> list[float]:
    """Parse a list of temperatures like 0,0.6,1; raises click.BadParameter."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= value < 100 for value in found):
        raise click.BadParameter(f"'{text}' is not a list of temperatures, such as 0,0.6,1.", param_hint="--temps")
    return found


def _size(_context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of a size written like 10GiB."""
    try:
        return None if value is None else parse_size(value)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{parameter.opts[0]}: {error.what}", error.fix) from error


def _tokens(_context: click.Context, _parameter: click.Parameter, value: str) -> int | None:
    """Parse a number of tokens, as 8192 or 8k; None is auto."""
    if value == "auto":
        return None
    match = re.fullmatch(r"(\d{1,9})(k?)", value.lower())
    tokens = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if tokens < 1:
        raise click.BadParameter(f"'{value}' is not auto or a number of tokens, such as 8192 or 8k.")
    return tokens


def _resident_layers(_context: click.Context, _parameter: click.Parameter, value: str) -> int | str:
    if value in {"auto", "all"}:
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"'{value}' is not auto, all or a number of layers.")
    return int(value)


def _tree_size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    if value is None or value == "auto":
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"'{value}' is not auto or a number of nodes.")
    return int(value)


def _numbers(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", value):
        raise click.BadParameter(f"'{value}' is not a list of numbers, such as 4,2,2,1.")
    return tuple(map(int, value.split(",")))


def _fork(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})", value)
    if not match:
        raise click.BadParameter(f"'{value}' is not chains x length, such as 16x5.")
    return int(match[1]), int(match[2])
