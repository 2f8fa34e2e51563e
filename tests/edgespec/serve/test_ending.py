"""A server that is told to end: streams have their last event, and a second Ctrl-C waits for nothing."""

import json
import signal
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from edgespec import Engine
from edgespec.model.causal_model import CausalModel
from edgespec.serve.run import Server
from tests.edgespec.serve.conftest import Started
from tests.support.running_server import running_server

ASKED: dict[str, Any] = {"max_tokens": 900, "stream": True}
MESSAGES = [{"role": "user", "content": "a"}]
LAYERS = 20  # of a slow pass, between which it may be left
Running = list[tuple[Server, threading.Thread]]
LAST = {  # path -> what the last line of a stream has
    "/v1/completions": "[DONE]", "/v1/chat/completions": "[DONE]", "/v1/messages": "message_stop",
    "/v1/responses": "response.incomplete",
}  # fmt: skip


def body_for(path: str) -> dict[str, Any]:
    match path:
        case "/v1/completions":
            return {**ASKED, "prompt": "a", "ignore_eos": True}
        case "/v1/responses":
            return {"input": "a", "max_output_tokens": 900, "stream": True}
        case "/v1/messages":
            return {**ASKED, "messages": MESSAGES}
        case _:
            return {**ASKED, "messages": MESSAGES, "ignore_eos": True}


def slow_down(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, pass_s: float) -> None:
    """Let each pass of the target take longer, as one that reads its layers does."""
    run = CausalModel._run

    def slowly(self: CausalModel, parts: Any, chunks: Any) -> Any:
        for _ in range(LAYERS if self is engine.target_model else 0):
            time.sleep(pass_s / LAYERS)
            if self.watch is not None:
                self.watch(0.0)
        return run(self, parts, chunks)

    monkeypatch.setattr(CausalModel, "_run", slowly)


@pytest.mark.parametrize("path", sorted(LAST))
def test_a_server_that_ends_cuts_no_stream(
    start: Started, running: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    _, address = start(heartbeat_s=10.0)
    slow_down(engine, monkeypatch, pass_s=0.3)
    data: list[str] = []
    with httpx.stream("POST", address + path, json=body_for(path), timeout=60) as found:
        for line in found.iter_lines():
            if line.startswith("data: "):
                data.append(line[6:])
            if len(data) == 4:
                running[-1][0].stop()
    assert (data[-1] if data[-1] == "[DONE]" else json.loads(data[-1])["type"]) == LAST[path]
    assert len(data) < 300  # it did not go on to its own end
    running[-1][1].join(20)
    assert not running[-1][1].is_alive()


def test_a_second_stop_waits_for_no_pass(
    start: Started, running: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = start()
    slow_down(engine, monkeypatch, pass_s=2.0)
    server, thread = running[-1]
    with httpx.stream("POST", f"{address}/v1/completions", json=body_for("/v1/completions"), timeout=60) as found:
        next(found.iter_lines())  # and the rest stays unread
        server.stop()
        server.stop(at_once=True)
        began = time.monotonic()
        thread.join(20)
        assert not thread.is_alive()
        assert time.monotonic() - began < 1.5


def test_the_first_stop_waits_for_no_prompt(
    start: Started, running: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = start()
    engine.forget()
    slow_down(engine, monkeypatch, pass_s=20.0)
    server, thread = running[-1]
    with httpx.stream("POST", f"{address}/v1/completions", json=body_for("/v1/completions"), timeout=60) as found:
        lines = found.iter_lines()
        next(lines)  # that it is being read
        server.stop()
        began = time.monotonic()
        assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
        thread.join(20)
        assert not thread.is_alive()
        assert time.monotonic() - began < 4


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals there")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_the_stream_of_a_process_with_its_last_event(
    number: signal.Signals, code: int, warm: list[str]
) -> None:
    data: list[str] = []
    body = {**body_for("/v1/completions"), "max_tokens": -1, "stream_options": {"include_usage": True}}
    with running_server("-c", "4k", python=warm) as (address, process):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as found:
            for line in found.iter_lines():
                if line.startswith("data: "):
                    data.append(line[6:])
                if len(data) == 4:
                    process.send_signal(number)
        assert process.wait(30) == code
    *_, last, usage, end = data
    assert end == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["completion_tokens"] < 4000  # it did not go on to its own end
