"""A server in a process of its own, for checks of it."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import httpx

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if add_day %}Monday\n{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)

START_S = 300


@contextmanager
def running_server(
    *options: str, output: int | IO[bytes] = subprocess.DEVNULL, python: Sequence[str] = (sys.executable,)
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start `edgespec serve` on a free port; yields its address and process, and stops it at the end."""
    port = free_port()
    with running([*python, "-m", "edgespec", "serve", "--port", str(port), *options], port, output) as started:
        yield started


@contextmanager
def running(
    command: Sequence[str], port: int, output: int | IO[bytes] = subprocess.DEVNULL
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server; yields its address on the loopback, once it answers there, and its process."""
    with subprocess.Popen(command, stderr=output, stdout=subprocess.DEVNULL) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address, process)
            yield address, process
        finally:
            process.terminate()


def free_port() -> int:
    """Return a port of the loopback that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def chunks_of(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the chunks of an answer that is streamed in OpenAI's form."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < ends:
        try:  # the socket listens long before the engine is there
            httpx.get(f"{address}/health", timeout=START_S).raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit(f"the server did not start: {process.args}")
