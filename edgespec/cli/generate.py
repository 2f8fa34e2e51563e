"""`edgespec generate`: complete the prompts of a file."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console
from edgespec.cli.prompts import PromptRow, read_prompts
from edgespec.config import MAX_TREE_SIZE, POLICIES, MemoryLimits, SamplingSettings, TreeSettings, parse_size
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.pair import ModelPair

TREE = TreeSettings()
FOLDER = click.Path(path_type=Path)
DRAFT_SPELLINGS = ("--draft-model", "--draft", "--model-draft", "--assistant-model")
LENGTH_SPELLINGS = ("--max-new-tokens", "--max-tokens", "--n-predict")
SIZE_HELP = f"Most nodes of a tree, 1 to {MAX_TREE_SIZE}. [auto: {TREE.size}]"
DTYPE_HELP = "To compute in: float32, bfloat16 or float16. [auto: float32 on a CPU, the model's own on a GPU]"


class _Size(click.ParamType[int]):
    """A memory size in bytes, written like 10GiB."""

    name = "size"

    def convert(self, value: Any, _parameter: click.Parameter | None, _context: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_size(value)


def _resident_layers(_context: click.Context, _parameter: click.Parameter, value: str) -> int | None:
    """'auto' and 'all' are None: as many as fit."""
    if value in {"auto", "all"}:
        return None
    if not value.isdecimal():
        raise click.BadParameter(f"'{value}' is not auto, all or a number of layers.")
    return int(value)


def _tree_size(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    if value == "auto":
        return TREE.size
    if not value.isdecimal():
        raise click.BadParameter(f"'{value}' is not auto or a number of nodes.")
    return int(value)


@click.command(
    name="generate",
    epilog="""\b
Examples:
  edgespec generate prompts.jsonl -o out.jsonl            the built-in pair
  edgespec generate prompt.txt -m TARGET -md DRAFT        one prompt, streamed to stdout
  echo 'def main(' | edgespec generate - --temp 0.8 --seed 7
""",
)
@click.argument("prompts", required=False)
@click.option("-f", "--file", "-i", "--input", "prompts_file", help="The same as PROMPTS.")
@click.option("--lines", is_flag=True, help="PROMPTS holds one prompt a line.")
@click.option("-m", "--model", type=FOLDER, help="Folder of the target. [default: the built-in pair]")
@click.option("-md", *DRAFT_SPELLINGS, "draft_model", type=FOLDER, help="Folder of the draft.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write JSON records here, not to stdout.")
@click.option("--overwrite", is_flag=True, help="Replace an output file that holds results.")
@click.option("--stream", "live_text", is_flag=True, help="Show the text on stderr while records are written.")
@click.option("--raw", "--ignore-chat-template", "raw", is_flag=True, help="Do not apply the model's chat template.")
@click.option(
    "-n", *LENGTH_SPELLINGS, "max_new_tokens", default=512, show_default=True, help="-1: to the context's end."
)
@click.option("--temp", "--temperature", "temperature", type=float, help="0 is greedy. [default: the model's]")
@click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all. [default: the model's]")
@click.option("--top-p", type=float, help="Keep the likeliest tokens of this mass. [default: the model's]")
@click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest. [default: the model's]")
@click.option("--seed", type=click.IntRange(min=0), help="Of every prompt's draws. [default: random, recorded]")
@click.option("--policy", default=TREE.policy, show_default=True, help=f"How trees grow: {', '.join(POLICIES)}.")
@click.option("--tree-size", callback=_tree_size, default="auto", show_default=True, metavar="N|auto", help=SIZE_HELP)
@click.option("--tree-depth", default=TREE.depth, show_default=True, help="Most layers of a tree.")
@click.option("--tree-width", default=TREE.max_children, show_default=True, help="Most children of a node.")
@click.option("--tree-threshold", default=TREE.threshold, show_default=True, help="Least expected value of a node.")
@click.option("--draft-temp", type=float, help="Of the draft. [default: the target's, or 0.6 if that is greedy]")
@click.option("--max-cpu-mem", type=_Size(), help="Most RAM to use, as 10GiB. [default: what is free, less 1 GiB]")
@click.option("--max-gpu-mem", type=_Size(), help="Most GPU memory to use. [default: what is free, less 1 GiB]")
@click.option("-ngl", "--gpu-layers", "resident_layers", callback=_resident_layers, default="auto", show_default=True,
              metavar="auto|all|N", help="Target layers that stay resident; the others stream.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help=DTYPE_HELP)
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Print the memory plan in full.")
def command(
    *,
    prompts: str | None,
    prompts_file: str | None,
    lines: bool,
    model: Path | None,
    draft_model: Path | None,
    output: Path | None,
    overwrite: bool,
    live_text: bool,
    raw: bool,
    max_new_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    policy: str,
    tree_size: int,
    tree_depth: int,
    tree_width: int,
    tree_threshold: float,
    draft_temp: float | None,
    max_cpu_mem: int | None,
    max_gpu_mem: int | None,
    resident_layers: int | None,
    device: str,
    dtype: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """Complete PROMPTS: a text file (one prompt), JSONL rows with "prompt" and perhaps "id", or - for stdin.

    One prompt and no -o: the text streams to stdout. Otherwise one JSON record a prompt, written as it
    finishes. Everything else goes to stderr.
    """
    console = Console(quiet=quiet, verbose=verbose)
    tree = TreeSettings(
        policy=policy,
        size=tree_size,
        depth=tree_depth,
        threshold=tree_threshold,
        max_children=tree_width,
        draft_temperature=draft_temp,
    )
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    chosen = {name: value for name, value in given.items() if value is not None}
    SamplingSettings(**chosen)  # type: ignore[arg-type]  # wrong values are named before a model is touched
    if (prompts is None) == (prompts_file is None):
        raise click.UsageError("Give one prompt file: PROMPTS, or -f FILE.")
    if draft_model is not None and model is None:
        raise EdgespecError("E_SETTING", "-md needs -m: a draft goes with a target.", "Name both folders, or neither.")
    rows = read_prompts(prompts or prompts_file or "-", lines=lines)
    if output is not None:
        _check_output(output, overwrite=overwrite)

    # torch and transformers are imported from here on.
    from dataclasses import replace

    from edgespec.cli.output import stream_one, write_records
    from edgespec.engine import Engine
    from edgespec.pair import open_pair

    pair = open_pair(model, draft_model)
    sampling = replace(pair.default_sampling(), **chosen)  # type: ignore[arg-type]
    encoded = _encode(pair, rows, raw=raw)
    context_tokens = _check_contexts(pair, rows, encoded, max_new_tokens)
    if pair.draft is None and policy != "none":
        console.say("no draft (-md): decoding plainly, one token a pass")
    with ExitStack() as stack:
        with console.progress_bar() as bar:
            engine = Engine(
                pair,
                tree=tree,
                limits=MemoryLimits(
                    max_cpu_bytes=max_cpu_mem, max_gpu_bytes=max_gpu_mem, max_resident_layers=resident_layers
                ),
                device=device,
                dtype=dtype,
                context_tokens=context_tokens,
                progress=_loading_progress(bar),
            )
        stack.callback(engine.close)
        _say_plan(console, engine)
        run_seed = secrets.randbits(32) if seed is None else seed
        if len(rows) == 1 and output is None:
            return stream_one(console, engine, encoded[0], sampling, max_new_tokens, run_seed)
        file = stack.enter_context(output.open("w", encoding="utf-8")) if output else sys.stdout
        return write_records(
            console,
            engine,
            rows,
            encoded,
            file,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=run_seed,
            live_text=live_text,
        )


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse to lose results, and find out now whether the file can be written."""
    if output.exists() and output.stat().st_size and not overwrite:
        raise EdgespecError(
            "E_OUTPUT_EXISTS", f"'{output}' exists and is not empty.", "Choose another file, or give --overwrite."
        )
    try:
        with output.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise EdgespecError(
            "E_OUTPUT", f"cannot write '{output}' ({error.strerror}).", "Choose a file that can be written."
        ) from error


def _encode(pair: ModelPair, rows: list[PromptRow], *, raw: bool) -> list[list[int]]:
    """Token ids of every prompt, through the chat template where the model has one."""
    tokenizer = pair.tokenizer
    encoded = []
    for row in rows:
        if tokenizer.chat_template and not raw:
            turns = [{"role": "user", "content": row.prompt}]
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        else:
            ids = tokenizer.encode(row.prompt)
        if not ids:
            raise EdgespecError("E_PROMPT_EMPTY", f"the prompt of {row.where} has no tokens.", "Remove it.")
        encoded.append(list(ids))
    return encoded


def _check_contexts(pair: ModelPair, rows: list[PromptRow], encoded: list[list[int]], max_new_tokens: int) -> int:
    """The longest text that the run may make; raises EdgespecError naming a prompt that does not fit."""
    from edgespec.pair import new_token_limit

    longest = 0
    for row, ids in zip(rows, encoded, strict=True):
        try:
            limit, _ = new_token_limit(pair.max_context, len(ids), max_new_tokens)
        except EdgespecError as error:
            raise EdgespecError(error.code, f"{row.where}: {error.what}", error.fix) from error
        longest = max(longest, len(ids) + limit)
    return longest


def _loading_progress(bar: Any) -> Callable[[str, int, int], None] | None:
    if bar is None:
        return None
    tasks: dict[str, Any] = {}

    def update(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bar.add_task(f"loading {phase}", total=total, note="")
        bar.update(tasks[phase], completed=done, note=f"{done >> 20} of {total >> 20} MiB")

    return update


def _say_plan(console: Console, engine: Engine) -> None:
    placement, tree = engine.placement, engine.tree
    streamed = placement.num_layers - placement.num_resident
    where = "" if not placement.num_pinned else f" ({placement.num_pinned} from pinned RAM)"
    layers = f"{placement.num_resident} of {placement.num_layers} layers resident"
    if streamed:
        layers += f", {streamed} streamed{where}, {placement.streamed_bytes / (1 << 20):.1f} MiB a pass"
    shape = "no tree" if tree.policy == "none" else f"{tree.policy} trees of {tree.size} nodes, depth {tree.depth}"
    dtype = str(engine.dtype).removeprefix("torch.")
    console.say(f"{engine.pair.target.folder}: {layers}; {dtype} on {engine.device}; {shape}")
    console.detail(f"memory plan:\n{placement.table()}")
