"""An agent's conversation with `edgespec serve`: seconds to the first token of each turn, with kept rows and without.

    python -m scripts.make.inflate large --params 300M
    python -m scripts.bench.server_turns large -md edgespec/demo/draft

Each turn sends all messages: what a tool has found, a piece of Python, and the answers before it. The ways:

kept       the server goes on from the rows of the turn before
without    each turn has another first line, so that nothing of it is kept
restarted  the server is ended and started before each turn; rows lie in the folder of --slots-dir

All ways send the messages of the first. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from scripts.situations import SEED, cut_texts, held_out_halves
from tests.support.running_server import chunks_of, running_server

TIMEOUT_S = 600
WAYS = ("kept", "without", "restarted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a client saw of a turn."""

    prompt_tokens: int
    read_tokens: int  # of these, that were not kept
    first_token_s: float
    answer: str


def one_turn(address: str, messages: Sequence[dict[str, str]], new_tokens: int) -> Turn:
    """Ask for the next answer."""
    body = {"model": "any", "messages": messages, "max_tokens": new_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    started, first_s, said, usage = time.perf_counter(), 0.0, "", {}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        for chunk in chunks_of(answer):
            said += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            first_s = first_s or (time.perf_counter() - started if said else 0.0)
            usage = chunk.get("usage") or usage
    prompt, kept = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(prompt_tokens=prompt, read_tokens=prompt - kept, first_token_s=first_s, answer=said)


def conversation(found: Sequence[str], answers: Sequence[str], *, first_line: str = "") -> list[dict[str, str]]:
    """Return the messages of the turn after so many answers."""
    messages = [{"role": "system", "content": first_line + found[0]}]
    for number, text in enumerate(found[1 : len(answers) + 2]):
        messages.append({"role": "user", "content": text})
        messages += [{"role": "assistant", "content": answer} for answer in answers[number : number + 1]]
    return messages


@contextmanager
def server(arguments: argparse.Namespace, *options: str) -> Iterator[str]:
    """Serve the models; yields the address once the first text, which pays for what is made once, has come."""
    models = [] if arguments.model is None else ["-m", arguments.model]
    models += [] if arguments.draft_model is None else ["-md", arguments.draft_model]
    settings = ["-c", str(arguments.context), "-np", "2"]
    with running_server(*models, *settings, *arguments.option, *options) as (address, _):
        one_turn(address, [{"role": "user", "content": "import this"}], 2)
        yield address


def main() -> None:
    """Each way in turn, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the target. [default: the built-in pair]")
    parser.add_argument("-md", "--draft-model")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4000, help="of the whole conversation")
    parser.add_argument("-n", "--new-tokens", type=int, default=32, help="of every answer")
    parser.add_argument("-c", "--context", type=int, default=4096)
    parser.add_argument("--option", action="append", default=[], help="of the server, as --option=--threads=2")
    arguments = parser.parse_args()
    each = arguments.tokens // (arguments.turns + 1) - arguments.new_tokens
    found = cut_texts(held_out_halves()[1], count=arguments.turns + 1, tokens=each, seed=SEED)

    seen: dict[str, list[Turn]] = {way: [] for way in WAYS}
    answers: list[str] = []
    with server(arguments) as address:
        for _ in range(arguments.turns):
            turn = one_turn(address, conversation(found, answers), arguments.new_tokens)
            seen["kept"].append(turn)
            answers.append(turn.answer)
        for number in range(arguments.turns):
            other = conversation(found, answers[:number], first_line=f"{number} is the number of this turn\n")
            seen["without"].append(one_turn(address, other, arguments.new_tokens))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.turns):
            with server(arguments, "--slots-dir", folder) as address:
                messages = conversation(found, answers[:number])
                seen["restarted"].append(one_turn(address, messages, arguments.new_tokens))
    print("turn  prompt" + "".join(f"{f'{way}: read':>17}{'first':>9}" for way in WAYS))
    for number, turns in enumerate(zip(*seen.values(), strict=True)):
        parts = "".join(f"{turn.read_tokens:17}{turn.first_token_s:7.2f} s" for turn in turns)
        print(f"{number + 1:4}{turns[0].prompt_tokens:8}{parts}")
    equal = sum(turn.answer == answer for turn, answer in zip(seen["restarted"], answers, strict=True))
    print(f"after restarts {equal} of {arguments.turns} answers are those of the server that went on")
    print(json.dumps({way: [in_numbers(turn) for turn in turns] for way, turns in seen.items()}))


def in_numbers(turn: Turn) -> dict[str, Any]:
    """Return a turn without its answer."""
    return {"prompt_tokens": turn.prompt_tokens, "read_tokens": turn.read_tokens, "first_token_s": turn.first_token_s}


if __name__ == "__main__":
    main()
