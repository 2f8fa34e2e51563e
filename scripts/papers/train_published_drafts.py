"""Drafts in published containers, trained for the built-in target, and what the target accepts of them.

    python -m scripts.papers.train_published_drafts OUT

Parts, each of which goes on where it stopped (choose with --parts):
eagle3   texts, the target's features and states, and `edgespec train head --method eagle3`
dflash   a drafter of two layers that guesses blocks of eight, on the same states
dspark   one whose places have a bias of the token before them
mtp      a multi-token-prediction layer in a checkpoint of GLM-4.5's family that has the target's own weights
tokens   exact expected tokens a pass of trees of 1, 8 and 64 nodes at temperature 0 and 1 at held-out contexts, read
         back from the folders through the one door; beside the built-in draft and head, and an EAGLE-3 head that has
         learned nothing. Cost: weights that a drafted row is multiplied with, and the processor's time to grow 64
         nodes, one thread. Then beside each tree that of the built-in draft which brings most of those, of any depth,
         that have no more nodes and take no longer to grow

Prints tables. Training takes some minutes of one core a draft.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig

from edgespec.train.eagle3_head import default_taps
from edgespec.train.feature_files import FeatureFiles
from edgespec.train.training_loop import TrainingRun
from edgespec.train.training_settings import TrainingSettings
from scripts.papers.published.data import TARGET, edgespec, write_texts
from scripts.papers.published.dflash import train_dflash
from scripts.papers.published.mtp import train_mtp
from scripts.papers.published.tokens import print_tokens

PARTS = ("eagle3", "dflash", "dspark", "mtp", "tokens")
CHECKPOINT_EVERY = 25  # steps, from which a part goes on


def train_eagle3(arguments: argparse.Namespace, *, steps: int, name: str = "eagle3") -> Path:
    """The head that `edgespec train head` makes in so many steps."""
    folder: Path = arguments.out / name
    if not folder.exists():
        write_texts(arguments.out / "data")
        edgespec(
            "train", "head", "-m", TARGET, "--data", arguments.out / "data", "--data-tokens", arguments.data_tokens,
            "--features", arguments.out / "features", "--method", "eagle3", "--draft-vocab", arguments.draft_vocab,
            "--multi-steps", arguments.multi_steps, "--training-steps", steps, "--learning-rate",
            arguments.learning_rate, "--seed", arguments.seed, "--evaluate-every", arguments.training_steps,
            "--held-out-blocks", arguments.held_out_blocks, "--checkpoint-every", CHECKPOINT_EVERY, "-o", folder,
        )  # fmt: skip
    return folder


def run_of(arguments: argparse.Namespace, name: str, steps: int) -> TrainingRun:
    """A run of the loop that trains heads, on the same features."""
    settings = TrainingSettings(
        training_steps=steps, learning_rate=arguments.learning_rate, seed=arguments.seed, evaluate_every=steps,
        held_out_blocks=arguments.held_out_blocks, checkpoint_every=CHECKPOINT_EVERY,
    )  # fmt: skip
    folder = arguments.out / f"{name}.training"
    return TrainingRun(files=FeatureFiles(arguments.out / "features"), settings=settings, folder=folder, identity=name)


def main() -> None:
    """The parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--data-tokens", type=int, default=300_000)
    parser.add_argument("--training-steps", type=int, default=450, help="of 1,024 tokens")
    parser.add_argument("--multi-steps", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=1536)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--held-out-blocks", type=int, default=8)
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--context-seed", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    steps: int = arguments.training_steps
    if "eagle3" in arguments.parts:
        train_eagle3(arguments, steps=steps)
    for kind in {"dflash", "dspark"}.intersection(arguments.parts):
        taps = default_taps(AutoConfig.from_pretrained(TARGET))
        train_dflash(arguments, run_of(arguments, kind, steps), taps, is_dspark=kind == "dspark")
    if "mtp" in arguments.parts:
        train_mtp(arguments, run_of(arguments, "mtp", steps))
    if "tokens" in arguments.parts:
        train_eagle3(arguments, steps=1, name="untrained")
        print_tokens(arguments)


if __name__ == "__main__":
    main()
