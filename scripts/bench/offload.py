"""Decode a checkpoint from the disk: edgespec against transformers with accelerate, alternating.

    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.offload large                       warm and cold, bf16
    python -m scripts.bench.offload large --link-gib-per-s 0.5  a slower link, simulated

Cold: the page cache is dropped before every forward of the target, in all systems alike, as if the model
did not fit memory; edgespec then streams every layer (-ngl 0). Its reader is ahead of the forward, so its
layers are dropped behind the reader too: nothing that was read for one pass serves the next. Warm: the
files are cached, and edgespec keeps what fits. Each system has a fresh process; repeats alternate (A B C
A B C) and medians are quoted. A pass is a forward of the target behind the prompt's, with the drafting and
sampling that belong to it; dropping the cache is not counted. Peak memory is that of the process less an
idle one's. "From disk" is what the kernel says it read, and shows that cold passes were cold.
Sequential reads of the same files, cold, come before every system; their rates can be of two kinds, by the
memory that the system finds for the pages, so that the fastest is quoted beside the median.
A simulated link makes every read of streamed weights take at least bytes / rate, in all systems alike.
The last line is JSON. Exits 1 when greedy float32 tokens differ between systems.
"""

import argparse
import dataclasses
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate.utils.offload
import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings, __version__
from edgespec.cli.generate.records import peak_resident_bytes
from edgespec.cli.prompts.read import read_prompts
from edgespec.config import parse_size
from edgespec.machine.device import DTYPES
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from profiles.measure import drop_page_cache, machine_facts, read_sequentially
from scripts.situations import (
    GIB,
    LAYERS,
    MIB,
    disk_read_bytes,
    drop_behind_reader,
    exit_with,
    idle_peak_bytes,
    start_child,
    throttle_edgespec,
    wait_for_link,
)

FITS_SHARE = 0.7  # of the free memory, that a resident model may take
SEED = 0
OUTSIDE = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to decode."""

    kind: str  # edgespec | accelerate | resident
    size: int = 0  # nodes of a tree, or tokens of an assistant; 0 is plain decoding
    mode: str = "warm"  # warm | cold

    @property
    def name(self) -> str:
        """As in the table."""
        if self.kind == "resident":
            return "transformers resident"
        speculative = f"tree {self.size}" if self.kind == "edgespec" else f"assisted {self.size}"
        return f"{self.kind} {speculative if self.size else 'plain'}"


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
        self.tokens.append(tokens)
        self.disk_bytes.append(disk_read_bytes())
        self._drop()
        self.mark = time.perf_counter()
        self.drop_s.append(self.mark - now)

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


def slow_down(pair: ModelPair, mode: str, link_gib_per_s: float | None) -> None:
    """Let reads be cold, and let them take the time of a link, if any, in both systems."""
    if mode == "cold":
        drop_behind_reader(pair)
    if link_gib_per_s:
        stored = {name: entry.num_bytes for name, entry in pair.target.checkpoint.tensors.items()}
        throttle_edgespec(link_gib_per_s * GIB)
        throttle_accelerate(link_gib_per_s * GIB, stored)


def run_edgespec(system: System, pair: ModelPair, prompts: list[list[int]], arguments: argparse.Namespace) -> Any:
    """Decode all prompts; logs and facts of the plan."""
    resident = arguments.gpu_layers if arguments.gpu_layers is not None else 0 if system.mode == "cold" else None
    longest = max(map(len, prompts))
    logs = []
    with Engine.from_pair(
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


def open_transformers(folder: Path, arguments: argparse.Namespace, *, stop: list[int], on_disk: bool) -> Any:
    """A model of transformers: whole, or with its decoder layers left in their files by accelerate."""
    device_map = {**dict.fromkeys(OUTSIDE, "cpu"), LAYERS: "disk"} if on_disk else None
    with tempfile.TemporaryDirectory() as unused:  # asked for, though safetensors are read where they are
        model = AutoModelForCausalLM.from_pretrained(
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
    pair = open_pair(arguments.model, arguments.draft_model)
    slow_down(pair, system.mode, arguments.link_gib_per_s)
    rows = read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False)[: arguments.prompts]
    prompts = [pair.tokenizer.encode(row.prompt) for row in rows]
    run = run_edgespec if system.kind == "edgespec" else run_transformers
    logs, report = run(system, pair, prompts, arguments)
    pass_s = [seconds for log in logs for seconds in log.seconds[1:]]
    counts = [len(tokens) for log in logs for tokens in log.tokens[1:]]
    print(json.dumps({
        **report,
        "tokens": [[token for tokens in log.tokens for token in tokens] for log in logs],
        "pass_s": pass_s,
        "drop_s": statistics.median(seconds for log in logs for seconds in log.drop_s),
        "tokens_per_pass": sum(counts) / len(counts),
        "tokens_per_s": sum(counts) / sum(pass_s),
        "disk_bytes_per_pass": sum(log.disk_bytes[-1] - log.disk_bytes[0] for log in logs) / len(counts),
        "peak_bytes": peak_resident_bytes(),
    }))  # fmt: skip


def list_systems(arguments: argparse.Namespace, *, fits: bool) -> list[System]:
    """Everything that one repeat measures, in order."""
    systems = []
    for mode in arguments.modes:
        systems += [System(kind="edgespec", size=size, mode=mode) for size in (0, *arguments.tree_sizes)]
        systems += [System(kind="accelerate", size=size, mode=mode) for size in (0, *arguments.assistant_tokens)]
        if mode == "warm" and fits:
            systems.append(System(kind="resident", mode=mode))
    return systems


def summarise(system: System, reports: list[dict[str, Any]], idle_bytes: int) -> dict[str, Any]:
    """Medians over repeats; of a pass's seconds, over all passes."""
    pass_s = statistics.median(seconds for report in reports for seconds in report["pass_s"])
    return {
        **dataclasses.asdict(system),
        "name": system.name,
        "pass_s": pass_s,
        "drop_s": statistics.median(report["drop_s"] for report in reports),
        "bytes_per_pass": reports[0]["bytes_per_pass"],
        "disk_bytes_per_pass": statistics.median(report["disk_bytes_per_pass"] for report in reports),
        "streamed_layers": reports[0]["streamed_layers"],
        "gib_per_s": reports[0]["bytes_per_pass"] / GIB / pass_s,
        "tokens_per_pass": statistics.median(report["tokens_per_pass"] for report in reports),
        "tokens_per_s": statistics.median(report["tokens_per_s"] for report in reports),
        "tokens_per_s_of_repeats": [report["tokens_per_s"] for report in reports],
        "peak_above_idle_bytes": max(report["peak_bytes"] for report in reports) - idle_bytes,
        "tokens": reports[0]["tokens"],
    }


def compare(rows: list[dict[str, Any]], sequential: dict[str, float]) -> dict[str, float]:
    """The ratios that decide: of decoded tokens a second, and of the disk's speed."""

    def best(kind: str, mode: str, *, plain: bool) -> dict[str, Any] | None:
        found = [r for r in rows if r["kind"] == kind and r["mode"] == mode and (r["size"] == 0) == plain]
        return max(found, key=lambda row: row["tokens_per_s"], default=None)

    ratios: dict[str, float] = {}
    cold = best("edgespec", "cold", plain=True)
    if cold is not None and cold["bytes_per_pass"]:
        ratios |= {
            f"cold_plain_over_{name}_sequential_read": cold["gib_per_s"] / sequential[name] for name in sequential
        }
    for mode in ("cold", "warm"):
        ours = {"plain": best("edgespec", mode, plain=True), "tree": best("edgespec", mode, plain=False)}
        theirs = {
            "accelerate_plain": best("accelerate", mode, plain=True),
            "accelerate_assisted": best("accelerate", mode, plain=False),
            "resident": best("resident", mode, plain=True),
        }
        for name, row in ours.items():
            for other_name, other in theirs.items():
                if row is not None and other is not None:
                    ratios[f"{mode}_{name}_over_{other_name}"] = row["tokens_per_s"] / other["tokens_per_s"]
    return ratios


def print_table(rows: list[dict[str, Any]], link: str) -> None:
    """One line a system and mode; GiB are of streamed weights."""
    titles = ("s/pass", "GiB/pass", "from disk", "GiB/s", "tok/pass", "tok/s", "peak MiB")
    print(f"{'system':<24}{'mode':<6}" + "".join(f"{title:>10}" for title in titles))
    for row in rows:
        values = (
            f"{row['pass_s']:.3f}",
            f"{row['bytes_per_pass'] / GIB:.2f}",
            f"{row['disk_bytes_per_pass'] / GIB:.2f}",
            f"{row['gib_per_s']:.2f}",
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_s']:.2f}",
            f"{row['peak_above_idle_bytes'] / MIB:.0f}",
        )
        print(f"{row['name']:<24}{row['mode']:<6}" + "".join(f"{value:>10}" for value in values) + link)


def parse_arguments() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder whose decoder is model.layers, as Llama's and Qwen's are")
    parser.add_argument("-md", "--draft-model", type=Path, default=DEMO_FOLDER / "draft")
    parser.add_argument("--modes", nargs="+", default=["warm", "cold"], choices=["warm", "cold"])
    parser.add_argument("--tree-sizes", type=int, nargs="*", default=[16, 64, 256])
    parser.add_argument("--assistant-tokens", type=int, nargs="*", default=[5, 10])
    parser.add_argument(
        "--assistant-confidence", type=float, default=0.0, help="below it transformers' draft stops early; 0 is off"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--max-cpu-mem", type=parse_size, help="edgespec's limit")
    parser.add_argument("-ngl", "--gpu-layers", type=int, help="resident layers; unset 0 if cold, all that fit if warm")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=2, help="how many of the built-in sample prompts")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--link-gib-per-s", type=float, help="simulate a link of this speed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.max_new_tokens < 2 or arguments.prompts < 1 or arguments.repeats < 1:
        parser.error("-n must be 2 or more, --prompts and --repeats 1 or more")
    return arguments


def main() -> int:
    """Alternate between all systems, then print what came out."""
    arguments = parse_arguments()
    pair = open_pair(arguments.model, arguments.draft_model)
    entries = pair.target.checkpoint.tensors.values()
    arguments.files = pair.target.checkpoint.files
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of every layer on disk
    if arguments.child:
        run_child(System(**json.loads(arguments.child)), arguments)
        return 0

    itemsize = DTYPES[arguments.dtype].itemsize
    resident_bytes = sum(entry.num_bytes // entry.dtype.itemsize * itemsize for entry in entries)
    systems = list_systems(arguments, fits=resident_bytes < FITS_SHARE * psutil.virtual_memory().available)
    idle_bytes = idle_peak_bytes()
    reports: dict[System, list[dict[str, Any]]] = {system: [] for system in systems}
    read_rates = []
    for repeat in range(arguments.repeats):
        for system in systems:
            print(f"repeat {repeat + 1} of {arguments.repeats}: {system.name}, {system.mode}", file=sys.stderr)
            drop_page_cache(arguments.files)
            read_rates.append(read_sequentially(arguments.files).bytes_per_s)  # and fills the cache
            if system.mode == "cold":
                drop_page_cache(arguments.files)  # what a process maps while it loads, no later drop can take
            reports[system].append(start_child("scripts.bench.offload", system))

    rows = [summarise(system, found, idle_bytes) for system, found in reports.items()]
    rates = {"median": statistics.median(read_rates) / GIB, "fastest": max(read_rates) / GIB}
    ratios = compare(rows, rates)
    equal = all(row["tokens"] == rows[0]["tokens"] for row in rows)
    link = f"   simulated link of {arguments.link_gib_per_s} GiB/s" if arguments.link_gib_per_s else ""
    size_bytes = sum(path.stat().st_size for path in arguments.files)
    texts = f"{arguments.prompts} prompts, {arguments.max_new_tokens} new tokens each"
    print(f"{size_bytes / GIB:.2f} GiB, computed in {arguments.dtype}; {texts}")
    reads = ", ".join(f"{name} {rate:.2f} GiB/s" for name, rate in rates.items())
    print(f"cold sequential reads: {reads}; an idle process: {idle_bytes / MIB:.0f} MiB")
    print_table(rows, link)
    for name, ratio in ratios.items():
        print(f"{name.replace('_', ' '):<48}{ratio:6.2f}{link}")
    print(f"tokens of all systems {'equal' if equal else 'DIFFER'}")
    report = {
        "rows": rows,
        "ratios": ratios,
        "equal": equal,
        "sequential_gib_per_s": rates,
        "sequential_gib_per_s_of_repeats": [rate / GIB for rate in read_rates],
        "simulated_link_gib_per_s": arguments.link_gib_per_s,
        "checkpoint_bytes": size_bytes,
        "idle_bytes": idle_bytes,
        "options": {key: value for key, value in vars(arguments).items() if key not in {"files", "child"}},
        "seed": SEED,
        "edgespec": __version__,
        "machine": dataclasses.asdict(machine_facts()),
    }
    print(json.dumps(report, default=str))
    return int(not equal and arguments.dtype == "float32" and arguments.temp == 0)


if __name__ == "__main__":
    exit_with(main)
