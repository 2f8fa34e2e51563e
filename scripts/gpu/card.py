"""The device, times on it, passes over random models with layers of real shapes, and the built-in pair's prompts."""

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from edgespec import Engine, MemoryLimits
from edgespec.machine.device import is_before_ampere
from edgespec.model.cuda_graphs import WORKSPACE_BYTES
from edgespec.model.pass_rows import next_rows
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.placement.memory import CUDA_CONTEXT_BYTES
from offload.placement import Placement

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)
PROMPTS = DEMO_FOLDER / "prompts.jsonl"
NEW_TOKENS = 64  # of a text
SHAPES = {"7B-like": (4096, 11008, 4), "70B-like": (8192, 28672, 4)}  # hidden, inner, layers that are tried


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median wall time of work that is waited for."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def half_dtype(device: torch.device | None = None) -> torch.dtype:
    """Return the 16-bit format that a card computes in, as it is chosen for models of bf16."""
    return torch.float16 if is_before_ampere(device or DEVICE) else torch.bfloat16


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the norm of a difference by that of what is expected."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def random_llama(*, hidden: int, inner: int, layers: int, head_dim: int = 128, vocab: int = 2048) -> LlamaConfig:
    """A Llama's configuration, in bf16, whose stop token is the built-in tokenizer's."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=min(8, hidden // head_dim),
        head_dim=head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    config.dtype = torch.bfloat16
    return config


def write_model(folder: Path, config: LlamaConfig) -> None:
    """Write a random model with the built-in tokenizer."""
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config)  # in the config's dtype: float32 would fit no small card
    model.cpu().save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    for path in (DEMO_FOLDER / "target").glob("tokenizer*"):
        shutil.copy(path, folder)


@contextlib.contextmanager
def written(target: LlamaConfig, draft: LlamaConfig | None = None) -> Iterator[ModelPair]:
    """Random models on the disk while they are used; two of one configuration have the same weights."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        os.environ["EDGESPEC_CACHE"] = work
        folders = [Path(work) / "target", Path(work) / "draft"]
        write_model(folders[0], target)
        if draft is not None:
            write_model(folders[1], draft)
        yield open_pair(folders[0], folders[1] if draft is not None else None)


@contextlib.contextmanager
def written_shape(name: str) -> Iterator[ModelPair]:
    """A random model with layers of this shape."""
    hidden, inner, layers = SHAPES[name]
    with written(random_llama(hidden=hidden, inner=inner, layers=layers)) as pair:
        yield pair


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFacts:
    """What repeated passes over one text gave."""

    logits: Tensor  # on the host: the next run's memory is its own
    pass_s: float
    placement: Placement
    peak_bytes: int  # that torch's allocator took: other programs' memory is no part of it
    planned_bytes: int  # of that: without the context, with cuBLAS's workspace, which the plan counts in the context
    num_allocations: int  # of device memory, after the first pass


def run_passes(pair: ModelPair, rows: int, *, quant: str = "none", **limits: Any) -> PassFacts:
    """Passes over `rows` rows; raises RuntimeError when two of them differ."""
    ids = torch.arange(rows, device=DEVICE) % 2000
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with Engine.from_pair(
        pair, limits=MemoryLimits(**limits), device="cuda", dtype=half_dtype(), quant=quant, context_tokens=rows
    ) as engine:
        model = engine.target_model

        def one_pass() -> Tensor:
            (hidden,) = model.read([next_rows(model.new_text(), ids)])
            return model.logits(hidden)

        logits = one_pass().clone()
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        for _ in range(3):
            if not torch.equal(one_pass(), logits):
                raise RuntimeError(f"passes differ from each other: {limits}")
        num_allocations = torch.cuda.memory_stats()["segment.all.allocated"] - before
        return PassFacts(
            logits=logits.cpu(),
            pass_s=seconds(one_pass),
            placement=engine.placement,
            peak_bytes=torch.cuda.max_memory_reserved(),
            planned_bytes=engine.placement.planned_bytes - CUDA_CONTEXT_BYTES + WORKSPACE_BYTES,
            num_allocations=num_allocations,
        )
