"""Read and continue long prompts beside a pretended card whose limit holds half of the keys and values.

    python -m scripts.check.long_contexts                             2,048 to 32,768 tokens, one text and eight
    python -m scripts.check.long_contexts --tokens 131072 --texts 1 --family gemma3

A small random model has as many positions. Its texts through trees are compared, token by token, with those of a card
that keeps all; printed are the seconds of the prompt and of a step on this processor for both, the bytes that a step
moves beside those that the plan reckons with, with their milliseconds over a link, and the plan beside its limit.
Exits 1 where a text differs, or more comes over the link than is planned.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import Gemma3TextConfig, LlamaConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.tuning.draft_worth import DraftWorth
from offload.placement import KEYS
from scripts.situations import exit_with
from tests.support.moved_keys import moved_keys
from tests.support.pretend_cuda import pretend_cuda
from tests.support.tiny_checkpoints import make_model, save_folder

TREE = TreeSettings(size=9, depth=3, lookup=False)
SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
WINDOWED = {"sliding_window": 1024, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
GB, MIB = 1e9, 2.0**20


def run(engine: Engine, tokens: int, num_texts: int, new: int) -> tuple[list[Any], float, float, float]:
    """Return the texts behind such prompts, seconds of the prompts and of a step, and the bytes that a step moves."""
    prompts = [[random.Random(text).randrange(1, 256) for _ in range(tokens)] for text in range(num_texts)]
    requests = [
        engine.request(prompt, max_new_tokens=new, temperature=0.8, seed=1, ignore_eos=True) for prompt in prompts
    ]
    handles = [engine.submit(request) for request in requests]
    started = time.perf_counter()
    while not all(handle.added or handle.is_done for handle in handles):
        engine.advance()
    read_s, steps = time.perf_counter() - started, 0
    started = time.perf_counter()
    with moved_keys() as moved:
        while not any(handle.is_done for handle in handles):
            engine.advance()
            steps += 1
    step_s = (time.perf_counter() - started) / max(1, steps)
    return [handle.result().token_ids for handle in handles], read_s, step_s, sum(moved.values()) / max(1, steps)


def main() -> int:
    """Print a line for each context and number of texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--family", choices=["llama", "gemma3"], default="llama")
    parser.add_argument("--link", type=float, default=20.0, help="GB/s")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {**SIZES, "max_position_embeddings": 2 * max(arguments.tokens)}
    config = LlamaConfig(**sizes) if arguments.family == "llama" else Gemma3TextConfig(**sizes, **WINDOWED)
    num_faults = 0
    with tempfile.TemporaryDirectory() as root, pretend_cuda(), patch.object(DraftWorth, "is_known", False):
        folder = save_folder(Path(root) / "target", make_model(config, is_image_text=False, seed=0))
        for tokens in arguments.tokens:
            for num_texts in arguments.texts:
                num_faults += compare(arguments, folder, tokens, num_texts)
    return int(num_faults > 0)


def compare(arguments: argparse.Namespace, folder: Path, tokens: int, num_texts: int) -> bool:
    """Print what one context takes, and return whether something is wrong."""

    def opened(max_gpu_bytes: int) -> Engine:
        limits = MemoryLimits(max_gpu_bytes=max_gpu_bytes, max_cpu_bytes=4 << 30)
        return Engine.from_pretrained(
            folder, draft=folder, device="cuda", limits=limits, self_check=False, profile="none", tree=TREE,
            dtype="float32", parallel=num_texts, context_tokens=tokens + 64, prompt_tokens=tokens,
        )  # fmt: skip

    with opened(64 << 30) as engine:
        placement = engine.placement
        expected, resident_read_s, resident_step_s, _ = run(engine, tokens, num_texts, arguments.new)
    limit_bytes = placement.planned_bytes - placement.device_bytes[KEYS] // 2
    with opened(limit_bytes) as engine:
        found, read_s, step_s, moved_bytes = run(engine, tokens, num_texts, arguments.new)
        waiting = engine.placement
    planned_bytes = waiting.moved_keys_bytes(num_texts * (tokens + 64))
    num_different = sum(one != other for one, other in zip(found, expected, strict=True))
    print(
        f"{arguments.family}, {tokens} tokens x {num_texts}: {num_different} texts differ; "
        f"{len(waiting.waiting_keys)} of {waiting.num_layers} layers' keys wait; prompts {read_s:.1f} s "
        f"({resident_read_s:.1f}), a step {step_s:.3f} s ({resident_step_s:.3f}); a step moves "
        f"{moved_bytes / MIB:.2f} MiB of {planned_bytes / MIB:.2f} planned, "
        f"{moved_bytes / arguments.link / GB * 1e3:.2f} ms of the link; planned {waiting.planned_bytes / MIB:.1f} MiB "
        f"within {limit_bytes / MIB:.1f}, all on the card {placement.planned_bytes / MIB:.1f}",
        flush=True,
    )
    return num_different > 0 or moved_bytes > planned_bytes or not waiting.waiting_keys


if __name__ == "__main__":
    exit_with(main)
