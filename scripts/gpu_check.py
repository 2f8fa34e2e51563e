"""Everything that needs a CUDA device, in one run of a few minutes; skips politely without one.

    python scripts/gpu_check.py

Attention in two parts against one kernel; a draft's passes as graphs against plain ones; few rows times packed weights
against unpacked ones; whether the host waits for small copies; the built-in pair's greedy text through trees on the
device against transformers', and its texts in company against those alone; the tests marked gpu; copies or compute made
slow; copies pinned and pageable; streamed against resident logits in bfloat16 and nf4; pass time against the slower of
its copies and its compute; peak memory against the plan; allocations after the first pass.
Each part runs whatever became of the others (`--only` takes some); shapes that do not fit the card are left out, and
said so. Prints a table and, in any case, one JSON line to send along; exits 1 when a check fails.

Tests without a card find mixed devices (tests/edgespec/test_mixed_devices.py) and copies out of order
(tests/offload/test_device_order.py). They cannot see kernels, and what types and layouts these take (`attention`,
`greedy`, `packed`; `streaming` for nf4's); streams, events and locked memory as the driver has them (`slow`, `small`,
`streaming`, `tests`); the memory that is really taken (`streaming`); graphs that are recorded (`graphs`).

A machine without a network needs wheels brought along, for its own Python: those that pyproject.toml names, and pytest
for the part `tests`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig

from edgespec import EdgespecError, Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.copies import on_device
from edgespec.model.attention import attend_part, joined
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import additive, next_rows
from edgespec.model.text_cache import TextCache
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.placement.memory import LIBRARIES_BYTES
from offload.formats.bitsandbytes_4bit import NF4
from offload.loaders import CudaLoader
from offload.placement import NUM_STAGING_BUFFERS
from profiles.measure import machine_facts

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)
HOST_LAYERS = 1 + NUM_STAGING_BUFFERS  # a layer's pages, and the buffers that they are copied through
NEW_TOKENS = 128  # of a text
GPU_TESTS = ("tests/offload/test_cuda.py", "tests/cli/test_doctor.py", "tests/edgespec/text/test_conversation.py")
PACKED_SHAPE = (4096, 8192)
QUEUED_SHAPE = (8192, 8192)
SHAPES = {"7B-like": (4096, 11008, 8), "70B-like": (8192, 28672, 4)}  # hidden, inner, layers that are tried


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of work that is waited for."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def copy_rates() -> dict[str, float]:
    """Host to device, GiB/s."""
    num_bytes = GIB
    device = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(num_bytes, dtype=torch.uint8)
    return {
        "pinned_gib_per_s": 1 / seconds(lambda: device.copy_(pinned, non_blocking=True)),
        "pageable_gib_per_s": 1 / seconds(lambda: device.copy_(pageable)),
    }


def write_layers(folder: Path, *, hidden: int, inner: int, layers: int) -> None:
    """A random bf16 Llama with layers of a real model's shape and the built-in tokenizer."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config)  # in the config's dtype: float32 would fit no small card
    model.cpu().save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    for path in (DEMO_FOLDER / "target").glob("tokenizer*"):
        shutil.copy(path, folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassFacts:
    """What repeated passes over one text gave."""

    logits: torch.Tensor
    pass_s: float
    streamed_bytes: int
    num_layers: int
    peak_bytes: int  # of the device, as the driver sees it, less what other programs had before
    planned_bytes: int
    num_allocations: int  # of device memory, after the first pass


def run_passes(pair: ModelPair, rows: int, *, quant: str = "none", **limits: Any) -> PassFacts:
    """Passes over `rows` rows; exits when two of them differ."""
    ids = torch.arange(rows, device=DEVICE) % 2000
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    context_bytes = used_bytes() - torch.cuda.memory_reserved()
    with Engine.from_pair(
        pair, limits=MemoryLimits(**limits), device="cuda", dtype="bfloat16", quant=quant, context_tokens=rows
    ) as engine:
        model = engine.target_model

        def one_pass() -> torch.Tensor:
            (hidden,) = model.read([next_rows(model.new_text(), ids)])
            return model.logits(hidden)

        logits = one_pass().clone()
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        for _ in range(3):
            if not torch.equal(one_pass(), logits):
                raise SystemExit(f"passes differ from each other: {limits}")
        num_allocations = torch.cuda.memory_stats()["segment.all.allocated"] - before
        return PassFacts(
            logits=logits,
            pass_s=seconds(one_pass),
            streamed_bytes=engine.placement.streamed_bytes,
            num_layers=engine.placement.num_layers,
            peak_bytes=context_bytes + torch.cuda.max_memory_reserved(),
            planned_bytes=engine.placement.planned_bytes,
            num_allocations=num_allocations,
        )


def used_bytes() -> int:
    """Device memory in use by everybody."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def check_streaming(pair: ModelPair, rows: int, quant: str, pinned_gib_per_s: float) -> dict[str, Any]:
    """Resident against streamed from locked memory and from files."""
    resident = run_passes(pair, rows, quant=quant)
    pinned = run_passes(pair, rows, quant=quant, max_resident_layers=0)
    mixed = run_passes(pair, rows, quant=quant, max_resident_layers=1)
    layer_bytes = pinned.streamed_bytes // pinned.num_layers
    staging_only = LIBRARIES_BYTES + HOST_LAYERS * layer_bytes + layer_bytes // 2  # no layer fits beside them
    files = run_passes(pair, rows, quant=quant, max_resident_layers=0, max_cpu_bytes=staging_only)
    copy_s = pinned.streamed_bytes / GIB / pinned_gib_per_s
    return {
        "quant": quant,
        "rows": rows,
        "resident_ms": resident.pass_s * 1e3,
        "pinned_ms": pinned.pass_s * 1e3,
        "files_ms": files.pass_s * 1e3,
        "pass_gib": pinned.streamed_bytes / GIB,
        "gib_per_s": pinned.streamed_bytes / GIB / pinned.pass_s,
        "overlap": max(copy_s, resident.pass_s) / pinned.pass_s,  # 1: the slower of copy and compute hides the other
        "peak_gib": pinned.peak_bytes / GIB,
        "planned_gib": pinned.planned_bytes / GIB,
        "allocations": pinned.num_allocations,
        "equal": all(torch.equal(resident.logits, other.logits) for other in (pinned, mixed, files)),
    }


def check_slow(pair: ModelPair) -> bool:
    """Results stay the same when copies or compute are made slow on the device."""
    expected = run_passes(pair, 16).logits
    original: dict[str, Any] = {"load": CudaLoader.load, "release": CudaLoader.release}

    def sleepy_load(self: CudaLoader, *arguments: Any) -> None:
        with torch.cuda.stream(self._slots.copy_stream):
            torch.cuda._sleep(20_000_000)
        original["load"](self, *arguments)

    def sleepy_take_back(self: CudaLoader, *arguments: Any) -> None:
        torch.cuda._sleep(20_000_000)  # the layer's readers are still at work when it is given back
        original["release"](self, *arguments)

    equal = True
    for name, slow in (("load", sleepy_load), ("release", sleepy_take_back)):
        setattr(CudaLoader, name, slow)
        try:
            equal &= torch.equal(run_passes(pair, 16, max_resident_layers=0).logits, expected)
        finally:
            setattr(CudaLoader, name, original[name])
    return equal


def check_greedy() -> dict[str, Any]:
    """The built-in pair on the device, float32, against transformers' greedy decoding there."""
    torch.backends.cuda.matmul.allow_tf32 = False
    pair = open_pair(None, None)
    rows = read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)
    prompts = [pair.tokenizer.encode(row.prompt) for row in rows]
    model = AutoModelForCausalLM.from_pretrained(pair.target.folder, dtype=torch.float32).to(DEVICE)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
        expected.append(found[0, len(prompt) :].tolist())
    equal, tokens, passes = 0, 0, 0
    limits = MemoryLimits(max_resident_layers=2)
    with Engine.from_pair(pair, tree=TreeSettings(size=64), device="cuda", dtype="float32", limits=limits) as engine:
        for prompt, plain in zip(prompts, expected, strict=True):
            result = engine.generate(prompt, max_new_tokens=NEW_TOKENS, sampling=SamplingSettings())
            equal += list(result.token_ids) == plain
            tokens, passes = tokens + len(result.token_ids) - 1, passes + len(result.passes)
    return {"equal_prompts": equal, "prompts": len(prompts), "tokens_per_pass": tokens / passes}


def check_together(num_texts: int = 16) -> dict[str, Any]:
    """Texts of the built-in pair that share passes on the device, float32, against each alone; tokens a second."""
    pair = open_pair(None, None)
    rows = read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)
    limits = MemoryLimits(max_resident_layers=2)
    report: dict[str, Any] = {"texts": num_texts}
    with Engine.from_pair(
        pair, tree=TreeSettings(size=16), device="cuda", dtype="float32", limits=limits, parallel=num_texts
    ) as engine:
        requests = [
            engine.request(rows[number % len(rows)].prompt, max_new_tokens=NEW_TOKENS, temperature=0.4 * (number % 3),
                           seed=number, name=str(number))
            for number in range(num_texts)
        ]  # fmt: skip
        texts: dict[str, list[tuple[int, ...]]] = {}
        for way in ("alone", "together"):
            torch.cuda.synchronize()
            started = time.perf_counter()
            if way == "alone":
                found = [engine.submit(request).result() for request in requests]
            else:
                ended = dict(engine.generate_many(requests))
                found = [text for number in range(num_texts) if not isinstance(text := ended[number], Exception)]
            torch.cuda.synchronize()
            texts[way] = [text.token_ids for text in found]
            report[f"{way}_tokens_per_s"] = sum(map(len, texts[way])) / (time.perf_counter() - started)
    report["equal_texts"] = sum(one == other for one, other in zip(texts["alone"], texts["together"], strict=False))
    return report


def run_gpu_tests() -> str:
    """The tests marked gpu, in a process of their own; their last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    lines = [line for line in (outcome.stdout + outcome.stderr).splitlines() if line.strip()]
    return ("passed: " if outcome.returncode == 0 else "FAILED: ") + (lines[-1] if lines else "no output")


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    cells = {key: f"{value:.2f}" if isinstance(value, float) else value for key, value in row.items()}
    print("  ".join(f"{key} {value}" for key, value in cells.items()), flush=True)


def greedy_part(_rows: list[int]) -> tuple[bool, Any]:
    """Texts through trees are transformers'."""
    found = check_greedy()
    print_row({"greedy on the device:": "", **found})
    return found["equal_prompts"] == found["prompts"], found


def together_part(_rows: list[int]) -> tuple[bool, Any]:
    """Texts in company are those alone."""
    found = check_together()
    print_row({"texts in company:": "", **found})
    return found["equal_texts"] == found["texts"], found


def tests_part(_rows: list[int]) -> tuple[bool, Any]:
    """The tests marked gpu pass."""
    found = run_gpu_tests()
    print(f"tests marked gpu: {found}", flush=True)
    return found.startswith("passed"), found


def slow_part(_rows: list[int]) -> tuple[bool, Any]:
    """Slow copies and slow compute change nothing."""
    with written_shape("7B-like") as pair:
        equal = check_slow(pair)
    print(f"slow copies and slow compute: {'equal' if equal else 'DIFFER'}", flush=True)
    return equal, equal


def streaming_part(numbers_of_rows: list[int]) -> tuple[bool, Any]:
    """Streamed passes are resident ones', within the plan, without allocations."""
    rates = copy_rates()
    print_row(dict(rates))
    table: list[dict[str, Any]] = []
    ok = True
    for name in SHAPES:
        with written_shape(name) as pair:
            for quant in ("none", "nf4"):
                for rows in numbers_of_rows:
                    row: dict[str, Any] = {"shape": name, "quant": quant, "rows": rows}
                    try:
                        row |= check_streaming(pair, rows, quant, rates["pinned_gib_per_s"])
                        ok &= row["equal"] and row["allocations"] == 0 and row["peak_gib"] <= 1.1 * row["planned_gib"]
                    except EdgespecError as error:
                        if error.code != "E_MEMORY":
                            raise
                        row["left out"] = error.what
                    table.append(row)
                    print_row(row)
    return ok, {**rates, "table": table}


@contextlib.contextmanager
def written_shape(name: str) -> Iterator[ModelPair]:
    """A random model with layers of this shape, on the disk while it is used."""
    hidden, inner, layers = SHAPES[name]
    with tempfile.TemporaryDirectory() as work:
        os.environ["EDGESPEC_CACHE"] = work
        write_layers(Path(work) / name, hidden=hidden, inner=inner, layers=layers)
        yield open_pair(Path(work) / name, None)


def attention_part(_rows: list[int]) -> tuple[bool, Any]:
    """Attention in two parts is that of one kernel, within the rounding of its format."""
    table, ok = [], True
    for dtype in (torch.bfloat16, torch.float32):
        for context in (4096, 32768):
            query, keys, values = (
                torch.randn(1, 8, rows, 128, dtype=dtype, device=DEVICE) for rows in (768, context + 768, context + 768)
            )
            own = additive(torch.ones(768, 768, dtype=torch.bool, device=DEVICE).tril(), dtype)
            mask = torch.cat([own.new_zeros(768, context), own], 1)
            scale = 128**-0.5
            one = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
            parts = [
                attend_part(query, keys[:, :, part], values[:, :, part], masked, scale)
                for part, masked in ((slice(0, context), None), (slice(context, None), own))
            ]
            difference = (joined(*parts).float() - one.float()).abs().max().item()
            ok &= difference <= 4 * torch.finfo(dtype).eps
            table.append({"attention": str(dtype), "keys": context, "difference": difference})
            print_row({**table[-1], "difference": f"{difference:.0e}"})
    return ok, table


def packed_part(_rows: list[int]) -> tuple[bool, Any]:
    """Few rows times a packed nf4 weight are those times the unpacked one; microseconds of a layer either way."""
    shape, table, ok = PACKED_SHAPE, [], True
    packing, parts = NF4.pack(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE))
    kernel = packing.kernel(shape, torch.bfloat16, torch.device(DEVICE))
    assert kernel is not None
    scratch = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    for count in (1, kernel.max_rows):
        rows = torch.randn(count, shape[1], dtype=torch.bfloat16, device=DEVICE)
        ways = {
            "packed": lambda rows=rows: kernel.multiply(parts, rows, None),
            "unpacked": lambda rows=rows: rows @ packing.unpack(parts, scratch).T,
        }
        products = {way: compute().float() for way, compute in ways.items()}
        difference = ((products["packed"] - products["unpacked"]).norm() / products["unpacked"].norm()).item()
        ok &= difference <= 0.01
        times = {f"{way}_us": 1e6 * seconds(compute, repeats=20) for way, compute in ways.items()}
        table.append({"rows": count, **times})
        print_row({**table[-1], "difference": f"{difference:.0e}"})
    return ok, table


def small_part(_rows: list[int]) -> tuple[bool, Any]:
    """The host does not wait for work that is queued before a small copy; milliseconds until it goes on."""
    matrix = torch.randn(QUEUED_SHAPE, dtype=torch.bfloat16, device=DEVICE)
    numbers = list(range(64))
    on_device(numbers, DEVICE)  # the first takes locked memory
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        matrix @ matrix
    queued = time.perf_counter()
    found = on_device(numbers, DEVICE)
    copied = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    row = {"copy_ms": 1e3 * (copied - queued), "queued_work_ms": 1e3 * (done - start)}
    print_row(row)
    return found.tolist() == numbers and copied - queued < (done - start) / 4, row


def graphs_part(_rows: list[int]) -> tuple[bool, Any]:
    """A draft's passes that are recorded and replayed are those that are not; both in milliseconds a call."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=64, vocab_size=4096)  # fmt: skip
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    table, ok = [], True
    for count in (1, 32, 256):
        hidden, times = {}, {}
        for way in ("plain", "graph"):
            causal = CausalModel(model, device=DEVICE, cuda_graphs=way == "graph")
            text = causal.new_text()
            ids = torch.arange(1000 + count, device=DEVICE) % 4096
            causal.read_text(text, ids[:1000])

            def call(causal: CausalModel = causal, text: TextCache = text, ids: Tensor = ids[1000:]) -> Tensor:
                text.truncate()
                return causal.read([next_rows(text, ids)])[0]

            hidden[way], times[way] = call().float(), 1000 * seconds(call, repeats=20)
            causal.close()
        difference = ((hidden["graph"] - hidden["plain"]).norm() / hidden["plain"].norm()).item()
        ok &= difference <= 0.02
        table.append({"draft rows": count, "plain_ms": times["plain"], "graph_ms": times["graph"]})
        print_row({**table[-1], "difference": f"{difference:.0e}"})
    return ok, table


PARTS: dict[str, Callable[[list[int]], tuple[bool, Any]]] = {
    "attention": attention_part,
    "greedy": greedy_part,
    "graphs": graphs_part,
    "packed": packed_part,
    "small": small_part,
    "together": together_part,
    "tests": tests_part,
    "slow": slow_part,
    "streaming": streaming_part,
}


def run_parts(names: list[str], rows: list[int], report: dict[str, Any]) -> None:
    """Run these parts, each whatever became of the others; `report` gets what they found, and who failed."""
    report["failed"] = []
    for name in names:
        try:
            ok, report[name] = PARTS[name](rows)
        except Exception:  # a part that breaks is a finding
            ok, report[name] = False, traceback.format_exc()
            print(f"{name}: {report[name]}", flush=True)
        if not ok:
            report["failed"].append(name)


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 768])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing checked")
        return 0
    report: dict[str, Any] = {"machine": dataclasses.asdict(machine_facts(DEVICE))}
    print_row({name: report["machine"][name] for name in ("accelerator", "driver", "link")})
    try:
        run_parts(arguments.only, arguments.rows, report)
        print(f"failed: {', '.join(report['failed'])}" if report["failed"] else "all checks passed")
    finally:
        print(json.dumps(report))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
