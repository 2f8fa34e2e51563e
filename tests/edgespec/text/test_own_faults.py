"""What goes wrong with one text ends that text alone, and what is done with an engine at the wrong time is said."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.text.handle import OnPrefill, TextHandle
from edgespec.text.request import TextRequest

PROMPT = list(range(40, 70))


@pytest.fixture(scope="module")
def shared_engine(pair_folders: tuple[Path, Path]) -> Iterator[Engine]:
    options: dict[str, Any] = {"context_tokens": 128, "parallel": 3, "self_check": False}
    with Engine.from_pretrained(pair_folders[0], draft=pair_folders[1], tree=TreeSettings(size=6), **options) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    assert shared_engine.advance() == 0  # nothing is left behind


def text(engine: Engine, number: int = 0, **options: Any) -> TextRequest:
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.9, "seed": 1, "ignore_eos": True, **options}
    return engine.request([*PROMPT, number], **{"name": f"text {number}", **settings})


def fails_itself(
    engine: Engine, bad: TextRequest, kind: type[Exception], *, on_prefill: OnPrefill | None = None
) -> str:
    """The bad text ends with an error, and its neighbours, asked for before and after it, with all of their tokens."""
    good = [text(engine, number) for number in (1, 2)]
    expected = [engine.submit(request).result().token_ids for request in good]
    first = engine.submit(good[0])
    failing = engine.submit(bad, on_prefill=on_prefill)
    second = engine.submit(good[1])
    assert [first.result().token_ids, second.result().token_ids] == expected
    with pytest.raises(kind) as caught:
        failing.result()
    return str(caught.value)


@pytest.mark.parametrize("ids", [[300], [-1], [1, 10**9, 2]], ids=["beyond", "negative", "far beyond"])
def test_ids_that_the_target_lacks(engine: Engine, ids: list[int]) -> None:
    said = fails_itself(engine, replace(text(engine), ids=ids), EdgespecError)
    assert str(max(ids, key=abs)) in said
    assert "257" in said


def test_a_prompt_without_ids(engine: Engine) -> None:
    fails_itself(engine, replace(text(engine), ids=[]), EdgespecError)


@pytest.mark.parametrize("name", [None, "\ud800", 5])
def test_a_name_that_is_none(engine: Engine, name: Any) -> None:
    fails_itself(engine, replace(text(engine), name=name), Exception)


def test_a_callback_that_fails(engine: Engine) -> None:
    def fail(_done: int, _of: int) -> None:
        raise ValueError("no more room on the screen")

    assert fails_itself(engine, text(engine), ValueError, on_prefill=fail) == "no more room on the screen"


def test_what_handling_its_tokens_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    take = TextHandle.take

    def failing(self: TextHandle, step: Any) -> None:
        if self.request.name == "bad" and len(self.added) > 3:
            raise UnicodeError("no text")
        take(self, step)

    monkeypatch.setattr(TextHandle, "take", failing)
    assert fails_itself(engine, replace(text(engine), name="bad"), UnicodeError) == "no text"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_that_leave_no_numbers(engine: Engine, temperature: float) -> None:
    """Also where the text begins: its first token is drawn of what the penalties have left."""
    request = text(engine, temperature=temperature)
    bad = replace(request, sampling=replace(request.sampling, repetition_penalty=1e-39))
    assert "repetition_penalty" in fails_itself(engine, bad, EdgespecError)


def test_requests_that_fail_end_the_texts_that_were_begun(engine: Engine) -> None:
    handles: list[TextHandle] = []
    submit = engine._texts.submit

    def requests() -> Iterator[TextRequest]:
        yield text(engine, 1)
        raise OSError("the file is gone")

    def noted(*arguments: Any, **named: Any) -> TextHandle:
        handles.append(submit(*arguments, **named))
        return handles[-1]

    engine._texts.submit = noted
    try:
        with pytest.raises(OSError, match="gone"):
            list(engine.generate_many(requests()))
    finally:
        engine._texts.submit = submit
    engine.advance()
    assert [handle.is_done for handle in handles] == [True]


def test_each_iterator_has_all_pieces_whoever_else_waits(engine: Engine) -> None:
    for _ in range(5):
        handle = engine.submit(text(engine, max_new_tokens=40))
        seen: list[list[int]] = [[], []]

        def iterate(tokens: list[int], handle: TextHandle = handle) -> None:
            for chunk in handle:
                tokens.extend(chunk.token_ids)
                time.sleep(0.001)

        threads = [threading.Thread(target=iterate, args=(tokens,)) for tokens in seen]
        threads.append(threading.Thread(target=handle.result))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert seen == [list(handle.result().token_ids)] * 2


def test_waiting_within_a_pass_is_refused_and_asking_is_not(engine: Engine) -> None:
    expected = engine.submit(text(engine, 2)).result().token_ids
    waited, asked = list[EdgespecError](), list[TextHandle]()

    def ask(_done: int, _of: int) -> None:
        if not asked:
            asked.append(engine.submit(text(engine, 2)))
            with pytest.raises(EdgespecError, match="within a pass") as caught:
                asked[0].result()
            waited.append(caught.value)

    engine.generate(PROMPT, max_new_tokens=3, on_prefill=ask)
    assert [error.code for error in waited] == ["E_ENGINE"]
    assert asked[0].result().token_ids == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_at_once(engine: Engine) -> None:
    request = text(engine)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine.submit(request)
        except EdgespecError as error:
            status = 0 if error.code == "E_ENGINE" and "forked" in error.what else 2
            engine.close()
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_closing_ends_texts_that_other_threads_wait_for(pair_folders: tuple[Path, Path]) -> None:
    engine = Engine.from_pretrained(pair_folders[0], tree=None, context_tokens=250, self_check=False)
    handle = engine.submit(text(engine, max_new_tokens=200))
    caught: list[EdgespecError] = []

    def wait() -> None:
        try:
            handle.result()
        except EdgespecError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not handle.added:
        time.sleep(0.001)
    engine.close()
    thread.join(60)
    assert [error.code for error in caught] == ["E_ENGINE"]
    with pytest.raises(EdgespecError, match="closed"):
        engine.generate("ab")
    engine.close()  # a second time does nothing
