"""The texts that drafts learn from, and the target's features of them.

Of the built-in target: the standard library, and what the target itself writes. Of any other: what it answers to a
fixed list of prompts; its answers to those that are held out are in `held-out`, for contexts of tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from edgespec.pair.pair import open_pair
from scripts.papers.heads.heads import TARGET, edgespec, write_data
from scripts.papers.published.prompts import as_chat, prompts
from scripts.situations import write_texts

PROMPT_CHARACTERS = 160
OWN_TOKENS = 128  # of each text that the built-in target writes
FILE_STRIDE = 16  # every so many files begin a text
ANSWER_TOKENS = 256  # at most, of each answer of another target
HELD_OUT_SHARE = 5  # one held-out answer for so many to learn from


def continued(arguments: argparse.Namespace, begun: Sequence[str], folder: Path, num_tokens: int, *end: str) -> None:
    """Write what the target makes of each beginning: a folder of texts. It goes on where it was stopped."""
    if folder.is_dir():
        return
    asked, answers = folder.with_name(f"{folder.name}-begun.jsonl"), folder.with_name(f"{folder.name}.jsonl")
    write_texts(asked, begun)
    edgespec(
        "generate", asked, "-m", arguments.model, "--policy", "none", "-np", arguments.texts_at_once, "-n", num_tokens,
        "--temp", 0.8, "--seed", 0, "--resume", "-o", answers, *end,
    )  # fmt: skip
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    for row in map(json.loads, answers.read_text(encoding="utf-8").splitlines()):  # in the order of their ends
        (partial / f"{row['index']}.txt").write_text(row["prompt"] + row["text"], encoding="utf-8")
    partial.rename(folder)


def write_library(arguments: argparse.Namespace) -> None:
    """The modules that the built-in pair was trained on, and continuations of the beginnings of some of them."""
    folder: Path = arguments.out / "data"
    if (folder / "own").is_dir():
        return
    write_data(folder)
    sources = [path for path in sorted(folder.rglob("*.py")) if path.stat().st_size > PROMPT_CHARACTERS]
    begun = [path.read_text(encoding="utf-8")[:PROMPT_CHARACTERS] for path in sources[::FILE_STRIDE]]
    continued(arguments, begun, arguments.out / "own", OWN_TOKENS, "--ignore-eos")
    (arguments.out / "own").rename(folder / "own")


def write_answers(arguments: argparse.Namespace) -> None:
    """What the target answers to the prompts, and to those that are held out."""
    tokenizer = open_pair(arguments.model, None).tokenizer
    counts = {"data": arguments.texts, "held-out": arguments.texts // HELD_OUT_SHARE}
    for name, count in counts.items():
        begun = [as_chat(tokenizer, prompt) for prompt in prompts(is_held_out=name != "data")[:count]]
        continued(arguments, begun, arguments.out / name, ANSWER_TOKENS)


def collect(arguments: argparse.Namespace) -> None:
    """Collect the target's features and states of the texts, by a head that has learned nothing."""
    out: Path = arguments.out
    if (out / "untrained").exists():
        return
    (write_library if arguments.model == TARGET else write_answers)(arguments)
    edgespec(
        "train", "head", "-m", arguments.model, "--data", out / "data", "--data-tokens", arguments.data_tokens,
        "--features", out / "features", "--method", "eagle3", "--draft-vocab", arguments.known_tokens,
        "--multi-steps", 1, "--training-steps", 1, "-o", out / "untrained",
    )  # fmt: skip
