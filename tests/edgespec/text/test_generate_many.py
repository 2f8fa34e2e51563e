"""Many requests: a step costs what its own texts cost, however many wait, and requests are taken as texts end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, TreeSettings
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.text.results import GenerationResult

PARALLEL = 2


class CountingHandle(TextHandle):
    """A text that counts how often anybody looks at any of its kind."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        CountingHandle.looks += 1
        return super().__getattribute__(name)


@pytest.fixture
def engine(pair_folders: tuple[Path, Path]) -> Iterator[Engine]:
    options: dict[str, Any] = {"parallel": PARALLEL, "context_tokens": 64, "self_check": False}
    with Engine.from_pretrained(pair_folders[0], tree=TreeSettings(policy="none"), **options) as engine:
        yield engine


def text(engine: Engine, *, tokens: int = 4) -> TextRequest:
    return engine.request("ab", max_new_tokens=tokens, temperature=0.0, ignore_eos=True)


def looks_of_steps(engine: Engine, num_waiting: int) -> int:
    request = text(engine, tokens=16)
    handles = [engine.submit(request, keeps=False) for _ in range(num_waiting)]
    CountingHandle.looks = 0
    for _ in range(5):
        engine.advance()
    looks = CountingHandle.looks
    assert sum(bool(handle.added) for handle in handles) == PARALLEL
    engine.cancel()
    engine.advance()
    assert all(handle.is_done for handle in handles)
    return looks


def test_a_step_looks_at_no_more_texts_where_thousands_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.text.scheduler.TextHandle", CountingHandle)
    few = looks_of_steps(engine, 10)
    assert looks_of_steps(engine, 20_000) < few + 500


def test_requests_are_taken_as_texts_end(engine: Engine) -> None:
    num_taken = 0

    def requests() -> Iterator[TextRequest]:
        nonlocal num_taken
        for number in range(40):
            num_taken += 1
            yield text(engine, tokens=2 + number % 5)

    places = []
    for place, result in engine.generate_many(requests()):
        places.append(place)
        assert isinstance(result, GenerationResult)
        assert len(result.token_ids) == 2 + place % 5
        assert num_taken < len(places) + 2 * PARALLEL
    assert sorted(places) == list(range(40))


def test_a_cancelled_engine_takes_no_further_requests(engine: Engine) -> None:
    ends = []
    for place, result in engine.generate_many(text(engine, tokens=2 + number) for number in range(40)):
        assert isinstance(result, GenerationResult)
        ends.append((place, result.finish_reason))
        engine.cancel()
    assert ends[0] == (0, "length")
    assert 0 < len(ends) <= 1 + 2 * PARALLEL
    assert {reason for _, reason in ends[1:]} <= {"interrupted"}


def test_a_text_that_waits_behind_many_is_cancelled_alone(engine: Engine) -> None:
    handles = [engine.submit(text(engine)) for _ in range(200)]
    handles[150].cancel()
    engine.advance()
    assert [number for number, handle in enumerate(handles) if handle.is_done] == [150]
    assert handles[150].result().finish_reason == "interrupted"
    engine.cancel()
