"""`edgespec serve` in a process of its own, for checks of it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import httpx

START_S = 300


@contextmanager
def running_server(
    *options: str, output: int | IO[bytes] = subprocess.DEVNULL
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server on a free port of the loopback; yields its address and process, and stops it at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "edgespec", "serve", "--port", str(port), *options]
    with subprocess.Popen(command, stderr=output, stdout=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address, process)
            yield address, process
        finally:
            process.terminate()


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < ends:
        try:  # the socket listens long before the engine is there
            httpx.get(f"{address}/health", timeout=START_S).raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server did not start")
