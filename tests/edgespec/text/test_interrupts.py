"""A step commits all or nothing, wherever an interrupt falls: texts that go on are those that nobody interrupted.

`EDGESPEC_INTERRUPTS` sets the number of places that are tried of each engine; a long check takes 1000.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.model.pass_cache import spans_under_way
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from tests.interrupts import interrupted_at
from tests.support.families import FAMILIES, RECURRENT, make_model, save_folder

NUM_PLACES = int(os.environ.get("EDGESPEC_INTERRUPTS", "8"))  # spread over two texts, from beginning to end
ENGINES: dict[str, dict[str, Any]] = {
    "coupled": {"tree": TreeSettings(size=8)},
    "tuned": {},
    "sampled": {"tree": TreeSettings(policy="dyspec", draw="sampled", size=6)},
    "streamed": {"tree": TreeSettings(size=4), "limits": MemoryLimits(max_resident_layers=1)},
    "recurrent": {"tree": TreeSettings(size=4)},
    "experts": {"tree": TreeSettings(size=4), "limits": MemoryLimits(max_resident_layers=1)},
}
TARGETS = {"recurrent": RECURRENT["qwen3-next"], "experts": FAMILIES["qwen3-moe"]}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, draft: Path, tmp_path: Path) -> Iterator[Engine]:
    target = save_folder(tmp_path / "target", make_model(TARGETS.get(request.param, FAMILIES["llama"])()))
    options = {"context_tokens": 96, "parallel": 2, "self_check": False, **ENGINES[request.param]}
    with Engine.from_pretrained(target, draft=draft, **options) as engine:
        yield engine


def requests_of(engine: Engine) -> list[TextRequest]:
    options: dict[str, Any] = {"temperature": 0.9, "frequency_penalty": 0.5, "seed": 5, "ignore_eos": True}
    return [engine.request(list(range(7, 7 + n)), max_new_tokens=14, name=f"{n}", **options) for n in (9, 21)]


def results(handles: list[TextHandle]) -> list[tuple[tuple[int, ...], str]]:
    return [(handle.result().token_ids, handle.result().text) for handle in handles]


@pytest.mark.timeout(0)
def test_texts_go_on_after_an_interrupt_at_any_place(engine: Engine) -> None:
    """Both have the tokens and the text that they have alone, and so has the next one."""
    requests = requests_of(engine)
    expected = results([engine.submit(request) for request in requests])
    with interrupted_at(None) as whole:
        results([engine.submit(request) for request in requests])
    rng = random.Random(0)
    for place in sorted(rng.randrange(1, whole.count) for _ in range(NUM_PLACES)):
        handles = [engine.submit(request) for request in requests]
        with interrupted_at(place) as places:
            handles[0].result()
        assert spans_under_way.get() is None, places.interrupted  # and the next model reads its own rows
        assert results(handles) == expected, places.interrupted
        assert results([engine.submit(requests[0])]) == expected[:1], places.interrupted
