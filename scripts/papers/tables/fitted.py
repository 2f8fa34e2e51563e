"""Tables that need models of their own: commands of scripts that fit them, and the one that prints the table.

A command is left out where what it makes is there, and long ones go on where they were stopped. `{out}` is the folder
of all that is made, `{contexts}` and `{processes}` are what the user gave.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from edgespec.grow.classifier import DEFAULT_FILE, INPUTS
from scripts.papers.fit_classifiers import EPOCHS, SEEDS, SHARES, WIDTHS
from scripts.papers.heads.heads import TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """An experiment whose models are fitted first."""

    name: str
    source: str  # paper, and figure or table
    claim: str  # what it says there
    fits: tuple[tuple[str, str], ...] = ()  # what a command makes, and the command
    prints: str

    def run(self, out: Path, *, contexts: int, processes: int) -> None:
        """Fit what is missing, and print."""
        places = {"out": str(out), "contexts": str(contexts), "processes": str(processes)}
        for made, command in self.fits:
            if not Path(made.format(**places)).exists():
                run_script(command, places)
        run_script(self.prints, places)


def run_script(command: str, places: dict[str, str]) -> None:
    """Run a script, named by its room and its own name, with its options."""
    script, *options = (word.format(**places) for word in shlex.split(command))
    subprocess.run([sys.executable, "-m", f"scripts.{script}", *options], check=True)


def of_heads(methods: str, parts: str) -> str:
    """The command that trains heads and prints some of what is asked of them."""
    options = "--contexts {contexts} --processes {processes}"
    return f"papers.compare_heads {{out}}/heads --parts train,{parts} --methods {methods} {options}"


SHIPPED = shlex.quote(str(DEFAULT_FILE))
RECORDS = "make.demo_fits --out {out} --work {out}/records --only"
OF_SEEDS = " ".join(f"{{out}}/variants/seed-{seed}.json" for seed in SEEDS)
OF_FEATURES = " ".join(f"{{out}}/variants/without-{name}.json" for name in INPUTS)
OF_WIDTHS = " ".join(f"{{out}}/variants/width-{width}.json" for width in WIDTHS)
OF_SHARES = " ".join(
    f"{{out}}/tuned/{how}-{share:g}.json" for how in ("tuned", "share", "hard") for share in (1, *SHARES)
)
HASS_HEAD = "{out}/heads/head-hass-0"
COMPARE_C2T = "papers.compare_c2t --contexts {contexts} --processes {processes}"
VARIANTS = (
    ("{out}/many-trees.json", f"{RECORDS} many-trees"),
    (f"{{out}}/variants/epochs-{EPOCHS}.json", "papers.fit_classifiers {out}/records/many-trees --out {out}/variants"),
)

TABLES = (
    FittedTable(
        name="c2t-1",
        source="C2T, tables 1 and 2",
        claim="25 % fewer nodes than EAGLE-2 at equal length; 10 % with either of depth and entropy, 30 % with both",
        fits=VARIANTS,
        prints=f"{COMPARE_C2T} --classifiers {SHIPPED} {OF_SEEDS} {OF_FEATURES}",
    ),
    FittedTable(
        name="c2t-b3",
        source="C2T, appendix B.3",
        claim="12 hidden units are enough, 2 and 6 too few",
        fits=VARIANTS,
        prints=f"{COMPARE_C2T} --classifiers {{out}}/variants/seed-0.json {OF_WIDTHS}",
    ),
    FittedTable(
        name="c2t-transfer",
        source="C2T, sections 5.2 and 5.3, appendix B.4",
        claim="a classifier serves another pair, better if it is fine-tuned on few trees",
        fits=(
            (HASS_HEAD, "papers.compare_heads {out}/heads --parts train --methods hass --seeds 0"),
            ("{out}/second-pair.json", f"{RECORDS} second-pair -md {HASS_HEAD}"),
            ("{out}/tuned/hard-0.03.json",
             f"papers.fit_classifiers {{out}}/records/second-pair --out {{out}}/tuned --from {SHIPPED}"),
        ),
        prints=f"{COMPARE_C2T} -m {shlex.quote(str(TARGET))} -md {HASS_HEAD} --classifiers {SHIPPED} {OF_SHARES}",
    ),
    FittedTable(
        name="coral-2",
        source="CORAL, table 2",
        claim="CORAL has more tokens accepted than HASS, and HASS than EAGLE",
        prints=of_heads("eagle,hass,hass-alignment,coral", "accept"),
    ),
    FittedTable(
        name="coral-3",
        source="CORAL, table 3",
        claim="CORAL is ahead with two, three and four steps; its two do as well as HASS's four",
        prints=of_heads(
            "hass-alignment-2-steps,coral-2-steps,hass-alignment,coral,hass-alignment-4-steps,coral-4-steps", "accept"
        ),
    ),
    FittedTable(
        name="coral-5",
        source="CORAL, table 5",
        claim="with one step CSRA does not help",
        prints=of_heads("eagle,csra-one-step", "accept"),
    ),
    FittedTable(
        name="coral-6",
        source="CORAL, table 6 and figure 6",
        claim="CORAL's steps differ least, HASS's less than EAGLE's; its n-th token is accepted most often",
        prints=of_heads("eagle,hass,hass-alignment,coral", "steps"),
    ),
)  # fmt: skip
