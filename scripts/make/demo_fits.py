"""Fit what ships with the built-in pair: measured acceptance, its own copy's too, and C2T's classifier.

    python -m scripts.make.demo_fits --out edgespec/demo

Prompts are held-out modules of the standard library (those that the pair was not trained on) cut at
random points; every second module only, so that scripts.papers.compare_policies compares on the others.
Runs `edgespec train` as a user would. Minutes on two cores.

`--only` fits one, or one of those that do not ship: a classifier on as many of EAGLE-2's whole trees as
C2T's paper has (8,880; an hour of one core), for scripts.papers.fit_classifiers, or one
of another draft, which `-md` names.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from edgespec.pair.pair import DEMO_FOLDER
from scripts.situations import cut_texts, held_out_halves, write_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model, and the records that it is fitted on."""

    what: str  # as `edgespec train` names it
    prompts: int
    new_tokens: int  # of every prompt
    options: tuple[str, ...] = ()
    ships: bool = False
    draft: str | None = None  # of the built-in target, in place of its own


FITS = {
    "acceptance": Fit(what="acceptance", prompts=200, new_tokens=24, ships=True),
    "copy_acceptance": Fit(
        what="acceptance",
        prompts=80,
        new_tokens=24,
        options=("-ngl", "0", "--dtype", "bfloat16"),
        ships=True,
        draft="self:nf4",
    ),
    "classifier": Fit(what="classifier", prompts=200, new_tokens=4, ships=True),
    "many-trees": Fit(what="classifier", prompts=2500, new_tokens=16),
    "second-pair": Fit(what="classifier", prompts=450, new_tokens=8),
}


def main() -> None:
    """Fit all that ships, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("demo-records"), help="folder of prompts and records")
    parser.add_argument("--context-tokens", type=int, default=192)
    parser.add_argument("-md", "--draft-model", type=Path, help="of the built-in target [its draft]")
    parser.add_argument("--only", choices=list(FITS))
    arguments = parser.parse_args()
    for folder in (arguments.out, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    for name, fit in FITS.items():
        if arguments.only == name or (arguments.only is None and fit.ships):
            texts = cut_texts(held_out_halves()[0], count=fit.prompts, tokens=arguments.context_tokens, seed=7)
            prompts = arguments.work / f"{name}.jsonl"
            write_texts(prompts, texts)
            draft = fit.draft or arguments.draft_model
            pair = [] if draft is None else ["-m", DEMO_FOLDER / "target", "-md", draft]
            command = ["train", fit.what, *fit.options, *pair, "--prompts", prompts, "-n", fit.new_tokens]
            command += ["-o", arguments.out / f"{name}.json", "--overwrite", "--records", arguments.work / name]
            subprocess.run([sys.executable, "-m", "edgespec", *map(str, command)], check=True)


if __name__ == "__main__":
    main()
