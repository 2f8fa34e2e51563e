"""What a hostile client or page gets from `edgespec serve`, and whether a good client is served meanwhile.

    python -m scripts.check.attack_server

A server with the built-in pair on the loopback, without a key and with one. Prints a line an attack: what came back,
and the status that a good client got while the attack was on. Exits 1 where an answer is not the one to expect.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.check.running_server import running_server

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 4, "seed": 1}
KEY = "a key of some length"
NUM_CONNECTIONS = 1000
CLOSED = "closed"
WAIT_S = 100.0  # for the slowest of the server's own limits


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


def connections(address: str) -> str:
    """Open many connections that say nothing, and ask on one more."""
    host, port = address.removeprefix("http://").split(":")
    with ExitStack() as opened:
        for _ in range(NUM_CONNECTIONS):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=5))
        return asked()(address)


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
        Attack(name="two lengths", expected=("400",),
               send=raw(head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}")),
        Attack(name="a length and chunks", expected=("400",),
               send=raw(head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")),
        Attack(name="no HTTP", send=raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), expected=("400",)),
        *(Attack(name=f"path {path}", send=asked(path=path, method="GET"), expected=refused)
          for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/..%2fetc", "/%00", "//etc")),
        Attack(name="100,000 brackets", send=asked(content=b"[" * 100_000), expected=("400",)),
        Attack(name="markup in an answer", send=marked_up, expected=("application/json, nosniff",)),
        Attack(name=f"{NUM_CONNECTIONS:,} silent connections", send=connections, expected=("200",)),
    ]  # fmt: skip


def main() -> None:
    """Make all attacks in turn."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.write_text(KEY, encoding="utf-8")
        with running_server() as (open_address, _), running_server("--api-key-file", str(key)) as (locked, _):
            wrong = 0
            print(f"{'attack':40} {'came back':30} a good client then")
            for attack in attacks():
                address = locked if attack.has_key else open_address
                try:
                    found = attack.send(address)
                except httpx.TransportError as error:
                    found = f"{CLOSED} ({type(error).__name__})"
                headers = {"authorization": f"Bearer {KEY}"}
                good = httpx.post(address + CHAT, json=BODY, headers=headers, timeout=60).status_code
                is_right = found.startswith(attack.expected) and good == httpx.codes.OK
                wrong += not is_right
                print(f"{attack.name:40} {found:30} {good}{'' if is_right else '   WRONG'}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
