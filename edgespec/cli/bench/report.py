"""What `edgespec bench` found: a table for people, or the same for programs."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec import __version__
from edgespec.cli.console import counted, write_lines
from edgespec.cli.standard_streams import result_stream
from edgespec.config import SamplingSettings

if TYPE_CHECKING:
    from edgespec.decode.lossless import Difference, Verdict
    from edgespec.doctor.benchmark import Round
    from edgespec.engine import Engine

SCHEMA = "edgespec.bench/1"
FORMATS = ("md", "csv", "json", "jsonl")
COLUMNS = ("mode", "policy", "nodes", "tok/s", "tok/pass", "prompt/s", "speed-up")


def write_report(
    engine: Engine, rounds: dict[str, list[Round]], sampling: SamplingSettings, *, report_format: str
) -> None:
    """Write the report in this format, with one row for each mode."""
    rows = [_row(engine, mode, rounds, sampling) for mode in rounds]
    if report_format == "json":
        sys.stdout.write(json.dumps({"schema": SCHEMA, **_setting(engine), "results": rows}) + "\n")
    elif report_format == "jsonl":
        for row in rows:
            sys.stdout.write(json.dumps({"schema": SCHEMA, **_setting(engine), **row}) + "\n")
    elif report_format == "csv":
        flat = [{**_setting(engine), **row, "sampling": json.dumps(row["sampling"])} for row in rows]
        writer = csv.DictWriter(result_stream(), fieldnames=list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
    else:
        write_lines(_table(engine, rows))


def write_verdicts(engine: Engine, verdicts: Sequence[Verdict], *, as_json: bool) -> None:
    """Write what --check found, text by text."""
    if as_json:
        texts = [{**dataclasses.asdict(verdict), "lossless": verdict.is_lossless} for verdict in verdicts]
        found = {"lossless": all(verdict.is_lossless for verdict in verdicts), "texts": texts}
        sys.stdout.write(json.dumps({"schema": SCHEMA, **_setting(engine), "check": found}) + "\n")
        return
    num_ties = 0
    for number, verdict in enumerate(verdicts, start=1):
        if verdict.from_plain is not None:
            what = f"prompt {number}: the text leaves plain decoding's at"
            sys.stdout.write(f"{what} {_difference(engine, verdict.from_plain)}\n")
        for difference in verdict.from_target:
            num_ties += difference.is_near_tie
            what = f"prompt {number}: read again, the target has another token at"
            sys.stdout.write(f"{what} {_difference(engine, difference)}\n")
    tokens = sum(verdict.num_tokens for verdict in verdicts)
    equal = sum(verdict.from_plain is None for verdict in verdicts)
    ties = f"; {counted(num_ties, 'near tie')}" if num_ties else ""
    lossless = "lossless" if all(verdict.is_lossless for verdict in verdicts) else "NOT LOSSLESS"
    sys.stdout.write(
        f"{lossless}: {equal} of {len(verdicts)} texts at temperature {verdicts[0].temperature:g} equal plain "
        f"decoding's, token by token; {counted(tokens, 'token')} compared with the target's own{ties}\n"
    )


def _difference(engine: Engine, difference: Difference) -> str:
    names = [repr(engine.pair.tokenizer.decode([token])) for token in (difference.token, difference.expected)]
    verdict = "a near tie" if difference.is_near_tie else "a DIFFERENCE"
    return (
        f"token {difference.index}: {names[0]} in place of {names[1]}, "
        f"{verdict} (logits {difference.gap:.2g} apart, rounding explains {difference.allowed:.2g})"
    )


def _row(engine: Engine, mode: str, rounds: dict[str, list[Round]], sampling: SamplingSettings) -> dict[str, Any]:
    from edgespec.doctor.benchmark import spread

    own = rounds[mode]
    speed = spread([found.tokens_per_s for found in own])
    ratio = spread(
        [found.tokens_per_s / max(1e-9, plain.tokens_per_s) for found, plain in zip(own, rounds["plain"], strict=True)]
    )
    tree = own[0].tree
    is_tree, is_tuned = tree.policy != "none", mode == "tree" and engine.tunes(sampling)
    return {
        "mode": mode,
        "policy": tree.policy,
        "nodes": (engine.largest_tree if is_tuned else tree).num_nodes if is_tree else 0,
        "tuned": is_tuned,
        "depth": tree.num_layers if is_tree else 0,
        "lossless": tree.is_lossless,
        "prompts": len(own[0].texts),
        "repeats": len(own),
        "new_tokens": own[0].num_tokens + len(own[0].texts),
        "prompt_tokens": sum(text.prompt_tokens for text in own[0].texts),
        "tokens_per_s": _rounded(speed.median),
        "lowest_tokens_per_s": _rounded(speed.low),
        "highest_tokens_per_s": _rounded(speed.high),
        "tokens_per_pass": _rounded(spread([found.tokens_per_pass for found in own]).median),
        "prompt_tokens_per_s": _rounded(spread([found.prompt_tokens_per_s for found in own]).median),
        "speed_up": _rounded(ratio.median),
        "lowest_speed_up": _rounded(ratio.low),
        "highest_speed_up": _rounded(ratio.high),
        "sampling": dataclasses.asdict(sampling),
    }


def _setting(engine: Engine) -> dict[str, Any]:
    """Return the settings that both modes share."""
    import torch

    from edgespec.placement.number_formats import quant_named

    pair, placement = engine.pair, engine.placement
    assert pair.draft is not None
    return {
        "model": str(pair.target.folder),
        "draft_model": str(pair.draft.named),
        "quant": quant_named(pair.target, engine.run_config.quant),
        "draft_quant": quant_named(pair.draft, engine.run_config.draft_quant),
        "dtype": str(engine.run_config.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "layers": placement.num_layers,
        "resident_layers": placement.num_resident,
        "pass_bytes": placement.pass_bytes,
        "profile": engine.profile.name if engine.profile else None,
        "edgespec": __version__,
        "torch": torch.__version__,
    }


def _table(engine: Engine, rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, aligned so that it reads as plain text, with the settings above it."""
    from rich import box
    from rich.table import Table

    from edgespec.cli.rich_console import table_lines

    table = Table(*COLUMNS, box=box.MARKDOWN)
    for row in rows:
        speed_up = f"{row['speed_up']:.2f} ({row['lowest_speed_up']:.2f} to {row['highest_speed_up']:.2f})"
        table.add_row(
            row["mode"],
            row["policy"],
            str(row["nodes"]),
            f"{row['tokens_per_s']:.2f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['prompt_tokens_per_s']:.1f}",
            "1.00" if row["mode"] == "plain" else speed_up,
        )
    setting, plain = _setting(engine), rows[0]
    about = (
        f"{setting['model']} + {setting['draft_model']}, {setting['dtype']} on {setting['device']}, "
        f"{setting['resident_layers']} of {setting['layers']} layers resident; temperature "
        f"{plain['sampling']['temperature']:g}; {counted(plain['prompts'], 'prompt')}, "
        f"{counted(plain['repeats'], 'repeat')}\n\n"
    )
    return about + "\n".join(table_lines(table))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
