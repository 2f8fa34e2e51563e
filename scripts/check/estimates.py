"""How far is `edgespec estimate --hardware` from what others published?

    python -m scripts.check.estimates

Each row is a published run: its card, models and tree, and the tokens a pass where they were published; compared
are seconds a token. One set of assumptions (profiles/builtin/assumptions.toml) serves all rows. Models are bare
configs. Prints a table, what had to be assumed, what is left out, and one JSON line; exits 1 when a row is off
by more than --limit and nothing here says why.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.config import MemoryLimits
from edgespec.estimate.speed import PairOnHardware, load_there, memory_there, open_hardware, place_on, rates_of
from edgespec.pair.folder import open_architecture
from edgespec.placement.place import pair_weights
from edgespec.placement.run_config import RunConfig
from edgespec.placement.step_seconds import PairLoad, StepSeconds, step_seconds
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement
from tests.support.published_configs import MODELS

HOST_BYTES = 192 << 30  # the 16-bit models were run from RAM, and with all of the card
CASES = ("slow", "likely", "fast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One run as its authors report it."""

    source: str
    hardware: str
    target: str
    draft: str | None = None
    quant: str | None = None
    draft_quant: str | None = None
    nodes: int = 0  # below the root; 0 is plain decoding
    depth: int = 0
    tokens: float = 1.0  # a pass
    token_s: tuple[float, float]  # seconds a token: the range that was reported
    context_tokens: int = 256
    host_bytes: int = HOST_BYTES
    max_resident: int | None = None  # layers that were kept on the card, where the configuration says so
    assumed: str = ""  # what the authors do not say
    why: str = ""  # the ratio is what it is


DEPTH = "depth: twice the tokens a pass, the share that SpecExec's README shows at 128 to 512 nodes"
DYSPEC = "DySpec, table 4"
SEQUOIA = "Sequoia"
RATE = "tokens a pass: 9.2, about what DySpec's table 4 measured for Sequoia and this pair (8.80 to 9.81)"
UMBRELLA = "UMbreLLa, README 1.1"
NO_RATE = "tokens a pass: 9.6, Sequoia's for Llama-2 7B and 70B at temperature 0 (DySpec, table 4)"
SMALL_RATE = "tokens a pass: 7.65, SpecExec's README at 256 nodes, its models unnamed"
FUSED = (
    "UMbreLLa's AWQ kernels multiply packed weights; edgespec unpacks nf4 into memory for every pass and every draft "
    "call: {draft_s:.2f} of {step_s:.2f} s a step go into drafting; and the tokens a pass, which UMbreLLa does not "
    "tell, may be more than assumed"
)

STREAMS_ALL = (
    "5.6 s is what all 138 GB take at 25 GB/s, so every layer seems to have streamed; edgespec keeps {resident} of "
    "{layers} on the card"
)
KEEPS_FEWER = (
    "0.27 s is what 6.8 GB take at 25 GB/s, some 11 layers, while edgespec keeps {resident} of {layers} on the card "
    "and streams the rest: of a model that almost fits, a few layers more or less decide"
)

EXPERTS_SPREAD = "rows spread over experts by profiles/builtin/assumptions.toml, and the card keeps {kept}"
EXPERTS_MOVE = (
    "llama.cpp computes experts on the CPU, where RAM hands them over, with kernels that multiply packed weights; "
    "edgespec moves the {fetched:.0f} of {asked:.0f} that the card lacks ({elsewhere_s:.3f} s), unpacks all of them "
    "before they are multiplied ({experts_s:.3f} s), and issues each layer's and expert's kernels from Python"
)


def dyspec(dataset: str, token_s: float, tokens: float, *, system: str = "") -> Published:
    """A cell of DySpec's table 4: A100 40 GB, Llama-2 7B and 70B in fp16, 128 + 128 tokens, 768 nodes."""
    return Published(
        source=f"{DYSPEC}, {dataset}{system}", hardware="a100-40gb", target="llama2-70b", draft="llama2-7b",
        nodes=768, depth=round(2 * tokens), tokens=tokens, token_s=(token_s, token_s), assumed=DEPTH,
    )  # fmt: skip


def umbrella(
    hardware: str, low: float, high: float, *, draft: str, nodes: int, depth: int, resident: int, tokens: float
) -> Published:
    """A row of UMbreLLa's table: Llama-3.1 70B AWQ on MT-Bench, tokens/s sampled and greedy; trees as its configs."""
    return Published(
        source=f"{UMBRELLA}, Llama-3.1 70B", hardware=hardware, target="llama3-70b", draft=draft, quant="nf4",
        draft_quant="nf4" if draft == "llama3-8b" else None, nodes=nodes, depth=depth, tokens=tokens,
        token_s=(1 / high, 1 / low), context_tokens=1024, max_resident=resident,
        assumed="nf4 for AWQ; " + (NO_RATE if draft == "llama3-8b" else SMALL_RATE), why=FUSED,
    )  # fmt: skip


BLOG = "Sequoia, blog"  # together.ai/blog/sequoia, 2024-03-12: RTX 4090 at 31.5 GB/s, MT-Bench
RUNS = (
    Published(source=f"{DYSPEC}, baseline", hardware="a100-40gb", target="llama2-70b", token_s=(5.29, 5.60)),
    dyspec("C4, T 0", 0.42412, 16.04),
    dyspec("C4, T 0.6", 0.88494, 7.14),
    dyspec("OWT, T 0", 0.54885, 11.79),
    dyspec("CNN, T 0", 0.54739, 11.46),
    dyspec("C4, T 0", 0.62841, 9.40, system=", Sequoia"),
    dyspec("C4, T 0.6", 0.66293, 8.96, system=", Sequoia"),
    Published(source="Sequoia, baseline", hardware="l40", target="llama2-70b", token_s=(5.6, 5.6), why=STREAMS_ALL),
    Published(
        source=SEQUOIA, hardware="l40", target="llama2-70b", draft="llama2-7b", nodes=768, depth=18, tokens=9.2,
        token_s=(0.56, 0.56), assumed=f"768 nodes, depth 18; {RATE}",
    ),
    Published(source=f"{BLOG}, baseline", hardware="rtx-4090", target="llama2-70b", token_s=(4.54, 4.54)),
    Published(
        source=BLOG, hardware="rtx-4090", target="llama2-70b", draft="llama2-7b", nodes=768, depth=18, tokens=9.2,
        token_s=(0.57, 0.57), assumed=f"768 nodes, depth 18; {RATE}",
    ),
    Published(source=f"{BLOG}, baseline", hardware="rtx-4090", target="vicuna-33b", token_s=(1.78, 1.78)),
    Published(
        source=f"{BLOG}, baseline", hardware="rtx-4090", target="llama2-13b", token_s=(0.27, 0.27), why=KEEPS_FEWER,
    ),
    umbrella("rtx-4090", 7.2, 8.6, draft="llama3-8b", nodes=504, depth=24, resident=16, tokens=9.6),
    umbrella("rtx-4080-super", 7.4, 8.4, draft="llama3-8b", nodes=384, depth=24, resident=0, tokens=9.6),
    Published(
        source="llama.cpp, experts on the CPU", hardware="rtx-3090", target="gpt-oss-120b",
        token_s=(1 / 32, 1 / 32), context_tokens=4096, host_bytes=64 << 30, assumed=EXPERTS_SPREAD, why=EXPERTS_MOVE,
    ),
    umbrella("rtx-4070-ti", 5.5, 6.1, draft="llama3-1b", nodes=256, depth=16, resident=0, tokens=7.65),
)  # fmt: skip

LEFT_OUT = {
    "SpecExec": "its summary (4 to 6 tokens/s in 4 bits, 2 to 3 in 16) names no card for a number, and the README's "
    "sample table (3.8 tokens/s at 6.7 to 8.0 tokens a pass) names neither card nor models",
    "llama.cpp, gpt-oss-120b": "other reports have 1.6 tokens/s on a 3090 beside an EPYC 7343 (hardware-corner.net) "
    "and 25.6 with 8 GB of a card beside a 14900K: the host's memory decides, and neither says what it reaches",
    "AirLLM": "no tree; the reports at hand lack the card and the disk's rate (Llama-3.1 405B, 3.3 s a layer), or ran "
    "on a card without a profile (Qwen2.5 3B on an RTX 5060 Ti, loaded synchronously: 28.6 s a token)",
}


def write_models(folder: Path) -> None:
    """A folder with config.json for each model."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")


def compare(run: Published, folder: Path) -> dict[str, Any]:
    """Estimated seconds a token beside the published ones."""
    hardware, assumptions = open_hardware(run.hardware)
    run_config = RunConfig(
        limits=MemoryLimits(max_cpu_bytes=run.host_bytes, gpu_margin_bytes=0, max_resident_layers=run.max_resident),
        device=torch.device("cuda:0"),
        dtype=torch.float16,
        quant=run.quant,
        draft_quant=run.draft_quant,
        context_tokens=run.context_tokens,
        prompt_tokens=run.context_tokens // 2,
    )
    draft = open_architecture(folder / run.draft) if run.draft else None
    weights = pair_weights(open_architecture(folder / run.target), draft, run_config)
    memory = memory_there(hardware, assumptions, run_config.limits)
    pair = PairOnHardware(
        weights=weights, hardware=hardware, assumptions=assumptions, run_config=run_config, memory=memory
    )
    tree = TreeSettings(policy="none")
    if run.nodes:
        tree = TreeSettings(policy="sequoia", size=run.nodes, depth=run.depth)
    plan = place_on(pair, tree)
    load = load_there(pair, plan)
    steps = {
        case: step_seconds(
            load, rates_of(pair, getattr(assumptions, case)), 1, nodes=run.nodes, depth=run.depth, tokens=run.tokens
        )
        for case in CASES
    }
    likely = steps["likely"]
    published_s = sum(run.token_s) / 2
    facts = facts_of(likely, load, plan.placement)
    return {
        "source": run.source,
        "hardware": run.hardware,
        "target": run.target + (f" {run.quant}" if run.quant else ""),
        "tokens": run.tokens,
        "resident": plan.placement.num_resident,
        "published_s": [round(seconds, 4) for seconds in run.token_s],
        "estimated_s": {case: round(1 / steps[case].tokens_per_s, 4) for case in CASES},
        "ratio": round(1 / likely.tokens_per_s / published_s, 3),
        "step": {name: round(getattr(likely, name), 4) for name in ("draft_s", "stream_s", "compute_s", "pass_s")},
        "assumed": run.assumed.format(**facts),
        "why": run.why.format(**facts),
    }


def facts_of(step: StepSeconds, load: PairLoad, placement: Placement) -> dict[str, Any]:
    """What reasons quote."""
    facts: dict[str, Any] = {"draft_s": step.draft_s, "step_s": step.step_s, "resident": placement.num_resident,
                             "layers": placement.num_layers}  # fmt: skip
    if step.experts is not None and load.target.experts is not None:
        moved_bytes = step.experts.link_bytes + step.experts.disk_bytes
        facts |= {
            "asked": step.experts.asked, "fetched": moved_bytes / load.target.experts.expert_bytes,
            "elsewhere_s": step.experts.elsewhere_s, "experts_s": step.experts.compute_s,
            "kept": f"{load.target.experts.device_kept:.0f} of {load.target.experts.num_experts} of a layer",
        }  # fmt: skip
    return facts


def main() -> int:
    """Compare all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1.5, help="ratio beyond which a row is explained")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        rows = [compare(run, Path(folder)) for run in RUNS]
    print(f"{'published run':37}{'card':16}{'target':16}{'tok/pass':>8}{'resident':>9}{'published':>14}"
          f"{'estimated s a token':>26}{'ratio':>7}")  # fmt: skip
    for row in rows:
        low, high = row["published_s"]
        published = f"{low:.3f}" if low == high else f"{low:.3f}-{high:.3f}"
        slow, likely, fast = (row["estimated_s"][case] for case in CASES)
        print(f"{row['source']:37}{row['hardware']:16}{row['target']:16}{row['tokens']:>8.2f}{row['resident']:>9}"
              f"{published:>14}{f'{likely:.3f} ({fast:.3f} to {slow:.3f})':>26}{row['ratio']:>7.2f}")  # fmt: skip
    for note in dict.fromkeys(row["assumed"] for row in rows if row["assumed"]):
        print(f"assumed: {note}")
    off = [row for row in rows if not 1 / arguments.limit <= row["ratio"] <= arguments.limit]
    for row in off:
        where = f"{row['source']}, {row['target']} on {row['hardware']}"
        print(f"off by more than {arguments.limit:g}: {where}: {row['why'] or 'unexplained'}")
    for system, reason in LEFT_OUT.items():
        print(f"left out: {system}: {reason}")
    print(json.dumps({"rows": rows, "left_out": LEFT_OUT}))
    return 0 if all(row["why"] for row in off) else 1


if __name__ == "__main__":
    sys.exit(main())
