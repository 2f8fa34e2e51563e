"""Families that follow no trees, a token a pass from the disk: edgespec against transformers with a disk map.

    python -m scripts.bench.plain rwkv openai-gpt mpt

A random checkpoint of each family, about 0.6 GiB in float32, is written to a temporary folder. Both systems have every
layer on the disk, and find none of it in the page cache: edgespec's reader drops a layer's pages just before it reads
them, and accelerate's pages are dropped before each forward. Texts are decoded greedily, one alone and eight together
(edgespec: eight texts that share each pass, each with its own cache; accelerate: one batch). Prompts' passes are left
out. Repeats alternate, and medians are quoted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

import offload.loaders
from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from offload.text_part import decoder_layers
from profiles.measure import drop_page_cache, machine_facts
from tests.support.tiny_checkpoints import save_folder

SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 1024, "n_layer": 12, "n_head": 16},
    # Without the halving of every sixth layer's weights, which accelerate reads anew as they are stored
    "rwkv": {"hidden_size": 1024, "num_hidden_layers": 12, "rescale_every": 0},
    "openai-gpt": {"n_embd": 1024, "n_layer": 12, "n_head": 16},
    "mpt": {"d_model": 1024, "n_layers": 12, "n_heads": 16},
    "gpt_neo": {"hidden_size": 1024, "num_layers": 12, "num_heads": 16, "attention_types": [[["global", "local"], 6]]},
}
END = 256
COUNTS = (1, 8)
PROMPTS = [list(range(first, first + 16)) for first in range(40, 40 + max(COUNTS))]


class Forwards(BaseStreamer):
    """Drops the files before each forward of transformers, and notes when each has ended."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self.ends: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A forward has ended, or has not begun: the prompt comes first."""
        self.ends.append(time.perf_counter())
        drop_page_cache(self._files)

    def end(self) -> None:
        """Nothing is held back."""


@contextmanager
def cold_reader() -> Iterator[None]:
    """Within this block edgespec's reader finds no layer in the page cache."""
    load = offload.loaders.CpuLoader.load

    def cold_load(self: offload.loaders.CpuLoader, record: Any, slot: int) -> None:
        for entry in record.entries:
            with entry.file.open("rb") as file:
                os.posix_fadvise(file.fileno(), entry.offset, entry.num_bytes, os.POSIX_FADV_DONTNEED)
        load(self, record, slot)

    offload.loaders.CpuLoader.load = cold_load  # type: ignore[method-assign]
    try:
        yield
    finally:
        offload.loaders.CpuLoader.load = load  # type: ignore[method-assign]


def edgespec_rate(folder: Path, count: int, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Return tokens a second of texts that share each pass, and the tokens."""
    limits = MemoryLimits(max_resident_layers=0)
    options: Any = {"dtype": "float32", "context_tokens": 64, "parallel": count, "limits": limits, "device": "cpu"}
    with cold_reader(), Engine.from_pretrained(folder, tree=TreeSettings(policy="none"), **options) as engine:
        requests = [
            engine.request(prompt, max_new_tokens=new_tokens, sampling=SamplingSettings(ignore_eos=True))
            for prompt in PROMPTS[:count]
        ]
        handles = [engine.submit(request) for request in requests]
        engine.advance()  # the prompts
        started = time.perf_counter()
        tokens = [list(handle.result().token_ids) for handle in handles]
        return count * (new_tokens - 1) / (time.perf_counter() - started), tokens


def accelerate_rate(folder: Path, count: int, new_tokens: int) -> tuple[float, list[list[int]]]:
    """Return the same of one batch of transformers, whose layers accelerate reads from their files."""
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(CONFIG_MAPPING[folder.name].from_pretrained(folder))
    layers = decoder_layers(bare)[0]
    outside = [name for name, part in bare.named_modules() if name and not layers.startswith(name)]
    top = [name for name in outside if not name.startswith(f"{layers}.") and not any(
        name.startswith(f"{other}.") for other in outside)]  # fmt: skip
    with tempfile.TemporaryDirectory() as unused:
        device_map = {**dict.fromkeys(top, "cpu"), layers: "disk"}
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map=device_map, offload_folder=unused
        )
    ids = torch.tensor(PROMPTS[:count])
    forwards = Forwards(sorted(folder.glob("*.safetensors")))
    if count > 1:  # transformers streams one text only
        model.register_forward_hook(lambda *_: forwards.put(ids))
        forwards.put(ids)
    options: Any = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
    options["suppress_tokens"] = [END]  # as `ignore_eos` does
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), streamer=forwards if count == 1 else None, **options
    )
    seconds = forwards.ends[new_tokens] - forwards.ends[1]
    return count * (new_tokens - 1) / seconds, found[:, ids.shape[1] :].tolist()


def measure(family: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of both systems with one text and with eight."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    rates: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](vocab_size=END + 1, **ends, **SIZES[family]))
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        folder = save_folder(Path(root) / family, model)
        del model
        for _ in range(arguments.repeats):
            for count in COUNTS:
                for name, rate_of in (("edgespec", edgespec_rate), ("accelerate", accelerate_rate)):
                    rate, tokens[f"{name} {count}"] = rate_of(folder, count, arguments.new_tokens)
                    rates[f"{name} {count}"].append(rate)
    found = {name: statistics.median(each) for name, each in rates.items()}
    same = {count: tokens[f"edgespec {count}"] == tokens[f"accelerate {count}"] for count in COUNTS}
    print(f"{family}: {num_bytes / (1 << 30):.2f} GiB")
    for count in COUNTS:
        ours, theirs = found[f"edgespec {count}"], found[f"accelerate {count}"]
        equal = "the same tokens" if same[count] else "other tokens"
        print(f"  {count} texts: {ours:.2f} tokens/s, accelerate {theirs:.2f}: {ours / theirs:.2f} times; {equal}")
    return {"family": family, "bytes": num_bytes, "tokens_per_s": found, "same_tokens": same}


def main() -> None:
    """Measure the families that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=SIZES)
    parser.add_argument("-n", "--new-tokens", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; by default the system's own place")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = [measure(family, arguments) for family in arguments.families]
    print(json.dumps({"machine": machine_facts(), "families": found}, default=str))


if __name__ == "__main__":
    main()
