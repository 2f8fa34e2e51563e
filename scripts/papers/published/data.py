"""The texts that drafts learn from: the standard library, and what the target itself writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scripts.papers.heads.heads import TARGET, edgespec, write_data

PROMPT_CHARACTERS = 160
OWN_TOKENS = 128  # of each text that the target writes
FILE_STRIDE = 16  # every so many files begin a text


def write_texts(folder: Path) -> None:
    """The modules that the built-in pair was trained on, and continuations of the beginnings of some of them."""
    if (folder / "own").is_dir():
        return
    write_data(folder)
    sources = [path for path in sorted(folder.rglob("*.py")) if path.stat().st_size > PROMPT_CHARACTERS]
    begun = [path.read_text(encoding="utf-8")[:PROMPT_CHARACTERS] for path in sources[::FILE_STRIDE]]
    prompts, answers = folder.with_name("begun.jsonl"), folder.with_name("own.jsonl")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in begun), encoding="utf-8")
    edgespec(
        "generate", prompts, "-m", TARGET, "--policy", "none", "-np", 16, "-n", OWN_TOKENS, "--temp", 0.8,
        "--ignore-eos", "--seed", 0, "-o", answers, "-q",
    )  # fmt: skip
    (folder / "own").mkdir()
    rows = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
    for index, (text, row) in enumerate(zip(begun, rows, strict=True)):
        (folder / "own" / f"{index}.txt").write_text(text + row["text"], encoding="utf-8")


def collect(arguments: argparse.Namespace) -> None:
    """Collect the target's features and states of the texts, by a head that has learned nothing."""
    out: Path = arguments.out
    if (out / "untrained").exists():
        return
    write_texts(out / "data")
    edgespec(
        "train", "head", "-m", TARGET, "--data", out / "data", "--data-tokens", arguments.data_tokens,
        "--features", out / "features", "--method", "eagle3", "--draft-vocab", 1536, "--multi-steps", 1,
        "--training-steps", 1, "-o", out / "untrained",
    )  # fmt: skip
