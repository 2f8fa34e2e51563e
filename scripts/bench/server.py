"""Several clients of one server, whose model is read from the disk in each pass, against one client after another.

    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.server large                          1, 4 and 16 clients; 4 in turn; transformers' server
    python -m scripts.bench.server large --clients 1 4 --in-turn 2 -n 8 --without-transformers
    python -m scripts.bench.server large --address http://127.0.0.1:8000     a server that runs already, alone

edgespec keeps no layer, and what was read for one pass serves no later one, as in bench.batch. The same prompts
go to `transformers serve`, where it runs (pip install fastapi uvicorn rich). It holds the whole model in memory: it
cannot do otherwise, so its numbers are those of a machine that the model fits. With --address another server of
OpenAI's form is measured, as `transformers serve --continuous-batching`, vLLM's or llama.cpp's; its clients name the
model as it is given here. Clients come at once, or in turn, each with a prompt of its own, greedily; a text that ends
early has fewer tokens. Seconds to the first token count from when all clients came. Prints a table, in which these are
the median and the longest, and one JSON line.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from edgespec import Engine, MemoryLimits
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.serve.listen import listen
from edgespec.serve.request_queue import RequestQueue
from edgespec.serve.run import Server
from edgespec.serve.settings import ServerSettings
from scripts.situations import SEED, cut_texts, drop_behind_reader, held_out_halves
from tests.support.running_server import chunks_of, free_port, running

TIMEOUT_S = 600
CONTEXT_BEYOND = 64  # tokens: a prompt's text may be cut into a few more


def serve(arguments: argparse.Namespace) -> None:
    """Be edgespec's server until it is told to end."""
    torch.set_num_threads(arguments.threads)
    pair = open_pair(arguments.model, DEMO_FOLDER / "draft")
    drop_behind_reader(pair)
    settings = ServerSettings(port=arguments.serve)
    with (
        listen(settings) as listening,
        Engine.from_pair(
            pair, limits=MemoryLimits(max_resident_layers=0), device="cpu", dtype=arguments.dtype,
            context_tokens=arguments.prompt_tokens + arguments.new_tokens + CONTEXT_BEYOND,
            parallel=max(arguments.clients),
        ) as engine,
    ):  # fmt: skip
        queue = RequestQueue(engine, max_waiting=settings.max_waiting, heartbeat_s=settings.heartbeat_s)
        Server(queue, settings, listening, on_request=lambda _line: None).run(lambda: None)


def one_client(address: str, body: dict[str, Any], came: float) -> tuple[int, float]:
    """Ask for a text; returns its tokens, and the seconds from when the client came to the first of them."""
    first_s, tokens = 0.0, 0
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        for said in chunks_of(answer):
            if not first_s and any(choice.get("text") for choice in said["choices"]):
                first_s = time.perf_counter() - came
            tokens = (said.get("usage") or {}).get("completion_tokens", tokens)
    return tokens, first_s


def measured(address: str, bodies: list[dict[str, Any]], *, at_once: int) -> dict[str, Any]:
    """Let clients come, so many at once; returns what they got."""
    came = time.perf_counter()
    with ThreadPoolExecutor(at_once) as clients:
        found = list(clients.map(lambda body: one_client(address, body, came), bodies))
    seconds, tokens = time.perf_counter() - came, sum(count for count, _ in found)
    return {
        "clients": len(bodies), "at_once": at_once, "tokens": tokens, "seconds": seconds,
        "tokens_per_s": tokens / seconds, "first_token_s": statistics.median(first for _, first in found),
        "last_first_token_s": max(first for _, first in found),
    }  # fmt: skip


def rows_of(
    name: str, address: str, bodies: list[dict[str, Any]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure a server with each number of clients, and print a line for each."""
    one_client(address, bodies[-1], time.perf_counter())  # the first text of all pays for what is made once
    rows = []
    for number, at_once in [(arguments.in_turn, 1), *((clients, clients) for clients in arguments.clients)]:
        row = measured(address, bodies[:number], at_once=at_once)
        rows.append({"server": name, **row})
        shown = f"{number} in turn" if at_once < number else str(number)
        print(f"{name:14} {shown:>10} {row['tokens']:7} {row['seconds']:8.1f} {row['tokens_per_s']:8.2f} "
              f"{row['first_token_s']:12.2f} {row['last_first_token_s']:9.2f}", flush=True)  # fmt: skip
    return rows


def commands(arguments: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """Return each system's command and port."""
    port, other = free_port(), free_port()
    systems = {"edgespec": ([sys.executable, "-m", "scripts.bench.server", *sys.argv[1:], "--serve", str(port)], port)}
    lacks = [name for name in ("fastapi", "uvicorn", "rich") if importlib.util.find_spec(name) is None]
    if lacks:
        print(f"no `transformers serve`: it needs {', '.join(lacks)}", file=sys.stderr)
    elif not arguments.without_transformers:
        options = ["--host", "127.0.0.1", "--port", str(other), "--device", "cpu", "--dtype", arguments.dtype]
        start = "from transformers.cli.transformers import main; main()"
        systems["transformers"] = ([sys.executable, "-c", start, "serve", str(arguments.model), *options], other)
    return systems


def main() -> None:
    """All systems in turn, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an inflated checkpoint of the built-in target")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="that come at once")
    parser.add_argument("--in-turn", type=int, default=4, help="clients of which each comes when the last one has gone")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", "-n", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--address", help="of a server that runs: it alone is measured")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    count = max(*arguments.clients, arguments.in_turn) + 1
    texts = cut_texts(held_out_halves()[1], count=count, tokens=arguments.prompt_tokens, seed=SEED)
    bodies = [
        {"model": str(arguments.model), "prompt": text, "max_tokens": arguments.new_tokens, "temperature": 0,
         "stream": True, "stream_options": {"include_usage": True}}
        for text in texts
    ]  # fmt: skip
    print(
        f"{'server':14} {'clients':>10} {'tokens':>7} {'seconds':>8} {'tok/s':>8} {'first token':>12} {'the last':>9}"
    )
    rows = []
    if arguments.address:
        rows += rows_of("by address", arguments.address.rstrip("/"), bodies, arguments)
    else:
        for name, (command, port) in commands(arguments).items():
            with running(command, port) as (address, _):
                rows += rows_of(name, address, bodies, arguments)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
