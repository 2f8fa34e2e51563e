"""Conversations of clients go on after a restart, from files that are written while nobody asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from edgespec import Engine
from edgespec.prefix_cache.slots import Slots
from edgespec.serve.request_queue import RequestQueue
from tests.edgespec.serve.conftest import Started

CODE = "def total(values):\n    return sum(values)\n\n" * 6
WAIT_S = 20.0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine.from_pretrained(parallel=2, context_tokens=1024) as engine:
        engine.prefix_cache.slots = Slots(tmp_path, engine.pair, engine.run_config)
        yield engine


@pytest.fixture
def openai(start: Started) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{start()[1]}/v1", api_key="any", max_retries=0) as openai:
        yield openai


def test_rows_are_written_when_idle_and_a_turn_after_a_restart_reads_what_is_new(
    openai: OpenAI, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestQueue.__init__, "__kwdefaults__", {"idle_s": 0.1})
    asked: dict[str, Any] = {"model": "any", "max_tokens": 8, "seed": 1}
    said: list[Any] = [{"role": "user", "content": CODE}]
    answer = openai.chat.completions.create(messages=said, **asked).choices[0].message.content
    until = time.monotonic() + WAIT_S
    while not list(tmp_path.glob("*.rows.safetensors")) and time.monotonic() < until:
        time.sleep(0.05)
    engine.forget()
    engine.prefix_cache.slots = Slots(tmp_path, engine.pair, engine.run_config)  # as a new process does
    said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "class Total:"}]
    usage = openai.chat.completions.create(messages=said, **asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    num_read = usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0)
    assert usage.prompt_tokens > 90
    assert num_read < 30
