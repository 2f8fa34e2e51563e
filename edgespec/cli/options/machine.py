"""The options that say where a pair runs, in what, and within what memory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.options.group import Command, with_options
from edgespec.cli.options.numbers import is_auto, without_fraction
from edgespec.config import EXPERTS_NAMES, QUANT_NAMES, MemoryLimits, parse_quant, parse_size
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.place import PlacedWeights
    from edgespec.placement.run_config import RunConfig, RunConfigOptions

CONTEXT_SPELLINGS = ("--ctx-size", "--max-model-len")
CPU_MEMORY_HELP = "Most RAM to use, as 10GiB. [default: what is free, less 1 GiB]"
GPU_MEMORY_HELP = "Most GPU memory to use. [default: what is free, less the margin]"
MARGIN_HELP = "GPU memory to leave free. [default: 1GiB without --max-gpu-mem]"
DTYPE_HELP = "To compute in: float32, bfloat16 or float16. [auto: float32 on a CPU, the model's own on a GPU]"
QUANT_HELP = "Quantise the target's layers: none, nf4 or int8. Made once, then kept in the cache."
GRAPHS_HELP = "Record the draft's passes as CUDA graphs, for one text at a time. Not yet tried on a card."
EXPERTS_HELP = (
    "Of mixtures: move those that are asked for (auto, where layers stream), whole layers, keep all, or leave all to "
    "the CPU beside a GPU."
)
THREADS_HELP = "Threads of the processor. [auto: as many as pay, fewer while other programs run]"
PARALLEL_HELP = "Texts that share each pass. [auto: as many as pay]"
CONTEXT_HELP = "Tokens of prompt and answer to make room for, as 8k. [auto: what is needed]"


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
    experts: str
    cuda_graphs: bool
    threads: int | None

    def options(self, *, context_tokens: int, prompt_tokens: int | None = None) -> RunConfigOptions:
        """What a run's place is resolved from, for texts of so many tokens."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "quant": self.quant,
            "draft_quant": self.draft_quant,
            "experts": self.experts,
            "cuda_graphs": self.cuda_graphs,
            "threads": self.threads,
            "limits": self.limits,
            "context_tokens": context_tokens,
            "prompt_tokens": prompt_tokens,
        }

    def run_config(self, pair: ModelPair, *, context_tokens: int, prompt_tokens: int | None = None) -> RunConfig:
        """Where the pair is to run, with room for texts of so many tokens; raises EdgespecError."""
        from edgespec.placement.run_config import resolve_run_config

        options = self.options(context_tokens=context_tokens, prompt_tokens=prompt_tokens)
        return resolve_run_config(pair.target.config, pair.max_context, **options)


def machine_options(function: Command) -> Command:
    """Add the options of memory, device, number formats and threads, which are handed on as `machine`."""
    threads = click.option("-t", "--threads", callback=_threads, default="auto", show_default=True, metavar="auto|N",
                           help=THREADS_HELP)  # fmt: skip
    return threads(planning_options(function))


def planning_options(function: Command) -> Command:
    """Add the same without threads, for a command that runs nothing."""

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
        experts: str,
        cuda_graphs: bool,
        threads: int | None = None,
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
            experts=experts,
            cuda_graphs=cuda_graphs,
            threads=threads,
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
        click.option("--experts", type=click.Choice(EXPERTS_NAMES), default="auto", show_default=True,
                     help=EXPERTS_HELP),
        click.option("--cuda-graphs", is_flag=True, help=GRAPHS_HELP),
        click.option("-c", *CONTEXT_SPELLINGS, "ctx_size", callback=_tokens, default="auto", metavar="N|auto",
                     help=CONTEXT_HELP),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
        click.option("--dtype", default="auto", show_default=True, help=DTYPE_HELP),
        click.option("--quant", default="none", show_default=True, metavar=formats, help=QUANT_HELP),
        click.option("--draft-quant", default="none", show_default=True, metavar=formats,
                     help="The same for the draft."),
    ]  # fmt: skip
    return with_options(call, options)


def check_all_resident(machine: MachineOptions, weights: PlacedWeights) -> None:
    """Raise EdgespecError when all layers were asked for and do not fit."""
    placement = weights.placement
    is_on_host = placement.experts is not None and placement.experts.is_on_host
    has_all_layers = placement.is_resident or (is_on_host and placement.num_resident == placement.num_layers)
    if machine.wants_all_resident and not has_all_layers:
        raise EdgespecError(
            "E_MEMORY",
            f"only {placement.in_words} fit the memory.",
            "Raise the limit, or leave out -ngl all and let the others stream.",
        )


def _size(_context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
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


def parallel_option(function: Command) -> Command:
    """Add the option of texts under way, which is handed on as `parallel`; None is auto."""
    return click.option("-np", "--parallel", callback=_parallel, default="auto", show_default=True, metavar="auto|N",
                        help=PARALLEL_HELP)(function)  # fmt: skip


def _parallel(_context: click.Context, _parameter: click.Parameter, value: str) -> int | None:
    if is_auto(value):
        return None
    value = without_fraction(value)
    if not re.fullmatch(r"-?\d{1,9}", value):
        raise click.BadParameter(f"'{value}' is not auto or a number of texts.")
    from edgespec.placement.run_config import check_parallel

    return check_parallel(int(value))


def _threads(_context: click.Context, _parameter: click.Parameter, value: str) -> int | None:
    """Parse a number of threads; None is auto."""
    if is_auto(value):
        return None
    value = without_fraction(value)
    if not re.fullmatch(r"-?\d{1,9}", value):
        raise click.BadParameter(f"'{value}' is not auto or a number of threads.")
    from edgespec.model.cpu import check_threads

    return check_threads(int(value))


def _resident_layers(_context: click.Context, _parameter: click.Parameter, value: str) -> int | str:
    if value == "all" or is_auto(value):
        return "all" if value == "all" else "auto"
    value = without_fraction(value)
    if not value.isdecimal():
        raise click.BadParameter(f"'{value}' is not auto, all or a number of layers.")
    return int(value)
