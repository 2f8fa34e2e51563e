"""Attacks on a running `edgespec serve`, what comes back, and whether a good client is served meanwhile.

    python -m tests.fuzz.attack_server

That takes two minutes, most of them limits of time that are waited for.
The built-in pair on the loopback with a chat template, once open and once with a key. A good client asks for a text
again and again while an attack lasts; its slowest answer is printed. Exits 1 where an attack gets another answer than
it has to, a good client gets none, or waits longer than a limit that is far above what a busy machine needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.running_server import TEMPLATE, running_server

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 4, "seed": 1}
KEY = "a key of some length"
NUM_CONNECTIONS = 1000
BODY_BYTES = 1_300_000  # which a server with a context of 4,096 tokens reads
CLOSED = "closed"
WAIT_S = 100.0  # for the slowest of the server's own limits
PATIENCE_S = 15.0  # of a good client
BETWEEN_S = 0.1  # a good client's requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What is sent, and what has to come back."""

    name: str
    send: Callable[[str], str]  # an address -> what came back
    expected: tuple[str, ...]  # beginnings of what may come back
    has_key: bool = False  # the server has one


def raw(content: bytes, *, trickle: bytes = b"") -> Callable[[str], str]:
    """Send bytes as they are, then others again and again, until the server answers or closes."""

    def send(address: str) -> str:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=0.2) as client:
            with contextlib.suppress(OSError):
                client.sendall(content)
            started, received = time.monotonic(), b""
            while time.monotonic() - started < WAIT_S:
                try:
                    part = client.recv(4096)
                    received += part
                    if not part or b"\r\n" in received:
                        break
                except TimeoutError:
                    with contextlib.suppress(OSError):
                        client.sendall(trickle)
                except OSError:
                    break
            seconds = time.monotonic() - started
        status = received.split(b" ", 2)[1].decode() if received else CLOSED
        return f"{status} after {seconds:.0f} s" if seconds > 1 else status

    return send


def asked(path: str = CHAT, method: str = "POST", **options: object) -> Callable[[str], str]:
    """Send a request and return its status."""

    def send(address: str) -> str:
        given = {"json": BODY, **options} if method == "POST" and "content" not in options else options
        return str(httpx.request(method, address + path, timeout=WAIT_S, **given).status_code)  # type: ignore[arg-type]

    return send


def connections(content: bytes) -> Callable[[str], str]:
    """Open many connections that say the same and then nothing, and see how many are left when one more has asked."""

    def send(address: str) -> str:
        host, port = address.removeprefix("http://").split(":")
        with ExitStack() as opened:
            all_of_them = []
            for _ in range(NUM_CONNECTIONS):
                one = opened.enter_context(socket.create_connection((host, int(port)), timeout=5))
                with contextlib.suppress(OSError):
                    one.sendall(content)
                all_of_them.append(one)
            status = asked()(address)
            time.sleep(1)
            return f"{status}, {sum(map(is_open, all_of_them))} left open"

    return send


def is_open(client: socket.socket) -> bool:
    """Return whether the server has left a connection open."""
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def filled(head: str, item: str, tail: str) -> Callable[[str], str]:
    """Send a chat's body that a list fills up to what is read."""
    content = head + ",".join([item] * ((BODY_BYTES - 100) // (len(item) + 1))) + tail
    return asked(content=content.encode())


def marked_up(address: str) -> str:
    """Ask for a text with markup in it: it comes as JSON, which no browser takes for a page."""
    body = {"prompt": "<script>alert(1)</script>", "max_tokens": 1, "echo": True}
    found = httpx.post(f"{address}/v1/completions", json=body)
    kind = found.headers["content-type"], found.headers.get("x-content-type-options")
    return f"{kind[0]}, {kind[1]}"


def attacks() -> list[Attack]:
    """All attacks."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    mebibyte = b"100000\r\n" + b" " * 0x100000 + b"\r\n"  # in one chunk
    foreign, refused = {"origin": "https://foreign.example"}, ("400", "404")
    return [
        Attack(name="rebound name (Host)", send=asked(headers={"host": "rebound.example"}), expected=("403",)),
        Attack(name="foreign page (Origin)", send=asked(headers=foreign), expected=("403",)),
        Attack(name="foreign page's preflight", send=asked(method="OPTIONS", headers=foreign), expected=("403",)),
        Attack(name="form of a foreign page, text/plain", expected=("403",),
               send=asked(content=b"{}", headers={"origin": "null", "content-type": "text/plain"})),
        Attack(name="no key", send=asked(), expected=("401",), has_key=True),
        Attack(name="wrong key", send=asked(headers={"authorization": "Bearer no"}), expected=("401",), has_key=True),
        Attack(name="rebound name with the key", expected=("200",), has_key=True,
               send=asked(headers={"host": "rebound.example", "authorization": f"Bearer {KEY}"})),
        Attack(name="body of 17 MiB, declared", send=asked(content=b" " * (17 << 20)), expected=("413",)),
        Attack(name="body without an end, in chunks", expected=("413", CLOSED),
               send=raw(head + b"Transfer-Encoding: chunked\r\n\r\n", trickle=mebibyte)),
        Attack(name="body that does not come", send=raw(head + b"Content-Length: 10\r\n\r\n{"), expected=("408",)),
        Attack(name="body byte by byte", send=raw(head + b"Content-Length: 100000\r\n\r\n", trickle=b" "),
               expected=("408",)),
        Attack(name="headers that do not come", send=raw(b"POST "), expected=(CLOSED,)),
        Attack(name="headers line by line", send=raw(head, trickle=b"X-A: b\r\n"), expected=(CLOSED, "400")),
        Attack(name="10,000 headers", send=raw(head + b"X-A: b\r\n" * 10_000 + b"\r\n"), expected=("400", "431")),
        Attack(name="a header of 40 kB", send=asked(headers={"x-long": "x" * 40_000}), expected=("431",)),
        Attack(name="10,000 headers without a value", send=raw(head + b"A:\r\n" * 10_000 + b"\r\n"), expected=("431",)),
        Attack(name="two names (Host)", send=raw(head + b"Host: localhost\r\n\r\n"), expected=("400",)),
        Attack(name="a rebound name as target", expected=("403", "404"),
               send=raw(b"GET http://rebound.example/props HTTP/1.1\r\nHost: rebound.example\r\n\r\n")),
        Attack(name="NUL in a header", send=raw(head + b"X-A: \x00\r\n\r\n"), expected=("400",)),
        Attack(name="TRACE", send=asked(path="/props", method="TRACE"), expected=("405",)),
        Attack(name="a WebSocket", expected=("404", "405"), send=asked(path="/v1/models/x", method="GET", headers={
            "connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x" * 24})),
        Attack(name="two lengths", expected=("400",),
               send=raw(head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}")),
        Attack(name="a length and chunks", expected=("400",),
               send=raw(head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")),
        Attack(name="no HTTP", send=raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), expected=("400",)),
        *(Attack(name=f"path {path}", send=asked(path=path, method="GET"), expected=refused)
          for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/..%2fetc", "/%00", "//etc")),
        Attack(name="100,000 brackets", send=asked(content=b"[" * 100_000), expected=("400",)),
        Attack(name="markup in an answer", send=marked_up, expected=("application/json, nosniff",)),
        Attack(name="300,000 messages that are none", send=filled('{"messages":[', "{}", "]}"), expected=("400",)),
        Attack(name="600,000 numbers as messages", send=filled('{"messages":[', "1", "]}"), expected=("400",)),
        Attack(name="600,000 token ids", expected=("400",),
               send=asked(path="/v1/completions", content=b'{"prompt":[' + b"5," * 600_000 + b"5]}")),
        Attack(name="100,000 keys, one of them twice", expected=("400",),
               send=asked(content=json.dumps({str(n): 1 for n in range(100_000)})[:-1].encode() + b',"99999":1}')),
        Attack(name="a message of 1.2 MB", send=filled('{"messages":[{"role":"user","content":"', "a b", '"}]}'),
               expected=("400",)),
        Attack(name="a schema of 15,000 properties", expected=("400",),
               send=asked(json={**BODY, "json_schema": {"properties": {f"p{n}": {} for n in range(15_000)}}})),
        Attack(name="a chat template of the client's", expected=("400",),
               send=asked(json={**BODY, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}})),
        Attack(name="128 samples", send=asked(json={**BODY, "n": 128}), expected=("429",)),
        Attack(name=f"{NUM_CONNECTIONS:,} silent connections", send=connections(b""), expected=("200",)),
        Attack(name=f"{NUM_CONNECTIONS:,} unfinished headers", send=connections(head), expected=("200",)),
        Attack(name=f"{NUM_CONNECTIONS:,} unfinished bodies", expected=("200",),
               send=connections(head + b"Content-Length: 10\r\n\r\n{")),
    ]  # fmt: skip


def good_client(address: str, ends: threading.Event) -> tuple[set[int], float]:
    """Ask again and again; returns which statuses came, and the seconds of the slowest answer."""
    statuses, slowest_s = set(), 0.0
    while True:
        is_last, began = ends.is_set(), time.monotonic()
        headers = {"authorization": f"Bearer {KEY}"}
        try:
            statuses.add(httpx.post(address + CHAT, json=BODY, headers=headers, timeout=WAIT_S).status_code)
        except httpx.TransportError:
            statuses.add(0)
        slowest_s = max(slowest_s, time.monotonic() - began)
        if is_last:
            return statuses, slowest_s
        ends.wait(BETWEEN_S)


def main() -> None:
    """Make all attacks in turn."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as other:
        key, template = Path(folder) / "key", Path(folder) / "template.jinja"
        key.write_text(KEY, encoding="utf-8")
        template.write_text(TEMPLATE, encoding="utf-8")
        options = ["--chat-template", str(template)]
        with (
            running_server(*options) as (open_address, _),
            running_server(*options, "--api-key-file", str(key)) as (locked, _),
        ):
            wrong = 0
            print(f"{'attack':40} {'came back':30} a good client meanwhile")
            for attack in attacks():
                address, ends = locked if attack.has_key else open_address, threading.Event()
                good = other.submit(good_client, address, ends)
                try:
                    found = attack.send(address)
                except httpx.TransportError as error:
                    found = f"{CLOSED} ({type(error).__name__})"
                ends.set()
                statuses, slowest_s = good.result()
                is_served = statuses == {httpx.codes.OK} and slowest_s < PATIENCE_S
                is_right = found.startswith(attack.expected) and is_served
                wrong += not is_right
                said = f"{', '.join(map(str, sorted(statuses)))} within {slowest_s:.1f} s"
                print(f"{attack.name:40} {found:30} {said}{'' if is_right else '   WRONG'}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
