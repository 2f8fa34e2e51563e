"""Drafts of a target, trained for as many seconds of a core each, and what the target accepts of them.

    python -m scripts.papers.train_published_drafts OUT                   of the built-in target
    python -m scripts.papers.train_published_drafts OUT -m MODEL --parts layers,eagle,hass,coral,eagle3,dflash

Parts (choose with --parts): texts, the target's features and states; `dflash`, `dspark` and `dflash2`, which guess a
block in one pass, two layers and blocks of eight each; `layers`, some of the target's own, distilled, a folder that
any pair takes; `eagle`, `hass`, `hass-alignment`, `coral` and `eagle3`, heads; `mtp`, a layer of the built-in target's
own in a copy of it; `tokens`, the exact expected tokens a pass at held-out contexts, read back from the folders through
the one door. A folder that is there is not made again, and what was stopped goes on from its checkpoint; that of a
DFlash2 drafter is named by its candidates and its loss. NAME.curve.jsonl has how each does on held-out texts.
The built-in target learns from the standard library, any other from its answers to a fixed list of prompts, which it
writes first; contexts are then its answers to the held-out ones. Prints tables. Some minutes of one core each.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from scripts.papers.heads.heads import TARGET
from scripts.papers.published.blocks import train_blocks
from scripts.papers.published.data import collect
from scripts.papers.published.heads import FEATURE_HEADS, train_eagle3, train_feature_head, train_layer
from scripts.papers.published.layers import train_layers
from scripts.papers.published.tokens import print_tokens
from tests.support.dflash_config import OWN

PARTS = (*OWN, "tokens")
OTHERS = {"layers": train_layers, "eagle3": train_eagle3, "mtp": train_layer}
NAMED = ",".join([*PARTS, *FEATURE_HEADS, *OTHERS])


def main() -> None:
    """The parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("-m", "--model", type=Path, default=TARGET, help="the target [the built-in one]")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=NAMED)
    parser.add_argument("--texts", type=int, default=250, help="that a target other than the built-in one writes")
    parser.add_argument("--texts-at-once", type=int, default=16)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 10, 19, 29], help="of the target's, of a draft")
    parser.add_argument("--known-tokens", type=int, default=1536, help="that an EAGLE-3 head knows")
    parser.add_argument("--data-tokens", type=int, default=300_000)
    parser.add_argument("--seconds", type=float, default=360, help="of one core, for each drafter")
    parser.add_argument("--learning-rate", type=float, help="[by the target's width]")
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
    for method in FEATURE_HEADS:
        if method in arguments.parts:
            train_feature_head(arguments, method)
    for name, train_one in OTHERS.items():
        if name in arguments.parts:
            train_one(arguments)
    if "tokens" in arguments.parts:
        print_tokens(arguments)


if __name__ == "__main__":
    main()
