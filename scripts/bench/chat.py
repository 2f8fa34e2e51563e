"""What a conversation's next turn costs, and how long one waits for the first prompt.

    python -m scripts.bench.chat --tokens 2000

A first message of so many tokens is answered; then a second one, once behind what the caches hold and once from the
start, in turns, with the target resident and with every layer streamed: tokens read, and the time to the first token.
The answers must be equal. Then the start of `edgespec --help`, of `edgespec doctor`, and of `edgespec chat` in a
terminal up to its first prompt, each a process of its own, in turns. Prints medians and one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from edgespec import Engine, MemoryLimits, TreeSettings, __version__
from profiles.measure import machine_facts
from scripts.situations import GIB

ROOT = Path(__file__).parents[2]
READY = b"\x1b[?2004h"  # the line editor's first word
QUESTION = "def total(values):"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="the target. [default: the built-in pair]")
    parser.add_argument("-md", "--draft-model", type=Path)
    parser.add_argument("--tokens", type=int, default=2000, help="of the first message")
    parser.add_argument("--new-tokens", type=int, default=32, help="of every answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-start", action="store_true", help="leave the start-up times out")
    arguments = parser.parse_args()

    rows = [
        {"target": name, **second_turn(arguments, resident)} for name, resident in (("resident", None), ("streamed", 0))
    ]
    print(f"{'target':<10}{'turn 2':<8}{'prompt':>8}{'read':>8}{'kept':>8}{'first token':>14}")
    for row in rows:
        for name, read, first_s in (
            ("kept", row["read_tokens"], row["first_token_s"]),
            ("fresh", row["prompt_tokens"], row["fresh_first_token_s"]),
        ):
            kept = row["prompt_tokens"] - read
            print(f"{row['target']:<10}{name:<8}{row['prompt_tokens']:>8}{read:>8}{kept:>8}{first_s:>12.3f} s")
        print(f"{row['target']:<10}{row['fresh_first_token_s'] / row['first_token_s']:.1f} times sooner")
    starts = {} if arguments.no_start else start_times(arguments.repeats)
    for name, start in starts.items():
        took = (
            "not measured here" if start is None else f"{start['s']:.2f} s, {start['processor_s']:.2f} s of a processor"
        )
        print(f"{name:<32}{took}")
    print(json.dumps({"tokens": arguments.tokens, "turns": rows, "start_s": starts, "edgespec": __version__,
                      "threads": torch.get_num_threads(), "machine": asdict(machine_facts())}))  # fmt: skip
    return 0


def second_turn(arguments: argparse.Namespace, resident: int | None) -> dict[str, Any]:
    """Medians of a second turn's reading, behind kept rows and from the start."""
    kept_s, fresh_s = [], []
    with Engine.from_pretrained(
        arguments.model,
        draft=arguments.draft_model,
        tree=TreeSettings(),
        limits=MemoryLimits(max_resident_layers=resident),
        context_tokens=arguments.tokens + 4 * arguments.new_tokens + 64,
    ) as engine:
        tokenizer = engine.pair.tokenizer
        text = str(tokenizer.decode(tokenizer.encode(long_text()[: 20 * arguments.tokens])[: arguments.tokens]))
        for _ in range(arguments.repeats):
            engine.forget()
            chat = engine.chat(temperature=0, max_new_tokens=arguments.new_tokens)
            chat.send(text)
            kept = chat.send(QUESTION)
            prompt = chat.prompt_ids(chat.messages[:-1])
            fresh = engine.generate(prompt, max_new_tokens=arguments.new_tokens, temperature=0)
            if fresh.token_ids != kept.token_ids:
                raise SystemExit("the answers differ")
            kept_s.append(kept.time_to_first_token_s)
            fresh_s.append(fresh.time_to_first_token_s)
        return {
            "prompt_tokens": kept.usage.prompt_tokens,
            "read_tokens": kept.usage.prompt_tokens - kept.usage.cached_tokens,
            "first_token_s": statistics.median(kept_s),
            "fresh_first_token_s": statistics.median(fresh_s),
            "streamed_gib": engine.placement.streamed_bytes / GIB,
        }


def long_text() -> str:
    """Python, as much as one could ask for."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "edgespec").glob("*.py")))


def start_times(repeats: int) -> dict[str, dict[str, float] | None]:
    """Median seconds until a process has printed its help or its report, and until it can be talked with.

    Those of the processor are until it has ended, and do not depend on what else runs.
    """
    ways: dict[str, Callable[[], float | None]] = {
        "edgespec --help": lambda: program_s("--help"),
        "edgespec doctor": lambda: program_s("doctor"),
        "edgespec chat, to its prompt": first_prompt_s,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, measure in ways.items():
            before = os.times()
            seconds = measure()
            after = os.times()
            worked_s = sum(after[2:4]) - sum(before[2:4])  # of the children, user and system
            found[name] += [] if seconds is None else [(seconds, worked_s)]
    return {
        name: {
            "s": statistics.median(seconds for seconds, _ in known),
            "processor_s": statistics.median(worked_s for _, worked_s in known),
        }
        if known
        else None
        for name, known in found.items()
    }


def program_s(argument: str) -> float:
    """Seconds of a whole `edgespec ARGUMENT`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "edgespec", argument], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - started


def first_prompt_s() -> float | None:
    """Seconds until `edgespec chat` reads its first line; None where there are no pseudo-terminals."""
    if sys.platform == "win32":
        return None
    import pty

    started = time.perf_counter()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.environ.update(TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1")
        os.execv(sys.executable, [sys.executable, "-m", "edgespec", "chat", "--no-history"])
    written = b""
    while READY not in written:
        written += os.read(terminal, 4096)
    seconds = time.perf_counter() - started
    os.write(terminal, b"\x04")
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:  # how a terminal says that the other end has gone
        pass
    os.waitpid(process, 0)
    os.close(terminal)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
