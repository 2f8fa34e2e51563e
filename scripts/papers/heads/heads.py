"""The heads that are compared, and how they are trained: all on the same features, with the same order of texts."""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from edgespec.pair.pair import DEMO_FOLDER
from scripts.make.demo_pair import is_held_out, standard_library_sources

CPU = torch.device("cpu")
TARGET = DEMO_FOLDER / "target"
DRAFT = "built-in draft"
DRAFT_FOLDER = DEMO_FOLDER / "draft"
Options = Sequence[object]  # of `edgespec train head`

METHODS: Mapping[str, Options] = {
    "eagle": ("--method", "eagle"),
    "hass": ("--method", "hass"),
    # CORAL's paper means this where it says HASS (section 2.3).
    "hass-alignment": ("--method", "hass", "--top-tokens-weight", 0),
    "coral": ("--method", "coral"),
}
ALIGNMENT_STEPS = (2, 4)  # CORAL, table 3; the methods have three
HEADS: Mapping[str, Options] = {
    **METHODS,
    "csra-one-step": ("--method", "coral", "--multi-steps", 1),
    **{
        f"{name}-{steps}-steps": (*METHODS[name], "--multi-steps", steps)
        for steps in ALIGNMENT_STEPS
        for name in ("hass-alignment", "coral")
    },
}


def edgespec(*arguments: object) -> None:
    """A command of ours, as a user would give it."""
    subprocess.run([sys.executable, "-m", "edgespec", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def head_folder(out: Path, name: str, seed: int) -> Path:
    """Where a head is."""
    return out / f"head-{name}-{seed}"


def heads_at(arguments: argparse.Namespace) -> dict[tuple[str, int], Path]:
    """The heads that were asked for and have been trained: (name, seed) -> folder."""
    asked = [(name, seed) for name in arguments.methods for seed in arguments.seeds]
    found = {(name, seed): head_folder(arguments.out, name, seed) for name, seed in asked}
    return {key: folder for key, folder in found.items() if folder.exists()}


def write_data(folder: Path) -> None:
    """The modules that the built-in pair was trained on, as files."""
    for name, text in standard_library_sources():
        if not is_held_out(name):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def train_heads(arguments: argparse.Namespace) -> None:
    """The heads that are asked for, on the features of one run of the target under a memory limit."""
    out: Path = arguments.out
    if not (out / "data").exists():
        write_data(out / "data")
    for seed in arguments.seeds:
        for name in arguments.methods:
            if head_folder(out, name, seed).exists():
                continue
            edgespec(
                "train", "head", "--data", out / "data", "--data-tokens", arguments.data_tokens,
                "--features", out / "features", "--max-cpu-mem", "700MiB", "-ngl", 0, "--seed", seed,
                "--training-steps", arguments.training_steps, "--batch", arguments.batch,
                "--learning-rate", arguments.learning_rate, *HEADS[name], "-o", head_folder(out, name, seed),
            )  # fmt: skip
