"""Where a step's time goes: draft forwards, target forward, and everything else.

    python -m scripts.bench.step                     the built-in pair at 64 and 768 nodes
    python -m scripts.bench.step -m TARGET -md DRAFT --sizes 16 64

Sizes alternate within each prompt; medians over all steps. "Rest" is growth without its draft
forwards, masks and positions, probabilities, verification and commit; the head counts as forward.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.model.causal_model import CausalModel
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from offload.text_part import decoder_layers
from profiles.measure import machine_facts


class ForwardMeter:
    """Adds up what a reading, of seconds or else, grows by in a model's forward: the decoder and the head alone."""

    def __init__(self, model: CausalModel, read: Callable[[], float] = time.perf_counter) -> None:
        self.total = 0.0
        self._read = read
        self._device = model.device
        self._depth = 0  # rows go to the decoder alone, and then through the whole model to the head
        decoder = model.model.get_submodule(decoder_layers(model.model)[0].rpartition(".")[0])
        for module in (model.model, decoder):
            module.register_forward_pre_hook(self._start)
            module.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._wait()
            self._started = self._read()

    def _stop(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._wait()
            self.total += self._read() - self._started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--prompts", default=str(DEMO_FOLDER / "prompts.jsonl"))
    parser.add_argument("-n", "--max-new-tokens", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 768])
    parser.add_argument("--policy", default="dyspec")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    pair = open_pair(arguments.model, arguments.draft_model)
    prompts = [pair.tokenizer.encode(row.prompt) for row in read_prompts(arguments.prompts, lines=False)]
    engines, clocks = {}, {}
    for size in arguments.sizes:
        engine = Engine.from_pair(
            pair, tree=TreeSettings(policy=arguments.policy, size=size, lookup=False), device=arguments.device
        )
        if engine.draft_model is None:
            raise SystemExit("give a draft (-md): without one there is no step to take apart")
        engines[size] = engine
        clocks[size] = (ForwardMeter(engine.draft_model), ForwardMeter(engine.target_model))

    steps: dict[tuple[float, int], list[dict[str, float]]] = defaultdict(list)
    for prompt in prompts:
        for temperature in arguments.temps:
            for size, engine in engines.items():
                draft, target = clocks[size]
                sampling = SamplingSettings(temperature=temperature)
                before = (draft.total, target.total)
                for chunk in engine.stream(prompt, max_new_tokens=arguments.max_new_tokens, sampling=sampling, seed=1):
                    step, after = chunk.step, (draft.total, target.total)
                    if not step.is_prefill and step.num_drafted:
                        total = step.total_s
                        in_draft, in_target = after[0] - before[0], after[1] - before[1]
                        steps[temperature, size].append(
                            {
                                "nodes": step.num_drafted,
                                "tokens": len(step.tokens),
                                "total_s": total,
                                "draft_s": in_draft,
                                "target_s": in_target,
                                "rest_s": total - in_draft - in_target,
                            }
                        )
                    before = after

    columns = ("temp", "size", "steps", "nodes", "tok/pass", "step ms", "draft ms", "target ms", "rest ms", "rest")
    print(" ".join(f"{name:>9}" for name in columns))
    rows = []
    for (temperature, size), found in sorted(steps.items()):
        median = {name: statistics.median(step[name] for step in found) for name in found[0]}
        share = sum(step["rest_s"] for step in found) / sum(step["total_s"] for step in found)
        tokens = statistics.mean(step["tokens"] for step in found)
        rows.append(
            {"temperature": temperature, "size": size, "steps": len(found), "tokens_per_pass": round(tokens, 2)}
            | {name: round(value, 5) for name, value in median.items() if name.endswith("_s")}
            | {"rest_share": round(share, 3)}
        )
        cells = [f"{temperature}", f"{size}", f"{len(found)}", f"{median['nodes']:.0f}", f"{tokens:.2f}"]
        cells += [f"{median[name] * 1e3:.2f}" for name in ("total_s", "draft_s", "target_s", "rest_s")]
        print(" ".join(f"{cell:>9}" for cell in [*cells, f"{share:.1%}"]))
    print(json.dumps({"rows": rows, "threads": arguments.threads, "machine": dataclasses.asdict(machine_facts())}))


if __name__ == "__main__":
    main()
