"""Turns of several conversations read what is new of them, also after a restart, and say what a fresh engine says."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec import Engine
from edgespec.chat.chat_template import Message, plain_ids
from edgespec.model.text_cache import shared_length
from edgespec.prefix_cache.prompt_cache import PromptCache, TextRows
from edgespec.prefix_cache.slots import Slots
from edgespec.serve.request_queue import RequestQueue
from edgespec.tree.settings import TreeSettings
from tests.edgespec.serve.conftest import close_server, open_server

SYSTEM = "import os\n\n\ndef total(values):\n    found = 0\n    for value in values:\n        found += value\n"
FIRST = ("\nclass Parser:\n    def __init__(self, text):\n", "\n    def read(self):\n", "\n    def close(self):\n")
SECOND = (
    "\ndef main(arguments):\n    path = arguments.path\n",
    "\n    return path\n",
    "\nif __name__ == '__main__':\n",
)
DRAWN: dict[str, Any] = {"seed": 5, "temperature": 0.9}
NUM_TOKENS = 24


@contextmanager
def client_of(engine: Engine) -> Iterator[httpx.Client]:
    _, server, thread = open_server(engine)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
            yield client
    finally:
        close_server(server, thread)


class Talk:
    """A conversation with a server, which is compared to an engine that keeps no rows."""

    def __init__(self, fresh: Engine, system: str) -> None:
        self.fresh, self.said = fresh, [Message(role="system", content=system)]
        self.asked: list[int] = []  # its last prompt
        self.ids: list[int] = []  # with the answer: the rows of all but the last are kept

    def turn(self, client: httpx.Client, question: str) -> tuple[list[int], int]:
        """Return the prompt's ids, and how many of them were not read again."""
        self.said.append(Message(role="user", content=question))
        ids = plain_ids(self.fresh.pair.tokenizer, self.said)
        expected = self.fresh.generate(ids, max_new_tokens=NUM_TOKENS, **DRAWN)
        messages = [{"role": message.role, "content": message.content} for message in self.said]
        body = {"model": "any", "messages": messages, "max_tokens": NUM_TOKENS, **DRAWN}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        content = answer["choices"][0]["message"]["content"]
        assert content == expected.text
        usage, timings = answer["usage"], answer["timings"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_tokens"] == len(ids)
        assert (timings["cache_n"], timings["prompt_n"]) == (num_cached, len(ids) - num_cached)
        self.said.append(Message(role="assistant", content=content))
        self.asked, self.ids = ids, [*ids, *expected.token_ids]
        return ids, num_cached


@pytest.fixture(scope="module")
def fresh() -> Iterator[Engine]:
    """An engine that grows no trees, and begins each text with nothing."""
    with Engine.from_pretrained(context_tokens=1024, tree=TreeSettings(policy="none")) as engine:
        yield engine


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Engine, httpx.Client]]:
    """A server over the built-in pair that uses a folder, and writes it at its end, as `edgespec serve` does."""
    with Engine.from_pretrained(parallel=2, context_tokens=1024) as engine:
        engine.prefix_cache.slots = Slots(folder, engine.pair, engine.run_config)
        with client_of(engine) as client:
            yield engine, client
        engine.prefix_cache.store()


def test_turns_of_two_conversations_read_what_is_new_also_after_a_restart(fresh: Engine, tmp_path: Path) -> None:
    talks = [Talk(fresh, SYSTEM), Talk(fresh, SYSTEM)]

    def ask(client: httpx.Client, talk: Talk, question: str) -> None:
        kept = [one.ids[:-1] for one in talks]
        ids, num_cached = talk.turn(client, question)
        assert num_cached == max(shared_length(rows, ids[:-1]) for rows in kept)

    with opened(tmp_path) as (engine, client):
        for questions in zip(FIRST[:2], SECOND[:2], strict=True):
            for talk, question in zip(talks, questions, strict=True):
                ask(client, talk, question)
        props = client.get("/props").json()
        assert props["kept"]["texts"] == len(engine.prefix_cache) == 2
        assert props["kept"]["tokens"] == sum(len(talk.ids) - 1 for talk in talks)
        assert props["kept"]["most_tokens"] == 2048
    with opened(tmp_path) as (_, client):
        assert client.get("/props").json()["slots"]["conversations"] == 2
        for talk, question in zip(talks, (FIRST[2], SECOND[2]), strict=True):
            ask(client, talk, question)


def test_texts_go_on_while_a_file_is_written(fresh: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end, write = threading.Event(), threading.Event(), PromptCache.write
    ends: list[bool] = []

    def slowly(file: PromptCache, rows: TextRows) -> None:
        has_begun.set()
        ends.append(may_end.wait(20))
        write(file, rows)

    monkeypatch.setattr(RequestQueue.__init__, "__kwdefaults__", {"idle_s": 0.05})
    monkeypatch.setattr(PromptCache, "write", slowly)
    talk = Talk(fresh, SYSTEM)
    with opened(tmp_path) as (_, client):
        talk.turn(client, FIRST[0])
        assert has_begun.wait(20)
        before = talk.ids
        ids, num_cached = talk.turn(client, FIRST[1])
        assert num_cached == shared_length(before[:-1], ids)
        may_end.set()
    assert all(ends)
    with opened(tmp_path) as (_, client):
        before = talk.ids
        ids, num_cached = talk.turn(client, FIRST[2])
        assert num_cached == shared_length(before[:-1], ids)


def test_rows_stay_within_their_memory_and_the_oldest_go(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(engine) as client:

        def ask(text: str) -> tuple[int, dict[str, int]]:
            body = {"prompt": text, "max_tokens": 4, "temperature": 0}
            found = client.post("/v1/completions", json=body).raise_for_status().json()
            return found["usage"]["prompt_tokens_details"]["cached_tokens"], client.get("/props").json()["kept"]

        first, second, sizes = SYSTEM * 2, "x = 1\n" * 40, []
        for text in (first, second):
            engine.prefix_cache.forget()
            sizes.append(ask(text)[1]["bytes"])
        monkeypatch.setattr(engine.prefix_cache, "most_bytes", max(sizes))
        for text in (first, second, first):
            num_cached, kept = ask(text)
            assert num_cached < 4  # of the other text
            assert (kept["texts"], 0 < kept["bytes"] <= kept["most_bytes"]) == (1, True)
        monkeypatch.setattr(engine.prefix_cache, "most_bytes", 3 * max(sizes))
        ask(second)
        assert ask(first)[0] > 4
        lines = client.get("/metrics").text.splitlines()
        numbers = dict(line.split(" ") for line in lines if line.startswith("edgespec_kept_"))
        assert float(numbers["edgespec_kept_bytes"]) == engine.prefix_cache.num_bytes
        assert "edgespec_kept_most_bytes" in numbers


@pytest.mark.parametrize("is_default", [True, False])
def test_a_server_may_read_prompts_anew_by_default_and_a_request_has_the_last_word(
    engine: Engine, is_default: bool
) -> None:
    said = [{"role": "user", "content": SYSTEM}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": SYSTEM, "max_tokens": 4},
        "/v1/chat/completions": {"messages": said, "max_tokens": 4},
        "/v1/responses": {"input": said, "max_output_tokens": 16},
        "/v1/messages": {"messages": said, "max_tokens": 4},
    }
    _, server, thread = open_server(engine, cache_prompt=is_default)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
            assert client.get("/props").json()["cache_prompt"] is is_default
            for path, body in bodies.items():
                wishes = [{}] if path in ("/v1/responses", "/v1/messages") else [{}, {"cache_prompt": not is_default}]
                client.post(path, json=body)
                for wish in wishes:
                    usage = client.post(path, json={**body, **wish}).json()["usage"]
                    found = usage if "cache_read_input_tokens" in usage else {}
                    for name in ("prompt_tokens_details", "input_tokens_details"):
                        found = usage.get(name) or found
                    num_cached = found.get("cached_tokens", found.get("cache_read_input_tokens"))
                    assert (num_cached > 10) is wish.get("cache_prompt", is_default), (path, wish, usage)
    finally:
        close_server(server, thread)
