"""Mixtures of experts from the disk: what a pass asks for and reads, and tokens a second, beside accelerate.

    python -m scripts.make.inflate_experts moe                    the built-in target as a mixture
    python -m scripts.bench.experts moe                      in all modes
    python -m scripts.bench.experts moe --modes cold --tree-sizes 3 15 63 --texts 1
    python -m scripts.make.inflate_experts random --random && python -m scripts.bench.experts random --tree-sizes 4

cold       no layer is resident, and the page cache is dropped between passes; experts that edgespec has read stay
limited    edgespec has --share of the checkpoint beside what else it needs; what it does not hold is read anew
uncached   the same with a place for one expert at a time
whole      the same with whole layers, experts among them, that stay or stream
throttled  cold, from a disk of --disk-gib-per-s: edgespec's reads wait, a pass of accelerate lasts as long as its reads
resident   all of it in memory

Greedy decoding; plain, with trees of fixed sizes, and of several texts at once. Each system has a process of its own,
in turn, and medians of --repeats are quoted. Numbers are of the passes behind the prompts' own; dropping the page cache
is not counted. "asked" are the distinct experts that the routers chose in a pass, and their bytes; "read" is what the
kernel says it read. "hits" are edgespec's own counts, of the prompts' passes too; "busy s" are the processor's own
seconds in a pass, which others on the machine do not change. Mapped pages come with what the kernel reads around them
(/sys/block/*/queue/read_ahead_kb). The last line is JSON.
"""

import argparse
import dataclasses
import json
import logging
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli.generate.records import peak_resident_bytes
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.placement.expert_load import mixture_sizes
from edgespec.placement.place import pair_weights
from edgespec.placement.run_config import resolve_run_config
from profiles.measure import drop_page_cache, read_sequentially
from scripts.bench.batch import generate_batch
from scripts.bench.expert_passes import Log, keep_one_expert, logged, slow_reads
from scripts.bench.offload import open_transformers
from scripts.situations import GIB, MIB, cut_texts, drop_behind_reader, held_out_halves, start_child

MODES = ("cold", "limited", "uncached", "whole", "throttled", "resident")
WITHIN_LIMIT = ("limited", "uncached", "whole")  # of memory, which accelerate has none of
SEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to decode."""

    kind: str  # edgespec | accelerate
    mode: str
    nodes: int = 0  # of each tree; 0 is plain decoding
    texts: int = 1

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.kind} {f'tree {self.nodes}' if self.nodes else 'plain'}"


def memory_limits(system: System, pair: ModelPair, arguments: argparse.Namespace) -> MemoryLimits:
    """What edgespec may use."""
    if system.mode == "resident":
        return MemoryLimits()
    if system.mode in WITHIN_LIMIT:
        layer_bytes = sum(entry.num_bytes for entry in pair.target.checkpoint.tensors.values())
        return MemoryLimits(max_cpu_bytes=int(arguments.share * layer_bytes) + arguments.beside_mib * MIB)
    return MemoryLimits(max_resident_layers=0)


def run_edgespec(system: System, pair: ModelPair, prompts: list[list[int]], arguments: argparse.Namespace) -> Any:
    """Decode all prompts at once; the number of tokens, the log, and what edgespec counted."""
    longest = max(map(len, prompts))
    is_cold = system.mode != "resident"
    if is_cold:
        drop_behind_reader(pair)
    if system.mode == "uncached":
        keep_one_expert()
    if system.mode == "throttled":
        slow_reads(arguments.disk_gib_per_s * GIB)
    log = Log(arguments.files if is_cold else [])
    with Engine.from_pair(
        pair,
        tree=TreeSettings(size=system.nodes) if system.nodes else TreeSettings(policy="none"),
        limits=memory_limits(system, pair, arguments),
        device="cpu",
        dtype=arguments.dtype,
        experts="stream" if system.mode == "whole" else "auto",
        context_tokens=longest + arguments.new_tokens,
        prompt_tokens=longest,
        parallel=system.texts,
    ) as engine:
        log.count_experts(engine.target_model.model)
        requests = [
            engine.request(
                ids, max_new_tokens=arguments.new_tokens, sampling=SamplingSettings(), seed=SEED, name=str(number)
            )
            for number, ids in enumerate(prompts)
        ]  # fmt: skip
        with logged(engine.target_model, log):
            found = [text for _, text in engine.generate_many(requests)]
        counts = expert_counts(engine)
    return [len(text.token_ids) for text in found if not isinstance(text, Exception)], log, counts


def expert_counts(engine: Engine) -> dict[str, float]:
    """What the engine counted of its experts: `asked` and `hits`; nothing where it moves whole layers."""
    counts = engine.expert_counts
    return {"hit_share": counts.hits / counts.asked} if counts.asked else {}


def run_accelerate(system: System, pair: ModelPair, prompts: list[list[int]], arguments: argparse.Namespace) -> Any:
    """Decode all prompts as one batch; the number of tokens, and the log."""
    arguments.max_new_tokens, arguments.temp = arguments.new_tokens, 0.0
    stop = sorted(pair.stop_tokens)
    model = open_transformers(pair.target.folder, arguments, stop=stop, on_disk=system.mode != "resident")
    log = Log(
        [] if system.mode == "resident" else arguments.files,
        least_bytes_per_s=arguments.disk_gib_per_s * GIB if system.mode == "throttled" else 0.0,
    )
    log.count_experts(model)
    forward = model.forward

    def noted(*given: Any, **named: Any) -> Any:
        return log.run(int(named["input_ids"].numel()), lambda: forward(*given, **named))

    model.forward = noted
    return [len(row) for row in generate_batch(model, prompts, stop)], log, {}


def run_child(system: System, arguments: argparse.Namespace) -> None:
    """In a fresh process: decode, and print what was measured as JSON."""
    torch.set_num_threads(arguments.threads)
    pair = open_pair(arguments.model, DEMO_FOLDER / "draft")
    texts = cut_texts(held_out_halves()[1], count=system.texts, tokens=arguments.prompt_tokens, seed=SEED)
    prompts = [pair.tokenizer.encode(text) for text in texts]
    run = run_edgespec if system.kind == "edgespec" else run_accelerate
    counts, log, own = run(system, pair, prompts, arguments)
    passes = len(log.rows) - 1
    seconds = log.ended - log.began - log.dropped_s
    print(json.dumps({
        "tokens_per_s": (sum(counts) - len(counts)) / seconds,
        "tokens_per_pass": (sum(counts) - len(counts)) / passes,
        "rows": statistics.mean(log.rows[1:]),
        "pass_s": statistics.median(log.seconds[1:]),
        "processor_s": statistics.median(log.processor_s[1:]),
        "distinct": statistics.mean(log.distinct[1:]),
        "read_bytes": (log.ended_bytes - log.began_bytes) / passes,
        "peak_bytes": peak_resident_bytes(),
        **own,
    }))  # fmt: skip


def list_systems(arguments: argparse.Namespace) -> list[System]:
    """All that a repeat measures: trees of one text, plain decoding of one and more, accelerate beside it."""
    systems = []
    for mode in arguments.modes:
        systems += [System(kind="edgespec", mode=mode, texts=texts) for texts in arguments.texts]
        systems += [System(kind="edgespec", mode=mode, nodes=nodes) for nodes in arguments.tree_sizes]
        if mode not in WITHIN_LIMIT:
            systems += [System(kind="accelerate", mode=mode, texts=texts) for texts in arguments.batches]
    return systems


def print_table(rows: list[dict[str, Any]], expert_bytes: float) -> None:
    """One line a system; experts and bytes are those of a pass."""
    print(f"{'mode':10}{'system':18}{'texts':>6}{'rows':>7}{'asked':>8}{'asked GiB':>10}{'read GiB':>9}{'hits':>6}"
          f"{'s/pass':>8}{'busy s':>8}{'tok/pass':>9}{'tok/s':>8}"
          f"{'peak MiB':>9}")  # fmt: skip
    for row in rows:
        hits = f"{row['hit_share']:.0%}" if "hit_share" in row else "-"
        print(f"{row['mode']:10}{row['name']:18}{row['texts']:6}{row['rows']:7.1f}{row['distinct']:8.1f}"
              f"{row['distinct'] * expert_bytes / GIB:10.3f}{row['read_bytes'] / GIB:9.3f}{hits:>6}"
              f"{row['pass_s']:8.3f}{row['processor_s']:8.3f}{row['tokens_per_pass']:9.2f}{row['tokens_per_s']:8.2f}"
              f"{row['peak_bytes'] / MIB:9.0f}")  # fmt: skip


def main() -> None:
    """All systems in turn, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a mixture of scripts.make.inflate_experts")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--tree-sizes", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--texts", type=int, nargs="*", default=[1, 4, 8, 16], help="without trees")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8], help="of accelerate")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", "-n", type=int, default=24)
    parser.add_argument("--share", type=float, default=0.3, help="of the checkpoint, that limited edgespec may hold")
    parser.add_argument("--beside-mib", type=int, default=330, help="for libraries, draft and caches, when limited")
    parser.add_argument("--disk-gib-per-s", type=float, default=0.5, help="when throttled")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of every layer on disk
    pair = open_pair(arguments.model, DEMO_FOLDER / "draft")
    arguments.files = pair.target.checkpoint.files
    if arguments.child:
        run_child(System(**json.loads(arguments.child)), arguments)
        return
    systems = list_systems(arguments)
    reports: dict[System, list[dict[str, Any]]] = {system: [] for system in systems}
    read_rates = []
    for _ in range(arguments.repeats):
        for system in systems:
            drop_page_cache(arguments.files)
            read_rates.append(read_sequentially(arguments.files).bytes_per_s)  # and fills the cache
            if system.mode != "resident":
                drop_page_cache(arguments.files)  # what a process maps while it loads, no later drop can take
            reports[system].append(start_child("scripts.bench.experts", system))
            print(f"{system.mode} {system.name}, {system.texts} texts: "
                  f"{reports[system][-1]['tokens_per_s']:.2f} tokens/s", file=sys.stderr)  # fmt: skip
    rows: list[dict[str, Any]] = []
    for system, found in reports.items():
        medians = {key: statistics.median(report[key] for report in found) for key in found[0]}
        rows.append({**dataclasses.asdict(system), "name": system.name, **medians})
    run_config = resolve_run_config(pair.target, None, device="cpu", dtype=arguments.dtype)
    sizes = mixture_sizes(pair_weights(pair.target, None, run_config).target, torch.device("cpu"))
    if sizes is None:
        raise SystemExit(f"'{pair.target.folder}' is no mixture of experts")
    experts = sizes.experts
    print(f"{experts.chosen} of {experts.num_experts} experts of {experts.expert_bytes / MIB:.2f} MiB in "
          f"{experts.num_layers} layers; cold sequential reads of {max(read_rates) / GIB:.2f} GiB/s")  # fmt: skip
    print_table(rows, experts.expert_bytes)
    print(json.dumps({"disk_gib_per_s": max(read_rates) / GIB, "rows": rows}))


if __name__ == "__main__":
    main()
