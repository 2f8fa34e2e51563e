"""Many clients of `edgespec serve`, of which some read slowly and some leave: what stays behind, and is it right?

    python -m tests.fuzz.load_server                  sixteen clients, five minutes
    python -m tests.fuzz.load_server --minutes 2

The built-in pair on the loopback. Clients come in rounds; after each, when all are gone, a line has the server's
memory, threads, open files, and texts that still run. Every whole text is compared with the engine's own of its seed.
Exits 1 where a text differs, an answer is an unexpected one, or something grows from the second round to the last.
"""

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import psutil

from edgespec import Engine
from edgespec.cli.prompts.read import read_prompts
from edgespec.pair.pair import DEMO_FOLDER
from tests.support.running_server import chunks_of, running_server

CLIENTS = 16
ROUND_S = 20.0
NUM_TOKENS = 48
CONTEXT = "1024"
SEEDS = range(4)
NUM_PROMPTS = 4
LEAVES, IS_SLOW = 0.3, 0.3  # shares of the clients
SLOW_S = 0.1  # before each part that a slow client reads
NUM_TOKENS_OF_THE_LEFT = 900  # which would take far longer than QUIET_S, were they not ended
QUIET_S = 5.0  # in which the last texts have to end
MOST_GROWTH_BYTES = 32 << 20  # from the middle round to the last: what is kept, and pools, fill in the first half
MOST_MORE_THREADS = 4  # likewise: a pool starts another one where requests come at the same moment

Texts = dict[tuple[str, int], str]  # prompt, seed -> the engine's own text


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What the server has when no client is there."""

    memory_bytes: int
    threads: int
    files: int
    texts: int


def own_texts() -> Texts:
    """Return what an engine writes for each prompt and seed."""
    prompts = [str(row.prompt) for row in read_prompts(str(DEMO_FOLDER / "prompts.jsonl"))][:NUM_PROMPTS]
    with Engine.from_pretrained(context_tokens=int(CONTEXT)) as engine:
        return {
            (prompt, seed): engine.generate(prompt, max_new_tokens=NUM_TOKENS, seed=seed, temperature=0.8).text
            for prompt in prompts
            for seed in SEEDS
        }


def one_client(address: str, expected: Texts, random_source: random.Random) -> str:
    """Ask for a text, and read it whole, slowly or in part; returns what came of it."""
    prompt, seed = random_source.choice(sorted(expected))
    leaves, is_slow = random_source.random() < LEAVES, random_source.random() < IS_SLOW
    num_read = random_source.randrange(8) if leaves else sys.maxsize
    num_tokens = NUM_TOKENS_OF_THE_LEFT if leaves else NUM_TOKENS
    body = {
        "prompt": prompt,
        "seed": seed,
        "max_tokens": num_tokens,
        "temperature": 0.8,
        "stream": True,
        "ignore_eos": leaves,
    }
    text = ""
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=120) as response:
        if response.status_code != httpx.codes.OK:
            return f"status {response.status_code}"
        for chunk in chunks_of(response):
            text += "".join(choice["text"] for choice in chunk["choices"])
            num_read -= 1
            if num_read < 0:
                return "left"
            if is_slow:
                time.sleep(SLOW_S)
    return "whole and equal" if text == expected[prompt, seed] else "DIFFERENT"


def left_behind(address: str, process: psutil.Process) -> Left:
    """Return what the server has once no text runs any more, or after QUIET_S."""
    ends = time.monotonic() + QUIET_S
    while (texts := httpx.get(f"{address}/props").json()["texts"]["open"]) and time.monotonic() < ends:
        time.sleep(0.1)
    return Left(
        memory_bytes=process.memory_info().rss,
        threads=process.num_threads(),
        files=process.num_fds() if hasattr(process, "num_fds") else process.num_handles(),
        texts=texts,
    )


def main() -> None:
    """Let clients come and go, and look at what they leave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    expected = own_texts()
    counts: Counter[str] = Counter()
    found: list[Left] = []
    with running_server("-c", CONTEXT, "-np", "4") as (address, server), ThreadPoolExecutor(CLIENTS) as clients:
        process = psutil.Process(server.pid)
        ends = time.monotonic() + 60 * arguments.minutes

        def come(client: int) -> Counter[str]:
            source, met = random.Random(f"{arguments.seed} {client} {len(found)}"), Counter[str]()
            until = time.monotonic() + ROUND_S
            while time.monotonic() < until:
                met[one_client(address, expected, source)] += 1
            return met

        while len(found) < 3 or time.monotonic() < ends:
            for met in clients.map(come, range(CLIENTS)):
                counts += met
            found.append(left_behind(address, process))
            now = found[-1]
            print(
                f"round {len(found)}: {now.memory_bytes >> 20} MiB, {now.threads} threads, {now.files} files, "
                f"{now.texts} texts run; {dict(counts)}",
                flush=True,
            )
    middle, last = found[len(found) // 2], found[-1]
    grows = {
        "memory": last.memory_bytes > middle.memory_bytes + MOST_GROWTH_BYTES,
        "threads": last.threads > middle.threads + MOST_MORE_THREADS,
        "files": last.files > max(left.files for left in found[: len(found) // 2 + 1]),
        "texts": last.texts > 0,
    }
    wrong = [name for name, is_wrong in grows.items() if is_wrong]
    wrong += [name for name in counts if name not in {"whole and equal", "left"}]
    print(f"wrong: {', '.join(wrong)}" if wrong else "nothing stays behind, and every whole text is the engine's own")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
