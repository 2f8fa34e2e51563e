"""A folder of pictures, one question each: edgespec with texts in company, beside transformers with accelerate.

    PYTHONPATH=ACCELERATE python -m scripts.bench.pictures
    python -m scripts.bench.pictures --pictures 64 --few-pictures 8 --link-gib-per-s 1

A random Qwen3-VL of about a billion weights in bf16, whose tower has a third of them, is written into a folder that
goes with the end. Nothing of it fits: layers and tower come from files in each pass of all systems, and every read
takes at least as long as over a link of that speed. accelerate keeps tower and layers on its disk, and reads a tensor
where its module runs; it is slow, and answers --few-pictures in batches of eight, and a quarter of them alone. edgespec
answers all pictures, --texts in company, plainly: a random model has no draft. Every system has a process of its own.
accelerate computes in bf16, as the weights are stored: for another format it would write its disk anew.

Of each, pictures a minute, and the seconds a picture for the tower, for prompts, and for the texts behind them, in
which edgespec's tower works on the next pictures as well; and the peak memory less an idle process's, of edgespec
beside its plan: with the tower block by block, and resident. Tower and layers share the link. Prints a table and one
JSON line; exits 1 where memory is above the plan by more than --tolerance of it.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, StoppingCriteria, StoppingCriteriaList

import offload.tower
from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.cli.generate.records import peak_resident_bytes
from edgespec.model.sight import Sight
from scripts.situations import (
    GIB,
    MIB,
    SharedLink,
    exit_with,
    idle_peak_bytes,
    start_child,
    throttle_edgespec,
    wait_for_link,
)
from tests.support.seeing_model import save_family
from tests.support.tiny_pictures import SEEING, Family, picture

KIND = "qwen3_vl"
QUESTION = "What is this?"
BATCH = 8
PATCH = 16
TEXT = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 24, "num_attention_heads": 10,
        "num_key_value_heads": 2, "head_dim": 128}  # fmt: skip
TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16, "out_hidden_size": 1280,
         "deepstack_visual_indexes": [5, 11, 17]}  # fmt: skip
AXES = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to answer."""

    kind: str  # edgespec | accelerate
    mode: str  # of edgespec: how its tower is there; of accelerate: texts of a batch

    @property
    def name(self) -> str:
        """As in the table."""
        return f"edgespec, tower {self.mode}" if self.kind == "edgespec" else f"accelerate, batch {self.mode}"


SYSTEMS = (
    System(kind="edgespec", mode="streamed"), System(kind="edgespec", mode="resident"),
    System(kind="accelerate", mode="1"), System(kind="accelerate", mode=str(BATCH)),
)  # fmt: skip


def parse_args() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--few-pictures", type=int, default=8, help="that accelerate has")
    parser.add_argument("--side", type=int, default=128, help="of a picture, in pixels")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="new ones of each text")
    parser.add_argument("--dtype", default="bfloat16", help="that edgespec computes in")
    parser.add_argument("--link-gib-per-s", type=float, default=1.0)
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--folder", type=Path, help="of the model, where it is there already")
    parser.add_argument("--child", type=lambda text: System(**json.loads(text)), help=argparse.SUPPRESS)
    return parser.parse_args()


def family_of(side: int) -> Family:
    """The tiny family, whose processor takes pictures of this size as they are."""
    family = SEEING[KIND]()
    family.processor.image_processor.size = {"shortest_edge": PATCH**2 * 4, "longest_edge": side**2}
    return family


def write_model(folder: Path, family: Family) -> int:
    """Write a random model of about a billion weights with the family's processor; their number."""
    config = family.model.config
    for part, sizes in ((config.text_config, {**TEXT, "rope_parameters": AXES}), (config.vision_config, TOWER)):
        for name, value in {**sizes, "initializer_range": 0.02}.items():
            setattr(part, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.generation_config = family.model.generation_config
    save_family(replace(family, model=model), folder, KIND)
    return sum(parameter.numel() for parameter in model.parameters())


def messages_of(side: int, number: int) -> list[dict[str, Any]]:
    """A picture of its own, and the question."""
    parts = [{"type": "image", "image": picture(number, side, side)}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def throttle_tower(link: SharedLink, bytes_per_s: float) -> None:
    """Every part of a tower that is read takes its time on the link of the layers."""
    put = offload.tower.Tower._put

    def slow_put(self: offload.tower.Tower, record: Any) -> None:
        started, before = time.perf_counter(), self.num_read_bytes
        put(self, record)
        if self.num_read_bytes > before:
            link.wait(self.num_read_bytes - before, started, bytes_per_s)

    offload.tower.Tower._put = slow_put  # type: ignore[method-assign]


def throttle_accelerate(bytes_per_s: float) -> None:
    """Every read of an offloaded tensor takes its time, its pages' way into memory included."""
    from accelerate.utils.offload import OffloadedWeightsLoader

    read = OffloadedWeightsLoader.__getitem__

    def slow_read(self: Any, key: str) -> torch.Tensor:
        started = time.perf_counter()
        tensor: torch.Tensor = read(self, key)
        if key not in self.state_dict:
            tensor = tensor.clone()  # mapped lazily
            wait_for_link(tensor.nbytes, started, bytes_per_s)
        return tensor

    OffloadedWeightsLoader.__getitem__ = slow_read


def run_edgespec(system: System, args: argparse.Namespace) -> dict[str, Any]:
    """Answer all pictures, and return seconds and facts."""
    link = SharedLink()
    throttle_edgespec(args.link_gib_per_s * GIB, wait=link.wait)
    throttle_tower(link, args.link_gib_per_s * GIB)
    tower_s = 0.0
    look = Sight.look

    def timed_look(self: Sight, *prompts: Any) -> None:
        nonlocal tower_s
        started = time.perf_counter()
        look(self, *prompts)
        tower_s += time.perf_counter() - started

    Sight.look = timed_look  # type: ignore[method-assign]
    with Engine.from_pretrained(
        args.folder, draft="none", tree=TreeSettings(policy="none"), device="cpu", dtype=args.dtype, self_check=False,
        parallel=args.texts, context_tokens=args.side**2 // (2 * PATCH) ** 2 + args.tokens + 64,
        limits=MemoryLimits(max_resident_layers=0),
    ) as engine:  # fmt: skip
        sight = engine._loaded.sight
        assert sight is not None
        sight._is_resident = system.mode == "resident"
        record = sight._record
        assert record is not None
        tower_bytes = record.num_bytes - record.streamed_bytes if sight._is_resident else 0
        started = time.perf_counter()
        requests = [
            engine.request(messages_of(args.side, number), max_new_tokens=args.tokens, temperature=0.0, ignore_eos=True)
            for number in range(args.pictures)
        ]
        decode_s = time.perf_counter() - started
        handles = [engine.submit(request) for request in requests]
        prompt_s = text_s = 0.0
        while not all(handle.is_done for handle in handles):
            begun, tower_before = time.perf_counter(), tower_s
            known = sum(bool(handle.added) for handle in handles)
            engine.advance()
            took = time.perf_counter() - begun - (tower_s - tower_before)
            reads = sum(bool(handle.added) for handle in handles) > known
            prompt_s, text_s = prompt_s + took * reads, text_s + took * (not reads)
        total_s = time.perf_counter() - started
        counts = {len(handle.whole().token_ids) for handle in handles}
        return {
            "pictures": args.pictures, "total_s": total_s, "tower_s": tower_s, "prompt_s": prompt_s, "text_s": text_s,
            "decode_s": decode_s, "tokens": sorted(counts), "tower_runs": sight.num_runs,
            "table": engine.placement.table(),
            "planned_bytes": engine.placement.planned_bytes + tower_bytes, "prompt_tokens": len(requests[0].ids),
        }  # fmt: skip


class _Clock(StoppingCriteria):
    """Notes when each token was there."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.ends.append(time.perf_counter())
        return False


def run_accelerate(system: System, args: argparse.Namespace) -> dict[str, Any]:
    """Answer some pictures, and return seconds."""
    throttle_accelerate(args.link_gib_per_s * GIB)
    size, decoder = int(system.mode), "model.language_model"
    places = {f"{decoder}.{part}": "cpu" for part in ("embed_tokens", "norm", "rotary_emb")}
    places |= {"lm_head": "cpu", "model.visual": "disk", f"{decoder}.layers": "disk"}
    family = family_of(args.side)
    family.processor.tokenizer.padding_side = "left"
    tokenizer = family.processor.tokenizer.from_pretrained(args.folder)
    with tempfile.TemporaryDirectory() as unused:
        model: Any = AutoModelForImageTextToText.from_pretrained(
            args.folder, dtype=torch.bfloat16, device_map=places, offload_folder=unused
        )
    visits: list[float] = []
    tower = model.model.visual.forward

    def timed_tower(*arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        found = tower(*arguments, **named)
        visits.append(time.perf_counter() - begun)
        return found

    model.model.visual.forward = timed_tower
    prompt_s = text_s = 0.0
    began = time.perf_counter()
    count = args.few_pictures if size > 1 else max(1, args.few_pictures // 4)
    for first in range(0, count, size):
        numbers = range(first, min(first + size, count))
        begun = time.perf_counter()
        asked = [messages_of(args.side, number) for number in numbers]
        texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in asked]
        images = [[one[0]["content"][0]["image"]] for one in asked]
        inputs = family.processor(text=texts, images=images, padding=True, return_tensors="pt")
        clock = _Clock()
        model.generate(
            **inputs, do_sample=False, max_new_tokens=args.tokens, stopping_criteria=StoppingCriteriaList([clock])
        )
        prompt_s += clock.ends[0] - begun - visits[-1]
        text_s += clock.ends[-1] - clock.ends[0]
    return {
        "pictures": count, "total_s": time.perf_counter() - began, "tower_s": sum(visits),
        "prompt_s": prompt_s, "text_s": text_s, "tokens": [args.tokens],
    }  # fmt: skip


def line_of(report: dict[str, Any], idle_bytes: int) -> str:
    """A system's line of the table."""
    each = [report[name] / report["pictures"] for name in ("tower_s", "prompt_s", "text_s")]
    line = f"{report['name']:25} {60 * report['pictures'] / report['total_s']:8.2f}  {report['pictures']:4}  "
    line += "  ".join(f"{seconds:7.2f}" for seconds in each)
    line += f"  {(report['peak_bytes'] - idle_bytes) / MIB:8.0f}"
    return line + (f" of {report['planned_bytes'] / MIB:.0f} planned" if "planned_bytes" in report else "")


def main() -> int:
    """Write the model, run all systems, and print."""
    args = parse_args()
    if args.child is not None:
        run = run_edgespec if args.child.kind == "edgespec" else run_accelerate
        print(json.dumps({**run(args.child, args), "peak_bytes": peak_resident_bytes()}))
        return 0
    with tempfile.TemporaryDirectory() as room:
        if args.folder is None:
            args.folder = Path(room) / "model"
            count = write_model(args.folder, family_of(args.side))
            print(f"{count / 1e9:.2f} G weights in bf16, over {args.link_gib_per_s} GiB/s", flush=True)
            sys.argv += ["--folder", str(args.folder)]
        idle_bytes = idle_peak_bytes()
        reports = []
        print("                         pictures/min   of   tower s prompt s  text s  MiB of memory")
        for system in SYSTEMS:
            report = {**asdict(system), "name": system.name, **start_child("scripts.bench.pictures", system)}
            reports.append(report)
            print(line_of(report, idle_bytes), flush=True)
    rates = {report["name"]: report["pictures"] / report["total_s"] for report in reports}
    best = max(rate for name, rate in rates.items() if name.startswith("accelerate"))
    for name in [name for name in rates if name.startswith("edgespec")]:
        print(f"{name}: {rates[name] / best:.2f} times accelerate's best")
    settings = {name: value for name, value in vars(args).items() if name not in ("folder", "child")}
    print(json.dumps({"settings": settings, "idle_bytes": idle_bytes, "reports": reports}))
    most = max(
        (report["peak_bytes"] - idle_bytes) / report["planned_bytes"] for report in reports if "planned_bytes" in report
    )
    return 0 if most <= 1 + args.tolerance else 1


if __name__ == "__main__":
    exit_with(main)
