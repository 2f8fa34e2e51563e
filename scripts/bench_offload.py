"""Decode a checkpoint from the disk: edgespec against transformers with accelerate, alternating.

    python scripts/inflate.py large --params 1B
    python scripts/bench_offload.py large                       warm and cold, bf16
    python scripts/bench_offload.py large --link-gib-per-s 0.5  a slower link, simulated

Cold: the page cache is dropped before every forward of the target, in all systems alike, as if the model
did not fit memory; edgespec then streams every layer (-ngl 0). Warm: the files are cached, and edgespec
keeps what fits. Each system has a fresh process; repeats alternate (A B C A B C) and medians are quoted.
A pass is a forward of the target behind the prompt's, with all that lies between two of them: drafting,
sampling, dropping the cache. Peak memory is that of the process less an idle one's. "From disk" is what
the kernel says it read, and shows that cold passes were cold. Nothing is tuned but tree and draft sizes.
A simulated link makes every read of streamed weights take at least bytes / rate, in all systems alike.
The last line is JSON. Exits 1 when greedy float32 tokens differ between systems.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate.utils.offload
import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

import offload.loaders
from edgespec import EdgespecError, Engine, MemoryLimits, SamplingSettings, TreeSettings, __version__
from edgespec.cli.prompts import read_prompts
from edgespec.cli.records import peak_resident_bytes
from edgespec.config import parse_size
from edgespec.device import DTYPES
from edgespec.pair import DEMO_FOLDER, ModelPair, open_pair
from profiles.measure import drop_page_cache, machine_facts, sequential_read_bytes_per_s

MIB = 1 << 20
GIB = 1 << 30
FITS_SHARE = 0.7  # of the free memory, that a resident model may take
SEED = 0
LAYERS = "model.layers"
OUTSIDE = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to decode."""

    kind: str  # edgespec | accelerate | resident | idle
    size: int = 0  # nodes of a tree, or tokens of an assistant; 0 is plain decoding
    mode: str = "warm"  # warm | cold

    @property
    def name(self) -> str:
        """As in the table."""
        how = "plain" if self.size == 0 else f"tree {self.size}" if self.kind == "edgespec" else f"assisted {self.size}"
        return f"{'transformers' if self.kind == 'resident' else self.kind} {how}"


@dataclass(slots=True)
class PassLog:
    """When the passes of one text ended and what they gave; makes every next one cold where it should."""

    cold_files: Sequence[Path]  # empty when warm
    tokens: list[list[int]] = field(default_factory=list)  # of each pass; the prompt's is the first
    seconds: list[float] = field(default_factory=list)
    drop_s: list[float] = field(default_factory=list)
    disk_bytes: list[int] = field(default_factory=list)  # read from the disk up to the end of each pass
    mark: float = 0.0

    def begin(self) -> None:
        """Just before the prompt's pass."""
        self._drop()
        self.mark = time.perf_counter()

    def add(self, tokens: list[int]) -> None:
        """A pass has ended."""
        now = time.perf_counter()
        self.seconds.append(now - self.mark)
        self.mark = now
        self.tokens.append(tokens)
        self.disk_bytes.append(disk_read_bytes())
        self._drop()  # in the next pass's time: a system short of memory would have to free pages too
        self.drop_s.append(time.perf_counter() - now)

    def _drop(self) -> None:
        if self.cold_files and not drop_page_cache(self.cold_files):
            raise SystemExit("this system cannot drop its page cache: use --modes warm")


class PassStreamer(BaseStreamer):
    """Hands transformers' passes to a log: `put` is called with the prompt, then after every pass."""

    def __init__(self, log: PassLog) -> None:
        self._log = log
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Tokens of one pass."""
        if self._seen_prompt:
            self._log.add(value.flatten().tolist())
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


def disk_read_bytes() -> int:
    """What the kernel has read from storage for this process; 0 where it does not tell."""
    counters = getattr(psutil.Process(), "io_counters", None)
    return int(counters().read_bytes) if counters else 0


def wait_for_link(num_bytes: int, started: float, bytes_per_s: float) -> None:
    """Return when a link of that speed would have moved the bytes."""
    time.sleep(max(0.0, started + num_bytes / bytes_per_s - time.perf_counter()))


def throttle_edgespec(bytes_per_s: float) -> None:
    """Every load of a streamed layer takes its time, on the reader's thread."""
    load = offload.loaders.CpuLoader.load

    def slow_load(self: offload.loaders.CpuLoader, record: Any, slot: int) -> None:
        started = time.perf_counter()
        load(self, record, slot)
        wait_for_link(record.stored_bytes, started, bytes_per_s)

    offload.loaders.CpuLoader.load = slow_load  # type: ignore[method-assign]


def throttle_accelerate(bytes_per_s: float, stored_bytes: dict[str, int]) -> None:
    """Every read of an offloaded tensor takes its time, its pages' way into memory included."""
    loader = accelerate.utils.offload.OffloadedWeightsLoader
    read = loader.__getitem__

    def slow_read(self: Any, key: str) -> torch.Tensor:
        started = time.perf_counter()
        tensor: torch.Tensor = read(self, key)
        if key not in self.state_dict:
            tensor.flatten()[:: 4096 // tensor.element_size()].max()  # mapped lazily: touch every page now
            wait_for_link(stored_bytes[key], started, bytes_per_s)
        return tensor

    loader.__getitem__ = slow_read


def run_edgespec(system: System, pair: ModelPair, prompts: list[list[int]], arguments: argparse.Namespace) -> Any:
    """Decode all prompts; logs and facts of the plan."""
    resident = arguments.gpu_layers if arguments.gpu_layers is not None else 0 if system.mode == "cold" else None
    longest = max(map(len, prompts))
    logs = []
    with Engine(
        pair,
        tree=TreeSettings(size=system.size) if system.size else TreeSettings(policy="none"),
        limits=MemoryLimits(max_cpu_bytes=arguments.max_cpu_mem, max_resident_layers=resident),
        device="cpu",
        dtype=arguments.dtype,
        context_tokens=longest + arguments.max_new_tokens,
        prompt_tokens=longest,
    ) as engine:
        for prompt in prompts:
            logs.append(PassLog(arguments.files if system.mode == "cold" else ()))
            logs[-1].begin()
            for chunk in engine.stream(
                prompt,
                max_new_tokens=arguments.max_new_tokens,
                sampling=SamplingSettings(temperature=arguments.temp),
                seed=SEED,
            ):
                logs[-1].add(list(chunk.step.tokens))
        streamed_layers = engine.placement.num_layers - engine.placement.num_resident
        return logs, {"bytes_per_pass": engine.placement.streamed_bytes, "streamed_layers": streamed_layers}


def open_transformers(folder: Path, arguments: argparse.Namespace, *, stop: list[int], on_disk: bool) -> PreTrainedModel:
    """A model of transformers: whole, or with its decoder layers left in their files by accelerate."""
    device_map = {**dict.fromkeys(OUTSIDE, "cpu"), LAYERS: "disk"} if on_disk else None
    with tempfile.TemporaryDirectory() as unused:  # asked for, though safetensors are read where they are
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[arguments.dtype], device_map=device_map, offload_folder=unused
        )
    sampling = {"temperature": arguments.temp, "top_k": 0} if arguments.temp > 0 else {}
    model.generation_config = GenerationConfig(
        do_sample=arguments.temp > 0,
        max_new_tokens=arguments.max_new_tokens,
        eos_token_id=stop,
        pad_token_id=stop[0],
        **sampling,
    )
    return model


def run_transformers(system: System, pair: ModelPair, prompts: list[list[int]], arguments: argparse.Namespace) -> Any:
    """Decode all prompts with `generate`; logs and what a pass reads."""
    on_disk = system.kind == "accelerate"
    stop = sorted(pair.stop_tokens)
    model = open_transformers(pair.target.folder, arguments, stop=stop, on_disk=on_disk)
    assistant = None
    if system.size:
        assert pair.draft is not None
        assistant = open_transformers(pair.draft.folder, arguments, stop=stop, on_disk=False)
        assistant.generation_config.num_assistant_tokens = system.size
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = arguments.assistant_confidence
    torch.manual_seed(SEED)
    logs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        logs.append(PassLog(arguments.files if system.mode == "cold" else ()))
        logs[-1].begin()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, streamer=PassStreamer(logs[-1])
        )
    stored = {name: entry.num_bytes for name, entry in pair.target.checkpoint.tensors.items()}
    streamed_bytes = sum(size for name, size in stored.items() if name.startswith(f"{LAYERS}.")) if on_disk else 0
    return logs, {"bytes_per_pass": streamed_bytes, "streamed_layers": pair.target.config.num_hidden_layers * on_disk}


def run_child(system: System, arguments: argparse.Namespace) -> None:
    """In a fresh process: decode, and print what was measured as JSON."""
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {}
    if system.kind != "idle":
        pair = open_pair(arguments.model, arguments.draft_model)
        if arguments.link_gib_per_s:
            stored = {name: entry.num_bytes for name, entry in pair.target.checkpoint.tensors.items()}
            throttle_edgespec(arguments.link_gib_per_s * GIB)
            throttle_accelerate(arguments.link_gib_per_s * GIB, stored)
        rows = read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)[: arguments.prompts]
        prompts = [pair.tokenizer.encode(row.prompt) for row in rows]
        run = run_edgespec if system.kind == "edgespec" else run_transformers
        logs, report = run(system, pair, prompts, arguments)
        pass_s = [seconds for log in logs for seconds in log.seconds[1:]]
        counts = [len(tokens) for log in logs for tokens in log.tokens[1:]]
        report |= {
            "tokens": [[token for tokens in log.tokens for token in tokens] for log in logs],
            "pass_s": pass_s,
            "drop_s": statistics.median(seconds for log in logs for seconds in log.drop_s),
            "tokens_per_pass": sum(counts) / len(counts),
            "tokens_per_s": sum(counts) / sum(pass_s),
            "disk_bytes_per_pass": sum(log.disk_bytes[-1] - log.disk_bytes[0] for log in logs) / len(counts),
        }
    print(json.dumps({**report, "peak_bytes": peak_resident_bytes()}))


def start_child(system: System) -> dict[str, Any]:
    """Run one system in its own process, with this one's options."""
    spec = json.dumps(dataclasses.asdict(system))
    command = [sys.executable, *sys.argv, "--child", spec]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if child.returncode:
        raise SystemExit(f"{system.name} ({system.mode}) failed; its message is above")
    report: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return report
