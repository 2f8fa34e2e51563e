"""EAGLE, HASS and CORAL heads of a target, trained alike and compared.

    python -m scripts.papers.compare_heads OUT
    python -m scripts.papers.compare_heads OUT -m MODEL --text OUT/held-out --parts accept,steps --seeds 0

Parts, each of which goes on where it stopped (choose with --parts):
train        features of the target in a streamed run under a memory limit, then `edgespec train head` for every
             method and seed, with the same texts, steps and order of texts
accept       exact expected tokens a pass of chain, eagle2 and adaptive trees at temperature 0 and 1, at the same
             held-out contexts for everybody; intervals over seeds, and paired over contexts
steps        InfoNCE between the features of different training steps on held-out texts (CORAL, table 6), and the
             acceptance rate of the n-th token (figure 6)

Heads of another target than the built-in one are those of scripts.papers.train_published_drafts in the same folder.
Prints tables.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from scripts.papers.heads.heads import DRAFT, DRAFT_FOLDER, HEADS, METHODS, TARGET, heads_at, train_heads
from scripts.papers.heads.steps import print_steps
from scripts.papers.heads.tokens import accept, print_acceptance

PARTS = ("train", "accept", "steps")


def method_names(text: str) -> list[str]:
    """The methods that a user names."""
    names = list(HEADS) if text == "all" else text.split(",")
    if unknown := set(names) - set(HEADS):
        raise argparse.ArgumentTypeError(f"no head is called {', '.join(sorted(unknown))}")
    return names


def compare_tokens(arguments: argparse.Namespace) -> None:
    """Tokens a pass with every head that was trained, and the built-in draft."""
    drafts, groups = {}, defaultdict(list)
    for (name, seed), folder in heads_at(arguments).items():
        drafts[f"{name}-{seed}"] = folder
        groups[name].append(seed)
    if arguments.model == TARGET:
        drafts[DRAFT] = DRAFT_FOLDER
    print_acceptance(accept(drafts, arguments.contexts, arguments), groups)


def main() -> None:
    """The parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("-m", "--model", type=Path, default=TARGET, help="the target [the built-in one]")
    parser.add_argument("--text", type=Path, help="folder of text files to cut contexts from")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument(
        "--methods",
        type=method_names,
        default=list(METHODS),
        help=f"all, or some of {','.join(HEADS)} [the first four]",
    )
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--data-tokens", type=int, default=1_500_000)
    parser.add_argument("--training-steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=2, help="blocks of 512 tokens")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--contexts", type=int, default=100)
    parser.add_argument("--context-seed", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=32, help="held out, for the steps")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.model != TARGET and "train" in arguments.parts:
        parser.error("heads of another target are trained by scripts.papers.train_published_drafts")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if "train" in arguments.parts:
        train_heads(arguments)
    if "accept" in arguments.parts:
        compare_tokens(arguments)
    if "steps" in arguments.parts:
        print_steps(arguments)


if __name__ == "__main__":
    main()
