"""Drafts in published containers, trained for the built-in target, and what the target accepts of them.

    python -m scripts.papers.train_published_drafts OUT

Parts (choose with --parts): texts, the target's features and states; `dflash`, `dspark` and `dflash2`, which guess a
block in one pass, two layers and blocks of eight each, trained on the same states for as many seconds of one core;
`eagle3`, a head, and `mtp`, a layer of the target's own in a copy of it, for as many seconds where they are asked for;
`tokens`, the exact expected tokens a pass at held-out contexts, read back from the folders through the one door, of
drafters of blocks beside the built-in draft. A folder that is there is not made again; that of a DFlash2 drafter is
named by its candidates and its loss. Prints tables. Collecting and training take some minutes of one core each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from scripts.papers.published.blocks import train_blocks
from scripts.papers.published.data import collect
from scripts.papers.published.heads import train_eagle3, train_layer
from scripts.papers.published.tokens import print_tokens
from tests.support.dflash_config import OWN

PARTS = (*OWN, "tokens")
HEADS = {"eagle3": train_eagle3, "mtp": train_layer}


def main() -> None:
    """The parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join([*PARTS, *HEADS])
    )
    parser.add_argument("--data-tokens", type=int, default=300_000)
    parser.add_argument("--seconds", type=float, default=360, help="of one core, for each drafter")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--candidates", type=int, default=16, help="of a place of a DFlash2 drafter")
    parser.add_argument("--guess-loss", type=float, default=1.0, help="of its guesses, beside its scores'")
    parser.add_argument("--drafts", nargs="+", help="that are measured: all that are there unless told")
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--noises", type=int, default=4, help="of a context, at temperature 1")
    parser.add_argument("--context-seed", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    collect(arguments)
    for kind in OWN:
        if kind in arguments.parts:
            train_blocks(arguments, kind)
    for name, train_head in HEADS.items():
        if name in arguments.parts:
            train_head(arguments)
    if "tokens" in arguments.parts:
        print_tokens(arguments)


if __name__ == "__main__":
    main()
