"""How many operations a step launches, and how often it waits for the device: counted without one.

    python -m scripts.bench.launches                 the built-in pair at 64 and 768 nodes
    python -m scripts.bench.launches -m TARGET -md DRAFT --sizes 16 64
    python -m scripts.bench.launches --texts 16 --sizes 16      a step of sixteen texts
    python -m scripts.bench.launches --cuda-graphs  where the draft's passes are recorded, and a replay is one launch

An operation that computes or copies is a launch; views are none. What moves numbers from tensors to Python (`item`,
`tolist`, a condition, `nonzero`, indexing by truth values) would wait on a GPU. Kernels that only one device has are
counted as they run here; a CPU's padding of rows is left out. Prints means over all
steps of a text; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.machine import device
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from offload.layouts import onednn
from scripts.bench.step import ForwardMeter

FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::_unsafe_view",
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::_local_scalar_dense",
)
WAITING_METHODS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
WAITING_OPERATIONS = (
    "aten::nonzero", "aten::_local_scalar_dense", "aten::equal", "aten::masked_select", "aten::bincount",
)  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that are no views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self._replays = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if not (self._replays or func.is_view or name.startswith(FREE)):
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        """Return how many there were."""
        return self.by_name.total()

    def replaying(self, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return what does the same as `read` by one launch."""

        def replay() -> Tensor:
            self.by_name["replay"] += 1
            self._replays = True
            try:
                return read()
            finally:
                self._replays = False

        return replay


class Traffic(Launches):
    """Counts operations, and the bytes that each reads and writes, as if nothing stayed in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.count
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self.count > before:
            read = args[1:] if func.name().startswith("aten::copy_") else args
            self.num_bytes += sum(map(_num_bytes, (*read, output)))
        return output


def _num_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of those in a list; what repeats by a stride of 0 counts once."""
    if isinstance(value, list | tuple):
        return sum(map(_num_bytes, value))
    if not isinstance(value, Tensor):
        return 0
    return math.prod(size for size, stride in zip(value.shape, value.stride(), strict=True) if stride) * value.itemsize


class Waits(TorchFunctionMode):
    """Counts calls that bring numbers of a tensor to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING_METHODS and args and isinstance(args[0], torch.Tensor):
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        """Return how many there were."""
        return self.by_name.total()


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 768])
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--texts", type=int, default=1, help="that share each step")
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=48)
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--names", action="store_true", help="tell the commonest operations outside the models, too")
    arguments = parser.parse_args()
    pair = open_pair(arguments.model, arguments.draft_model)
    prompt = pair.tokenizer.encode(next(iter(read_prompts(str(DEMO_FOLDER / "prompts.jsonl"), lines=False))).prompt)
    rows = []
    for size in arguments.sizes:
        rows.append(count_step(pair, prompt, size, arguments))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print(json.dumps(rows))


def count_step(pair: Any, prompt: list[int], size: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the means of a text's steps."""
    launches, waits = Launches(), Waits()
    tree = TreeSettings(policy=arguments.policy, size=size, lookup=False)
    steps: list[dict[str, float]] = []
    onednn.padded_rows = lambda count: count
    device.CudaGraphs.record = lambda _self, read: launches.replaying(read)  # type: ignore[method-assign]
    with Engine.from_pair(
        pair, tree=tree, device="cpu", dtype="float32", cuda_graphs=arguments.cuda_graphs, parallel=arguments.texts,
        context_tokens=len(prompt) + arguments.max_new_tokens,
    ) as engine:  # fmt: skip
        assert engine.draft_model is not None
        draft, target = (
            ForwardMeter(model, lambda: float(launches.count)) for model in (engine.draft_model, engine.target_model)
        )
        calls = Counter[str]()
        engine.draft_model.model.register_forward_pre_hook(lambda *_: calls.update(["draft"]))
        sampling = SamplingSettings(temperature=arguments.temp)

        def read() -> dict[str, float]:
            waiting = sum(launches.by_name[name] for name in WAITING_OPERATIONS)
            return {
                "launches": launches.count,
                "draft": draft.total,
                "target": target.total,
                "draft_calls": calls["draft"],
                "waits": waits.count + waiting,
            }

        options: Any = {"max_new_tokens": arguments.max_new_tokens, "sampling": sampling, "ignore_eos": True}
        handles = [engine.submit(engine.request(prompt, seed=seed, **options)) for seed in range(arguments.texts)]
        with launches, waits:
            while not all(handle.added for handle in handles):
                engine.advance()
            before = read()
            while engine.advance() == arguments.texts:
                after = read()
                steps.append({name: after[name] - before[name] for name in after})
                before = after
    if arguments.names:
        print(launches.by_name.most_common(30), waits.by_name)
    return {"size": size, "steps": len(steps)} | {
        name: round(statistics.mean(step[name] for step in steps), 1) for name in steps[0]
    }


if __name__ == "__main__":
    main()
