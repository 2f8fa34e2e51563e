"""The options that say where a pair runs, in what, and within what memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from edgespec.cli.options.numbers import NumberOrAuto, is_auto, without_fraction
from edgespec.cli.options.record import option, options_of, settle
from edgespec.config import EXPERTS_NAMES, QUANT_NAMES, MemoryLimits, parse_quant, parse_size
from edgespec.errors import EdgespecError
from edgespec.machine.cpu import check_threads

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.place import PlacedWeights
    from edgespec.placement.run_config import RunConfig, RunConfigOptions

CONTEXT_SPELLINGS = ("--ctx-size", "--max-model-len")
FORMATS = "|".join(name for name, quant in QUANT_NAMES.items() if name == quant)
CPU_MEMORY_HELP = "Use at most this much RAM, as 10GiB. [default: what is free, less 1 GiB]"
GPU_MEMORY_HELP = "Use at most this much GPU memory. [default: what is free, less the margin]"
MARGIN_HELP = "Leave this much GPU memory free. [default: 1GiB without --max-gpu-mem]"
LAYERS_HELP = "Keep this many target layers resident; the others stream."
EXPERTS_HELP = (
    "Move the experts of mixtures on demand (auto, where layers stream) or with whole layers, keep all, or leave all "
    "to the CPU beside a GPU."
)
GRAPHS = {"auto": None, "on": True, "off": False}
GRAPHS_HELP = "Record the draft's passes as CUDA graphs. [auto: for one text at a time, on a card]"
CONTEXT_HELP = "Keep memory for this many tokens of prompt and answer, as 8k. [auto: as many as needed]"
DEVICE_HELP = "Run on this device: auto, cpu, cuda or cuda:N."
DTYPE_HELP = (
    "Set the number format for computing: float32, bfloat16 or float16. [auto: float32 on a CPU, bfloat16 where it "
    "multiplies packed layers, the model's own on a GPU]"
)
QUANT_HELP = (
    "Quantise the target's layers: auto takes four bits as this machine is fastest with. Made once, then kept in the "
    "cache. [default: as published; a CPU gets published 4-bit weights in its own order, none leaves them]"
)
DRAFT_QUANT_HELP = "Quantise the draft's layers likewise."
THREADS_HELP = "Use this many threads of the processor. [auto: as many as pay, fewer while other programs run]"
EXACT_HELP = (
    "Let rows that are read as in plain decoding decide near ties, so that a seed has one text in bf16 on a card, too."
)
PARALLEL_HELP = "Decode this many texts in each pass. [auto: as many as pay]"


def size_of(_context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of a size written like 10GiB."""
    try:
        return None if value is None else parse_size(value)
    except EdgespecError as error:
        raise EdgespecError(error.code, f"{parameter.opts[0]}: {error.what}", error.fix) from error


def _tokens(_context: click.Context, _parameter: click.Parameter, value: str) -> int | None:
    """Parse a number of tokens, as 8192 or 8k; None is auto."""
    if is_auto(value):
        return None
    match = re.fullmatch(r"(\d{1,9})(k?)", without_fraction(value).lower())
    tokens = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if tokens < 1:
        raise click.BadParameter(f"'{value}' is not auto or a number of tokens, such as 8192 or 8k.")
    return tokens


def _quant(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return parse_quant(value, setting=str(parameter.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Where to place weights, in which number formats, and within which limits."""

    max_cpu_mem: int | None = option("--max-cpu-mem", callback=size_of, metavar="SIZE", help=CPU_MEMORY_HELP)
    max_gpu_mem: int | None = option("--max-gpu-mem", callback=size_of, metavar="SIZE", help=GPU_MEMORY_HELP)
    gpu_margin: int | None = option("--gpu-margin", callback=size_of, metavar="SIZE", help=MARGIN_HELP)
    resident_layers: int | str | None = option(
        "-ngl", "--gpu-layers", type=NumberOrAuto("layers", words=("all",)), default="auto", show_default=True,
        metavar="auto|all|N", help=LAYERS_HELP,
    )  # fmt: skip
    experts: str = option(
        "--experts", type=click.Choice(EXPERTS_NAMES), default="auto", show_default=True, help=EXPERTS_HELP
    )
    cuda_graphs: str = option(
        "--cuda-graphs", type=click.Choice(tuple(GRAPHS)), default="auto", show_default=True, help=GRAPHS_HELP
    )
    ctx_size: int | None = option(
        "-c", *CONTEXT_SPELLINGS, callback=_tokens, default="auto", metavar="N|auto", help=CONTEXT_HELP
    )
    device: str = option("--device", default="auto", show_default=True, help=DEVICE_HELP)
    dtype: str = option("--dtype", default="auto", show_default=True, help=DTYPE_HELP)
    quant: str | None = option("--quant", callback=_quant, metavar=FORMATS, help=QUANT_HELP)
    draft_quant: str | None = option("--draft-quant", callback=_quant, metavar=FORMATS, help=DRAFT_QUANT_HELP)
    threads: int | None = None
    exact: bool = False

    limits: MemoryLimits = field(init=False)

    def __post_init__(self) -> None:
        limits = MemoryLimits(
            max_cpu_bytes=self.max_cpu_mem,
            max_gpu_bytes=self.max_gpu_mem,
            gpu_margin_bytes=self.gpu_margin,
            max_resident_layers=self.resident_layers if isinstance(self.resident_layers, int) else None,
        )
        settle(self, limits=limits)

    def options(self, *, context_tokens: int, prompt_tokens: int | None = None) -> RunConfigOptions:
        """Return the options of `resolve_run_config`, for texts of this many tokens."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "quant": self.quant,
            "draft_quant": self.draft_quant,
            "experts": self.experts,
            "cuda_graphs": GRAPHS[self.cuda_graphs],
            "threads": self.threads,
            "exact": self.exact,
            "limits": self.limits,
            "context_tokens": context_tokens,
            "prompt_tokens": prompt_tokens,
        }

    def run_config(self, pair: ModelPair, *, context_tokens: int, prompt_tokens: int | None = None) -> RunConfig:
        """Return where the pair runs, with memory for texts of this many tokens; raises EdgespecError."""
        from edgespec.placement.run_config import resolve_run_config

        options = self.options(context_tokens=context_tokens, prompt_tokens=prompt_tokens)
        return resolve_run_config(pair.target, pair.max_context, draft=pair.draft, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions(PlanOptions):
    """The same with threads, for a command that runs a pair."""

    threads: int | None = option(
        "-t", "--threads", type=NumberOrAuto("threads", check=check_threads), default="auto", show_default=True,
        metavar="auto|N", help=THREADS_HELP,
    )  # fmt: skip
    exact: bool = option("--exact", is_flag=True, help=EXACT_HELP)


machine_options = options_of(MachineOptions, handed_on_as="machine")


def check_all_resident(machine: PlanOptions, weights: PlacedWeights) -> None:
    """Raise EdgespecError when all layers are to be resident and do not fit."""
    placement = weights.placement
    is_on_host = placement.experts is not None and placement.experts.is_on_host
    has_all_layers = placement.is_resident or (is_on_host and placement.num_resident == placement.num_layers)
    if machine.resident_layers == "all" and not has_all_layers:
        what = f"only {placement.in_words} fit the memory."
        raise EdgespecError("E_MEMORY", what, "Raise the limit, or leave out -ngl all and let the others stream.")
