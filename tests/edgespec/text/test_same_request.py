"""One request, again and again: its text does not depend on which rows of it are there already."""

from typing import Any

import pytest

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.text.results import GenerationResult

GREEDY = SamplingSettings(temperature=0)
PROMPT = "def add(first, second):\n    return first + second\n\n\n" * 8  # more rows than kernels of packed weights take


def texts_of(engine: Engine, prompt: str, *, reuse: bool) -> list[GenerationResult]:
    """Two texts of one prompt under way together, of which the second begins on the first one's rows."""
    requests = [engine.request(prompt, max_new_tokens=12, sampling=GREEDY, logprobs=2) for _ in range(2)]
    handles = [engine.submit(request, reuse=reuse) for request in requests]
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("policy", ["none", "adaptive"])
def test_a_request_has_one_text_fresh_and_from_rows_that_are_there(policy: str) -> None:
    """In bf16 with packed weights, where a row of a long prompt has other bits than one that is read alone."""
    tree = TreeSettings(policy="none") if policy == "none" else TreeSettings(policy="adaptive", size=8)
    options: dict[str, Any] = {"dtype": "bfloat16", "quant": "int4", "parallel": 2, "self_check": False}
    with Engine.from_pretrained(tree=tree, **options) as engine:
        ids = engine.encode(PROMPT)
        assert len(ids) > 100
        fresh, beside = texts_of(engine, PROMPT, reuse=False)
        again, sample = texts_of(engine, PROMPT, reuse=True)
        assert again.cached_tokens == sample.cached_tokens == beside.cached_tokens == len(ids)
        for other in (beside, again, sample):
            assert other.token_ids == fresh.token_ids
            assert other.logprobs == fresh.logprobs
        assert fresh.cached_tokens == 0
        list(engine.stream([*ids, *fresh.token_ids], max_new_tokens=4, sampling=GREEDY, reuse=True))
        third, _ = texts_of(engine, PROMPT, reuse=True)  # after rows of another prompt, which began so
        assert third.token_ids == fresh.token_ids
        longer = [*ids, *fresh.token_ids]
        begun = [engine.request(longer, max_new_tokens=8, sampling=GREEDY, cache_prompt=False) for _ in range(2)]
        once, twice = (engine.submit(request, reuse=True).result() for request in begun)
        assert (once.cached_tokens, twice.cached_tokens, twice.token_ids) == (0, 0, once.token_ids)
