"""Texts of the built-in pair that share passes, in float32, are those alone; tokens a second of both."""

import time
from typing import Any

import torch

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.cli.prompts.read import read_prompts
from edgespec.pair.pair import open_pair
from scripts.gpu.card import NEW_TOKENS, PROMPTS
from scripts.gpu.finding import Finding, judged


def check(*, is_full: bool, num_texts: int = 16, new_tokens: int = NEW_TOKENS) -> Finding:
    """Compare texts at three temperatures."""
    rows = read_prompts(str(PROMPTS), lines=False)
    limits = MemoryLimits(max_resident_layers=2)
    report: dict[str, Any] = {"texts": num_texts}
    with Engine.from_pair(
        open_pair(None, None), tree=TreeSettings(size=16), device="cuda", dtype="float32", limits=limits,
        parallel=num_texts,
    ) as engine:  # fmt: skip
        requests = [
            engine.request(rows[number % len(rows)].prompt, max_new_tokens=new_tokens, temperature=0.4 * (number % 3),
                           seed=number, name=str(number))
            for number in range(num_texts)
        ]  # fmt: skip
        texts: dict[str, list[tuple[int, ...]]] = {}
        for way in ("alone", "together"):
            torch.cuda.synchronize()
            started = time.perf_counter()
            if way == "alone":
                found = [engine.submit(request).result() for request in requests]
            else:
                ended = dict(engine.generate_many(requests))
                found = [text for number in range(num_texts) if not isinstance(text := ended[number], Exception)]
            torch.cuda.synchronize()
            texts[way] = [text.token_ids for text in found]
            report[f"{way}_tokens_per_s"] = sum(map(len, texts[way])) / (time.perf_counter() - started)
    equal = sum(one == other for one, other in zip(texts["alone"], texts["together"], strict=False))
    return judged(equal == num_texts, {**report, "equal_texts": equal}, f"{equal} of {num_texts} texts are equal")
