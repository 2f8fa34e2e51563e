"""Texts of several adapters, and of none, in the same passes: beside texts that all have one adapter, and none.

    python -m scripts.make.inflate large --params 250M
    python -m scripts.bench.adapters large
    python -m scripts.bench.adapters large --link-gib-per-s 2 --rank 16 --texts 16

The adapters are random, of all linear layers, and written into a folder that goes with the end. Weights stream as over
a link of that speed; nothing stays resident. First each text of the mixed company is compared, token by token, with
itself alone. Then the three companies take turns --repeats times in one process; a ratio is the median of those within
one turn. Beside tokens/s it says the processor's seconds, which a busy machine changes less. Prints a table and one
JSON line.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.pair import ModelPair, open_pair
from scripts.situations import GIB, LAYERS, cut_texts, exit_with, held_out_halves, throttle_edgespec

SEED = 3
NAMES = ("one", "two", "three", "four")
LINEAR = re.compile(rf"{re.escape(LAYERS)}\.(\d+)\.\w+\.\w+_proj\.weight")
SIZE = 0.02  # of B's numbers, beside weights of that size


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """Texts that are under way together."""

    name: str
    choices: tuple[str | None, ...]  # of each text; None: no adapter


def parse_args() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--link-gib-per-s", type=float, default=2.0)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="new ones of each text")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def write_random_adapter(folder: Path, pair: ModelPair, rank: int, seed: int) -> Path:
    """Write an adapter of all linear layers in PEFT's format."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for entry in pair.target.checkpoint.tensors.values():
        found = LINEAR.fullmatch(entry.name)
        if found is None or int(found[1]) >= pair.target.config.num_hidden_layers:  # one behind them drafts
            continue
        rows, columns = entry.shape
        name = f"base_model.model.{entry.name.removesuffix('.weight')}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) * columns**-0.5
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * SIZE
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def options_of(number: int, choice: str | None, tokens: int) -> dict[str, Any]:
    """How one of the texts is made: drawn by a seed of its own, to its whole length."""
    adapters = [] if choice is None else [choice]
    return {"adapters": adapters, "max_new_tokens": tokens, "temperature": 0.8, "seed": number, "ignore_eos": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a company, from the first prompt to the last token."""

    tokens_per_s: float
    cpu_s_per_token: float
    texts: list[list[int]]


def run(engine: Engine, prompts: Sequence[str], company: Company, tokens: int) -> Measured:
    """Let the texts of a company be made together."""
    chosen = enumerate(zip(prompts, company.choices, strict=True))
    requests = [engine.request(prompt, **options_of(number, choice, tokens)) for number, (prompt, choice) in chosen]
    started, cpu_started = time.perf_counter(), time.process_time()
    found = dict(engine.generate_many(requests))
    took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    texts = []
    for number in range(len(requests)):
        result = found[number]
        if isinstance(result, Exception):
            raise result
        texts.append(list(result.token_ids))
    made = sum(map(len, texts))
    return Measured(tokens_per_s=made / took_s, cpu_s_per_token=cpu_s / made, texts=texts)


def main() -> int:
    """Compare, measure and print."""
    args = parse_args()
    pair = open_pair(args.model, Path("none"))
    cycle: tuple[str | None, ...] = (None, *NAMES)
    companies = [
        Company(name="none", choices=(None,) * args.texts),
        Company(name="one adapter", choices=(NAMES[0],) * args.texts),
        Company(name="four and none", choices=tuple(cycle[number % len(cycle)] for number in range(args.texts))),
    ]
    prompts = cut_texts(held_out_halves()[1], count=args.texts, tokens=args.prompt_tokens, seed=SEED)
    speeds: dict[str, list[float]] = {company.name: [] for company in companies}
    cpu: dict[str, list[float]] = {company.name: [] for company in companies}
    with tempfile.TemporaryDirectory() as room:
        folders = [write_random_adapter(Path(room) / name, pair, args.rank, seed) for seed, name in enumerate(NAMES)]
        adapter_bytes = (folders[0] / "adapter_model.safetensors").stat().st_size
        throttle_edgespec(args.link_gib_per_s * GIB)
        with Engine.from_pretrained(
            args.model, draft="none", tree=TreeSettings(policy="none"), parallel=args.texts, self_check=False,
            context_tokens=args.prompt_tokens + args.tokens + 8, adapters=[(folder, 0.0) for folder in folders],
            limits=MemoryLimits(max_resident_layers=0),
        ) as engine:  # fmt: skip
            mixed = companies[-1]
            together = run(engine, prompts, mixed, args.tokens).texts
            num_equal = 0
            for number, (prompt, choice) in enumerate(zip(prompts, mixed.choices, strict=True)):
                alone = engine.generate(prompt, **options_of(number, choice, args.tokens))
                num_equal += list(alone.token_ids) == together[number]
            print(f"{num_equal} of {args.texts} texts of four adapters and none are those that they are alone")
            for turn in range(args.repeats):
                for place in range(len(companies)):
                    company = companies[(turn + place) % len(companies)]
                    one = run(engine, prompts, company, args.tokens)
                    speeds[company.name].append(one.tokens_per_s)
                    cpu[company.name].append(one.cpu_s_per_token)
            pass_bytes = engine.placement.pass_bytes
    print(f"{pass_bytes / GIB:.2f} GiB a pass at {args.link_gib_per_s} GiB/s, an adapter {adapter_bytes / GIB:.3f} GiB")
    for name, found in speeds.items():
        times = f"{statistics.median(cpu[name]) * 1000:6.1f} ms of the processor a token"
        print(f"{name:15} {statistics.median(found):7.2f} tokens/s  ({min(found):.2f} to {max(found):.2f}), {times}")
    ratios = {}
    for name in speeds:
        if name != mixed.name:
            pairs = [one / other for one, other in zip(speeds[mixed.name], speeds[name], strict=True)]
            ratios[name] = statistics.median(pairs)
            of_cpu = [other / one for one, other in zip(cpu[mixed.name], cpu[name], strict=True)]
            by_cpu = f"by the processor's seconds {statistics.median(of_cpu):.2f}"
            print(f"{mixed.name} / {name}: {ratios[name]:.2f}  ({min(pairs):.2f} to {max(pairs):.2f}), {by_cpu}")
    record = {
        "companies": [asdict(one) for one in companies], "speeds": speeds, "cpu_s_per_token": cpu, "ratios": ratios,
        "equal": num_equal,
    }  # fmt: skip
    print(json.dumps(record))
    return 0 if num_equal == args.texts else 1


if __name__ == "__main__":
    exit_with(main)
