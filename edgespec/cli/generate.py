"""`edgespec generate`: complete the prompts of a file."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console
from edgespec.cli.options import (
    MachineOptions,
    check_all_resident,
    given_tree,
    machine_options,
    model_options,
    profile_option,
    tree_options,
)
from edgespec.cli.prompts import PromptRow, check_contexts, encode_prompts, read_prompts
from edgespec.cli.records import RunSettings
from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.tree_settings import TreeSettings

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.pair import ModelPair
    from edgespec.planned import Settled

GIB = 1 << 30
MAX_SEED = 2**63 - 1
LENGTH_SPELLINGS = ("--max-new-tokens", "--max-tokens", "--n-predict")
# Keys of a row that other tools obey
ROW_SETTINGS = {"max_new_tokens", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "system"}


@click.command(
    name="generate",
    epilog="""\b
Examples:
  edgespec generate prompts.jsonl -o out.jsonl            the built-in pair
  edgespec generate prompt.txt -m TARGET -md DRAFT        one prompt, streamed to stdout
  echo 'def main(' | edgespec generate - --temp 0.8 --seed 7

\b
Exit codes: 0 done, 1 failed while running, 2 wrong usage or input, 3 done but some prompts failed,
4 model or file not found, 5 does not fit the memory, 130 interrupted, 143 terminated.
""",
)
@click.argument("prompts", required=False)
@click.option("-f", "--file", "-i", "--input", "prompts_file", help="The same as PROMPTS.")
@click.option("--lines", is_flag=True, help="PROMPTS holds one prompt a line.")
@model_options
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
@click.option("--seed", type=click.IntRange(0, MAX_SEED), help="Of every prompt's draws. [default: random, recorded]")
@tree_options
@profile_option
@machine_options
@click.option("--no-self-check", is_flag=True, help="Do not try whether the model's family reads token trees rightly.")
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
    tree: TreeSettings,
    profile: str,
    machine: MachineOptions,
    no_self_check: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Complete PROMPTS: a text file (one prompt), JSONL rows with "prompt" and perhaps "id", or - for stdin.

    One prompt and no -o: the text streams to stdout. Otherwise one JSON record a prompt, written as it
    finishes. Everything else goes to stderr.
    """
    console = Console(quiet=quiet, verbose=verbose)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    chosen = {name: value for name, value in given.items() if value is not None}
    SamplingSettings(**chosen)  # type: ignore[arg-type]  # wrong values are named before a model is touched
    if (prompts is None) == (prompts_file is None):
        raise click.UsageError("Give one prompt file: PROMPTS, or -f FILE.")
    if draft_model is not None and model is None:
        raise EdgespecError("E_SETTING", "-md needs -m: a draft goes with a target.", "Name both folders, or neither.")
    source = prompts if prompts is not None else str(prompts_file)
    rows = read_prompts(source, lines=lines)
    if output is not None:
        _check_output(output, source, overwrite=overwrite)

    # torch and transformers are imported from here on.
    from dataclasses import replace

    from edgespec.cli.output import stream_one, write_records
    from edgespec.device import resolve_device
    from edgespec.engine import Engine
    from edgespec.pair import open_pair
    from edgespec.planned import settle

    pair = open_pair(model, draft_model)
    if pair.draft is None and tree.policy != "none":
        console.say("no draft (-md): decoding plainly, one token a pass")
    if tree.policy == "none":
        pair = replace(pair, draft=None)  # it was checked, and is not used
    sampling = replace(pair.default_sampling(), **chosen)  # type: ignore[arg-type]
    encoded = encode_prompts(pair, rows, raw=raw)
    context_tokens = check_contexts(pair, rows, encoded, max_new_tokens, ctx_size=machine.ctx_size)
    settled = settle(
        pair,
        source=profile,
        given=given_tree(click.get_current_context()),
        temperature=sampling.temperature,
        limits=machine.limits,
        device=resolve_device(machine.device),
        dtype=machine.dtype,
        quant=machine.quant,
        draft_quant=machine.draft_quant,
        context_tokens=context_tokens,
        prompt_tokens=max(map(len, encoded)),
    )
    for note in settled.notes:
        console.say(note)
    _say_what_is_not_applied(console, pair, rows)

    def on_plan(engine: Engine) -> None:
        _say_plan(console, engine)
        if settled.plan is not None:
            console.say(_plan_note(settled))
        if machine.limits.max_gpu_bytes is not None and engine.device.type == "cpu":
            console.say("--max-gpu-mem is not used: the device is the CPU")
        if machine.limits.gpu_margin_bytes is not None and engine.device.type == "cpu":
            console.say("--gpu-margin is not used: the device is the CPU")
        if machine.draft_quant is not None and engine.tree.policy == "none":
            console.say("--draft-quant is not used: there is no draft")
        check_all_resident(machine, engine.placement.num_resident, engine.placement.num_layers)

    def on_quantize(folder: Path, num_bytes: int, free_bytes: int) -> None:
        console.say(f"quantising once: {num_bytes / GIB:.3f} GiB go to {folder} ({free_bytes / GIB:.1f} GiB are free)")

    with ExitStack() as stack:
        with console.progress_bar() as bar:
            engine = Engine(
                pair,
                tree=settled.tree,
                profile=settled.profile,
                limits=machine.limits,
                device=machine.device,
                dtype=machine.dtype,
                quant=machine.quant,
                draft_quant=machine.draft_quant,
                context_tokens=context_tokens,
                prompt_tokens=max(map(len, encoded)),
                self_check=not no_self_check,
                on_plan=on_plan,
                on_quantize=on_quantize,
                progress=_loading_progress(console, bar),
            )
        stack.callback(engine.close)
        settings = RunSettings(
            sampling=sampling, max_new_tokens=max_new_tokens, seed=secrets.randbits(32) if seed is None else seed,
            seed_is_given=seed is not None, raw=raw, profile=settled.profile.name if settled.profile else None,
            predicted_per_s=settled.predicted_per_s,
        )  # fmt: skip
        if len(rows) == 1 and output is None:
            return stream_one(console, engine, encoded[0], settings)
        file = stack.enter_context(output.open("w", encoding="utf-8")) if output else sys.stdout
        return write_records(console, engine, rows, encoded, file, settings, live_text=live_text and not quiet)


def _check_output(output: Path, source: str, *, overwrite: bool) -> None:
    """Refuse to lose results or prompts, and find out now whether the file can be written."""
    if output.is_dir():
        raise EdgespecError("E_OUTPUT", f"'{output}' is a folder.", "Name a file in it.")
    if source != "-" and output.resolve() == Path(source).resolve():
        raise EdgespecError("E_OUTPUT", f"'{output}' is the prompt file.", "Choose another file for the results.")
    if output.is_file() and output.stat().st_size and not overwrite:
        raise EdgespecError(
            "E_OUTPUT_EXISTS", f"'{output}' exists and is not empty.", "Choose another file, or give --overwrite."
        )
    if not output.parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{output.parent}' to write in.", "Make it first.")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise EdgespecError("E_OUTPUT", f"'{output}' cannot be written.", "Choose a file that can be.")


def _say_what_is_not_applied(console: Console, pair: ModelPair, rows: list[PromptRow]) -> None:
    """A request that is not honoured is reported once."""
    ignored = sorted({key for row in rows for key in row.meta if key in ROW_SETTINGS})
    if ignored:
        console.say(f"not applied, only handed through to the records: {', '.join(ignored)} of the rows")
    penalty = pair.target.generation_config.get("repetition_penalty") or 1.0
    if penalty != 1.0:
        console.say(f"not applied: repetition_penalty {penalty} of the model's generation_config.json")


def _loading_progress(console: Console, bar: Any) -> Callable[[str, int, int], None]:
    tasks: dict[str, Any] = {}

    def update(phase: str, done: int, total: int) -> None:
        is_layers = phase.startswith("quantising")
        note = f"{done} of {total} layers" if is_layers else f"{done >> 20} of {total >> 20} MiB"
        console.say_sometimes(f"{phase}: {note}")
        if bar is None:
            return
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total, note="")
        bar.update(tasks[phase], completed=done, note=note)

    return update


def _plan_note(settled: Settled) -> str:
    """Which profile, for which temperature, and what it promises."""
    assert settled.profile is not None
    assert settled.plan is not None
    predicted = settled.predicted_per_s
    promise = ", overridden by flags" if predicted is None else f", {predicted:.3g} tokens/s predicted"
    return f"profile {settled.profile.name}: plan for temperature {settled.plan.temperature:g}{promise}"


def _say_plan(console: Console, engine: Engine) -> None:
    placement, tree = engine.placement, engine.tree
    streamed = placement.num_layers - placement.num_resident
    where = "" if not placement.num_pinned else f" ({placement.num_pinned} from RAM, {placement.num_on_disk} from disk)"
    layers = f"{placement.num_resident} of {placement.num_layers} layers resident"
    if streamed:
        layers += f", {streamed} streamed{where}, {placement.streamed_bytes / GIB:.3f} GiB a pass"
    shape = (
        "no tree"
        if tree.policy == "none"
        else f"{tree.policy} trees of {tree.num_nodes} nodes, depth {tree.num_layers}"
    )
    dtype = str(engine.dtype).removeprefix("torch.") + (f" from {engine.quant}" if engine.quant else "")
    console.say(f"{engine.pair.target.folder}: {layers}; {dtype} on {engine.device}; {shape}")
    if not tree.is_lossless:
        console.say(
            f"LOSSY: --target-width {tree.target_width} takes the longest of so many branches that the target "
            "starts; the output does not have the target's distribution"
        )
    console.detail(f"memory plan:\n{placement.table()}")
