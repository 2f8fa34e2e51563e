"""A checkpoint whose layers wait in RAM, on a card: edgespec against transformers with accelerate.

    python -m scripts.make.inflate large --params 7B
    python -m scripts.bench.card large                          no layer stays on the card
    python -m scripts.bench.card large -ngl 12 --tree-sizes 64,256

edgespec decodes plainly, with trees of its own choice, and with trees of the sizes given, from the built-in draft.
accelerate keeps as many layers on the card as edgespec, and moves each of the others in every pass. All continue
built-in prompts greedily, in bf16, in one process, after a short text that is not counted. Prints medians of a step
behind the prompt's: its parts' milliseconds and the nodes that were verified; and means: tokens a step, tokens a
second. The last line is JSON.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.machine.environment import set_up_environment
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from scripts.bench.offload import OUTSIDE
from scripts.situations import GIB, LAYERS, read_texts

MEANS = ("tokens_a_step", "tokens_per_s")
PARTS = ("grow_s", "target_s", "rest_s", "total_s", "num_drafted")


class Forwards(BaseStreamer):
    """Notes when each forward of transformers has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A forward has ended, or has not begun: the prompt comes first."""
        self.ends.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def run_edgespec(arguments: argparse.Namespace, prompts: list[str], tree: TreeSettings | None) -> dict[str, Any]:
    """Decode the prompts; returns what their steps took."""
    is_plain = tree is not None and tree.policy == "none"
    started = time.perf_counter()
    with Engine.from_pretrained(
        arguments.model, draft=DEMO_FOLDER / "draft", tree=tree, device=arguments.device, dtype="bfloat16",
        limits=MemoryLimits(max_resident_layers=arguments.gpu_layers), context_tokens=1024,
    ) as engine:  # fmt: skip
        load_s = time.perf_counter() - started
        options: Any = {"temperature": 0.0, "ignore_eos": True}
        engine.generate("import ", max_new_tokens=8, **options)
        new_tokens = arguments.plain_tokens if is_plain else arguments.new_tokens
        texts = [engine.generate(prompt, max_new_tokens=new_tokens, **options) for prompt in prompts]
        streamed_gib = engine.placement.streamed_bytes / GIB
    steps = [step for text in texts for step in text.passes if not step.is_prefill]
    medians = {name: statistics.median(getattr(step, name) for step in steps) for name in PARTS}
    num_tokens = sum(len(step.tokens) for step in steps)
    seconds = sum(step.total_s for step in steps)
    return {
        **medians, "tokens_a_step": num_tokens / len(steps), "tokens_per_s": num_tokens / seconds,
        "streamed_gib": streamed_gib, "load_s": load_s,
    }  # fmt: skip


def run_accelerate(arguments: argparse.Namespace, prompts: list[str]) -> dict[str, Any]:
    """Continue one prompt with transformers' `generate`; returns what a pass took."""
    started = time.perf_counter()
    pair = open_pair(arguments.model, None)
    num_layers, device = pair.target.config.num_hidden_layers, arguments.device
    layers = {f"{LAYERS}.{at}": device if at < arguments.gpu_layers else "cpu" for at in range(num_layers)}
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16, device_map={**dict.fromkeys(OUTSIDE, device), **layers}
    )
    load_s, forwards = time.perf_counter() - started, Forwards()
    ids = torch.tensor([pair.tokenizer.encode(prompts[0])], device=device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=arguments.plain_tokens,
        eos_token_id=None, streamer=forwards,
    )  # fmt: skip
    _, first, *later = forwards.ends
    gaps = [after - before for before, after in zip([first, *later], later, strict=False)]
    return {
        "total_s": statistics.median(gaps),
        "tokens_a_step": 1.0,
        "tokens_per_s": len(gaps) / sum(gaps),
        "load_s": load_s,
    }


def main() -> None:
    """All systems in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an inflated checkpoint of the built-in target")
    parser.add_argument("-ngl", "--gpu-layers", type=int, default=0, help="layers that stay on the card")
    parser.add_argument("--tree-sizes", type=lambda text: [int(one) for one in text.split(",")], default=[64, 256])
    parser.add_argument("-n", "--new-tokens", type=int, default=64)
    parser.add_argument("--plain-tokens", type=int, default=12, help="where each costs a pass")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    set_up_environment()
    prompts = read_texts(DEMO_FOLDER / "prompts.jsonl")[: arguments.prompts]
    trees = {"plain": TreeSettings(policy="none"), "own choice": None}
    trees |= {f"{size} nodes": TreeSettings(size=size, lookup=False) for size in arguments.tree_sizes}
    systems: dict[str, Any] = {
        f"edgespec, {name}": lambda tree=tree: run_edgespec(arguments, prompts, tree) for name, tree in trees.items()
    }
    systems["accelerate"] = lambda: run_accelerate(arguments, prompts)
    titles = ("grow", "target", "rest", "step ms", "nodes", "tokens", "tok/s", "load s")
    print(f"{'system':<24}" + "".join(f"{title:>9}" for title in titles))
    found = {}
    for name, run in systems.items():
        row = found[name] = run()
        gc.collect()
        values = [f"{1e3 * row[part]:.1f}" if part in row else "" for part in PARTS[:4]]
        values += [f"{row.get('num_drafted', 0):g}", *(f"{row[name]:.2f}" for name in MEANS), f"{row['load_s']:.1f}"]
        print(f"{name:<24}" + "".join(f"{value:>9}" for value in values), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
