"""What quantised layers cost and save, against the same checkpoint as it is.

    python -m scripts.check.quant -m CHECKPOINT -md DRAFT

For int8 and nf4: seconds and peak memory of quantising, in a fresh process and beyond an idle one,
beside the largest layer; bytes of a pass; logits over the sample prompts against those of the stored
weights (largest and root mean square difference over the logits' own spread, argmaxes that agree,
Kullback-Leibler divergence); a greedy text through trees. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgespec import Engine, MemoryLimits, SamplingSettings
from edgespec.cli.generate.records import peak_resident_bytes
from edgespec.cli.prompts.read import read_prompts
from edgespec.machine.device import DTYPES
from edgespec.model.pass_rows import next_rows
from edgespec.pair.folder import open_model
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.placement.weights import weights_by_size
from offload.formats.bitsandbytes_4bit import bitsandbytes_functional

MIB = 1 << 20
CPU = torch.device("cpu")
TEXT_TOKENS = 40


def quantise_here(model: Path, quant: str, dtype: torch.dtype) -> None:
    """In a fresh process: quantise into EDGESPEC_CACHE, and print seconds and peak memory."""
    weights = weights_by_size(open_model(model), dtype=dtype, quant=quant)
    started = time.perf_counter()
    weights.loadable(CPU, announce=None, progress=None)
    print(json.dumps({"quantising_s": time.perf_counter() - started, "peak_bytes": peak_resident_bytes()}))


def idle_peak_bytes() -> int:
    """Peak memory of a process that imports the same and quantises nothing."""
    command = [sys.executable, "-m", "scripts.check.quant", *sys.argv[1:], "--idle"]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def run(arguments: argparse.Namespace, quant: str) -> tuple[Tensor, dict[str, Any]]:
    """Logits over the sample prompts [rows, vocab], and what a pass and a text look like."""
    pair = open_pair(arguments.model, arguments.draft_model)
    prompts = [
        pair.tokenizer.encode(row.prompt) for row in read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)
    ]
    limits = MemoryLimits(max_resident_layers=0)
    with Engine.from_pair(
        pair, limits=limits, device="cpu", dtype=arguments.dtype, quant=quant, context_tokens=512
    ) as engine:
        model = engine.target_model
        rows = []
        for prompt in prompts:
            (hidden,) = model.read([next_rows(model.new_text(), torch.tensor(prompt))])
            rows.append(model.logits(hidden))
        text = engine.generate(prompts[0], max_new_tokens=TEXT_TOKENS, sampling=SamplingSettings(), seed=0)
        facts = {
            "pass_bytes": engine.placement.streamed_bytes,
            "tokens_per_pass": text.tokens_per_pass,
            "text": text.text,
        }
    return torch.cat(rows).float(), facts


def compare(logits: Tensor, reference: Tensor) -> dict[str, float]:
    """How far the logits are from the reference's."""
    log_p, log_q = reference.log_softmax(-1), logits.log_softmax(-1)
    difference = logits - reference
    return {
        "largest_difference": float(difference.abs().max()),
        "relative_rms_difference": float(difference.square().mean().sqrt() / reference.std()),
        "equal_argmaxes": float((logits.argmax(-1) == reference.argmax(-1)).float().mean()),
        "divergence_nats": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
    }


def print_facts(quant: str, facts: dict[str, Any], stored_bytes: int) -> None:
    """One format's lines."""
    num_bytes = facts["pass_bytes"]
    print(
        f"{quant}: {num_bytes / MIB:.1f} MiB a pass ({num_bytes / stored_bytes:.3f} of stored); "
        f"quantised in {facts['quantising_s']:.1f} s with {facts['quantising_bytes'] / MIB:.0f} MiB\n"
        f"  logits: largest difference {facts['largest_difference']:.3f}, root mean square "
        f"{facts['relative_rms_difference']:.1%} of their spread, {facts['equal_argmaxes']:.1%} of argmaxes equal, "
        f"divergence {facts['divergence_nats']:.4f} nats\n"
        f"  {facts['tokens_per_pass']:.2f} tokens a pass: {facts['text']!r}"
    )


def main() -> int:
    """Quantise and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=DEMO_FOLDER / "target")
    parser.add_argument("-md", "--draft-model", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quantise", help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.idle:
        bitsandbytes_functional()
        print(peak_resident_bytes())
        return 0
    if arguments.quantise:
        quantise_here(arguments.model, arguments.quantise, DTYPES[arguments.dtype])
        return 0
    records = weights_by_size(open_model(arguments.model), dtype=DTYPES[arguments.dtype], quant=None).skeleton.records
    layer_bytes = max(record.stored_bytes for record in records)
    reference, plain = run(arguments, "none")
    idle_bytes = idle_peak_bytes()
    report: dict[str, Any] = {"layer_bytes": layer_bytes, "none": plain}
    print(f"stored: {plain['pass_bytes'] / MIB:.1f} MiB a pass, largest layer {layer_bytes / MIB:.1f} MiB")
    print(f"  {plain['tokens_per_pass']:.2f} tokens a pass: {plain['text']!r}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["EDGESPEC_CACHE"] = cache
        for quant in ("int8", "nf4"):
            command = [sys.executable, "-m", "scripts.check.quant", *sys.argv[1:], "--quantise", quant]
            child = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            logits, facts = run(arguments, quant)
            facts |= {**compare(logits, reference), "quantising_s": child["quantising_s"]}
            facts["quantising_bytes"] = child["peak_bytes"] - idle_bytes
            report[quant] = facts
            print_facts(quant, facts, plain["pass_bytes"])
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
