"""Texts whose keys and values wait in RAM, beside layers that stream, are those of a card that keeps all of them."""

import time
from collections.abc import Sequence

import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.pair import ModelPair
from offload.placement import KEYS, Placement
from scripts.gpu.card import half_dtype, random_llama, written
from scripts.gpu.finding import Finding, judged

CONTEXT = 65_536  # that is planned; prompts are shorter
PROMPT = 6_000


def check(
    *, is_full: bool, hidden: int = 1024, prompt_tokens: int = PROMPT, context: int = CONTEXT, new_tokens: int = 24
) -> Finding:
    """Compare texts alone and together, at two temperatures; half of the keys and values do not fit the second card."""
    config = random_llama(hidden=hidden, inner=4 * hidden, layers=8, head_dim=64 if hidden > 64 else 16)
    config.max_position_embeddings = context
    prompts = [[1 + (7 * place + 3 * text) % 2000 for place in range(prompt_tokens - text)] for text in range(2)]
    with written(config, config) as pair:
        placement, expected, staying_s = texts_of(pair, prompts, context, new_tokens, None)
        limit_bytes = placement.planned_bytes - placement.device_bytes[KEYS] // 2
        placement, found, waiting_s = texts_of(pair, prompts, context, new_tokens, limit_bytes)
    num_waiting = len(placement.waiting_keys)
    report = {"waiting": num_waiting, "layers": placement.num_layers, "staying_s": staying_s, "waiting_s": waiting_s}
    reason = "texts differ" if num_waiting else "the plan lets none wait"
    return judged(num_waiting > 0 and found == expected, report, reason)


def texts_of(
    pair: ModelPair, prompts: Sequence[list[int]], context: int, new_tokens: int, max_gpu_bytes: int | None
) -> tuple[Placement, list[tuple[int, ...]], float]:
    """Return where layers live, the texts, and the seconds of all of them after the first."""
    with Engine.from_pair(
        pair, tree=TreeSettings(size=32), device="cuda", dtype=half_dtype(), self_check=False, parallel=len(prompts),
        limits=MemoryLimits(max_gpu_bytes=max_gpu_bytes), context_tokens=context, prompt_tokens=len(prompts[0]),
    ) as engine:  # fmt: skip
        requests = [
            engine.request(prompt, max_new_tokens=new_tokens, temperature=temperature, seed=1, ignore_eos=True)
            for temperature in (0.0, 0.7)
            for prompt in prompts
        ]
        texts = [engine.submit(requests[0]).result().token_ids]
        torch.cuda.synchronize()
        started = time.perf_counter()
        for together in (requests[:2], requests[2:]):
            handles = [engine.submit(request) for request in together]
            texts += [handle.result().token_ids for handle in handles]
        torch.cuda.synchronize()
        return engine.placement, texts, time.perf_counter() - started
