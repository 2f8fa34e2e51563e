"""What short requests wait for beside a long prompt, and what clients that leave leave to others.

    python -m scripts.bench.waiting gemma-3-270m-Q4_K_M.gguf --tokens 2000 12000
    python -m scripts.bench.waiting gemma-3-270m-Q4_K_M.gguf --tokens 2000 12000 --streamed
    python -m scripts.bench.waiting --tokens 40000                    a small random model with as long a context
    python -m scripts.bench.waiting ... --source ../other             the server of another checkout

A server of its own reads one long prompt of random tokens, alone: tokens/s. Then a client sends another one, and short
requests (8 tokens in, 2 out) come one after the other until it is read: their number, and the seconds of the median
and of the slowest. Then a long prompt comes with a text that writes: all tokens, read and written, over the seconds
until both have ended. At last the sender of a long prompt leaves after a part of what it takes alone, and a short
request comes behind it; then SIGTERM comes while another is read: seconds until the process has ended. Prints a line
a length, and one JSON line.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from edgespec.pair.pair import DEMO_FOLDER
from tests.support.running_server import free_port, running

TIMEOUT_S = 600
SHORT_TOKENS, WRITTEN_TOKENS = 8, 48
CONTEXT_BEYOND = 256
FIRST_ID, LAST_ID = 20, 1000  # of the random tokens
LEAVES_AT = 0.3  # of what the prompt takes alone
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class Clients:
    """The clients of one server."""

    def __init__(self, address: str, seed: int) -> None:
        self._url, self._random = f"{address}/v1/completions", random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        """Return random ids, which no prompt before has begun with."""
        return [self._random.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def ask(self, tokens: int, new: int, *, timeout_s: float = TIMEOUT_S) -> float:
        """Ask for new tokens behind a prompt, and return the seconds that it took."""
        body = {"prompt": self.prompt(tokens), "max_tokens": new, "temperature": 0, "ignore_eos": True}
        started = time.perf_counter()
        httpx.post(self._url, json=body, timeout=timeout_s).raise_for_status()
        return time.perf_counter() - started

    def beside(self, tokens: int) -> list[float]:
        """Return the seconds of short requests, one after the other, while a long prompt is read."""
        found = []
        with ThreadPoolExecutor(1) as other:
            long = other.submit(self.ask, tokens, 1)
            while not long.done():
                found.append(self.ask(SHORT_TOKENS, 2))
                time.sleep(0.05)
        return found

    def together(self, tokens: int) -> float:
        """Return the tokens a second of a long prompt and of a text that writes, which come together."""
        started = time.perf_counter()
        with ThreadPoolExecutor(2) as others:
            list(others.map(lambda sizes: self.ask(*sizes), [(SHORT_TOKENS, WRITTEN_TOKENS), (tokens, 1)]))
        return (tokens + SHORT_TOKENS + WRITTEN_TOKENS + 1) / (time.perf_counter() - started)

    def behind(self, tokens: int, *, after_s: float) -> float:
        """Return the seconds of a short request behind a long prompt whose sender has left."""
        try:
            self.ask(tokens, 1, timeout_s=after_s)
        except httpx.TimeoutException:
            return self.ask(SHORT_TOKENS, 2)
        return 0.0


def measured(address: str, process: subprocess.Popen[bytes], tokens: int) -> dict[str, Any]:
    """Return what clients of a server waited for; the server ends."""
    clients = Clients(address, tokens)
    for size in (SHORT_TOKENS, 700, SHORT_TOKENS):
        clients.ask(size, 8)  # the first text pays for what is made once
    short_s = min(clients.ask(SHORT_TOKENS, 2) for _ in range(3))
    alone_s = clients.ask(tokens, 1)
    beside = clients.beside(tokens)
    row = {
        "tokens": tokens, "short_alone_s": short_s, "long_alone_s": alone_s, "read_tokens_per_s": tokens / alone_s,
        "short_beside": len(beside), "median_beside_s": statistics.median(beside), "longest_beside_s": max(beside),
        "tokens_per_s_together": clients.together(tokens),
        "behind_left_s": clients.behind(tokens, after_s=LEAVES_AT * alone_s),
    }  # fmt: skip
    threading.Thread(target=_ask_in_vain, args=(clients, tokens), daemon=True).start()
    time.sleep(LEAVES_AT * alone_s)
    process.send_signal(signal.SIGTERM)
    started = time.perf_counter()
    process.wait(TIMEOUT_S)
    return {**row, "ends_in_s": time.perf_counter() - started}


def _ask_in_vain(clients: Clients, tokens: int) -> None:
    try:
        clients.ask(tokens, 1)
    except httpx.HTTPError:
        return  # the server ends


def small_model(folder: Path, context: int) -> Path:
    """Make a random model with the built-in pair's tokens and so long a context."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=context)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(model: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a server for each length, and print a line for each."""
    rows = []
    for tokens in arguments.tokens:
        port = free_port()
        command = [sys.executable, "-P", "-m", "edgespec", "serve", "--port", str(port), "-m", str(model)]
        command += ["-md", "none", "-c", str(tokens + CONTEXT_BEYOND), "-np", "4"]
        command += ["-ngl", "0"] if arguments.streamed else []
        with running(command, port) as (address, process):
            row = {"model": model.name, "streamed": arguments.streamed, **measured(address, process, tokens)}
        print(
            f"{tokens:7} {row['long_alone_s']:8.2f} {row['read_tokens_per_s']:8.0f} {row['short_alone_s']:8.2f} "
            f"{row['short_beside']:7} {row['median_beside_s']:8.2f} {row['longest_beside_s']:8.2f} "
            f"{row['tokens_per_s_together']:9.0f} {row['behind_left_s']:8.2f} {row['ends_in_s']:8.2f}",
            flush=True,
        )
        rows.append(row)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    """All lengths, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=Path, nargs="?", help="a model with a long context; a small random one if left out"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 12000])
    parser.add_argument("--streamed", action="store_true", help="keep no layer in memory")
    parser.add_argument("--source", type=Path, help="a checkout whose server is measured in the place of this one's")
    arguments = parser.parse_args(given)
    if arguments.source is not None:
        os.environ["PYTHONPATH"] = str(arguments.source.resolve())
    print(f"{'tokens':>7} {'alone s':>8} {'tok/s':>8} {'short s':>8} {'beside':>7} {'median s':>8} {'most s':>8} "
          f"{'both tok/s':>9} {'left s':>8} {'ends s':>8}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or small_model(Path(folder) / "small", max(arguments.tokens) + CONTEXT_BEYOND)
        print(json.dumps(rows_of(model, arguments)))


if __name__ == "__main__":
    main()
