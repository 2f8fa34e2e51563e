"""Improving Multi-candidate Speculative Decoding: several candidates, branches that the target starts, early exits.

The acceptance rate of a pass is the number of the draft's tokens that were accepted, over the longest path of the
tree. Trees that the target starts in several places accept more because the longest branch wins: what they write has no
longer the target's distribution.
"""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from edgespec.config import SamplingSettings
from edgespec.engine import Engine
from edgespec.train.collect import RecordRun, collect, stop_settings
from edgespec.train.fit import fit_stop
from edgespec.train.record_files import load_records
from edgespec.tree.settings import TreeSettings
from edgespec.tuning.step import StepResult
from scripts.papers.tables.paper_table import Context, PaperTable, in_words, markdown
from scripts.papers.tables.speeds import show_gain, show_speeds
from scripts.situations import cut_texts, held_out_halves

NEW_TOKENS = 24
STATIC = SamplingSettings(temperature=0.7)
DYNAMIC = SamplingSettings(temperature=1.0)


def tree(width: int, *branching: int) -> TreeSettings:
    """A tree of `width` tokens of the target's, and so many children of each node of the draft's layers."""
    return TreeSettings(policy="mcsd", branching=branching, target_width=width, draw="sampled")


METHODS = {
    "one chain of 4": tree(1, 1, 1, 1, 1),
    "4 x 2 x 2 x 1": tree(1, 4, 2, 2, 1),
    "4 x 3 x 1 x 1": tree(1, 4, 3, 1, 1),
    "8 x 6 x 1 x 1": tree(1, 8, 6, 1, 1),
    "2 started by the target, 4 x 3 x 1 x 1": tree(2, 4, 3, 1, 1),
}
WIDTHS = {
    **{f"{width} x 5, all started by the target": tree(width, 1, 1, 1, 1, 1) for width in (1, 2, 4, 8, 12, 16)},
    "16 x 5, started by the draft": TreeSettings(policy="mcsd", fork=(16, 5), draw="sampled"),
}
COLD = SamplingSettings(temperature=0.1)  # at 0 the target starts the one branch that it would write
FORK = {"16 x 5, all started by the target": WIDTHS["16 x 5, all started by the target"]}
DECIDED_WIDTHS = (1, 2, 4, 8, 16)  # of chains of 5, with a decision model and without
CONFIDENCES = (0.4, 0.6)  # of the decision model: the paper's, and one that this pair's rates ask for
FIT_PROMPTS, FIT_CONTEXT, FIT_TOKENS = 60, 192, 16  # texts that it is fitted on, and what they are continued by
FIRST, SECOND = (2, 4, 8), (1, 2, 3)
SHAPES = {f"{first} x {second} x 1 x 1": tree(1, first, second, 1, 1) for first, second in product(FIRST, SECOND)}


def passes_of(context: Context, settings: TreeSettings, sampling: SamplingSettings) -> Sequence[StepResult]:
    """The passes of a text that continues the context with such trees."""
    engine = context.bench.engine
    engine.use_tree(settings)
    result = engine.generate(
        context.bench.ids, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=context.seed + context.number
    )
    return result.passes[:-1] or result.passes  # the last pass has no room for all of the tree


def rates(context: Context, trees: dict[str, TreeSettings], sampling: SamplingSettings) -> list[float]:
    """The acceptance rate of each tree in a text that continues the context."""
    found = []
    for settings in trees.values():
        steps = passes_of(context, settings, sampling)
        length = settings.num_layers - (settings.target_width > 1)
        found.append(sum(step.num_accepted for step in steps) / (length * len(steps)))
    return found


@functools.cache
def decision_model(engine: Engine) -> Path:
    """A decision model on the draft's hidden states, fitted on texts that are no contexts: its file."""
    texts = cut_texts(held_out_halves()[0], count=FIT_PROMPTS, tokens=FIT_CONTEXT, seed=7)
    folder = Path(tempfile.mkdtemp(prefix="edgespec-stop-"))
    collect(
        engine,
        [engine.encode(text) for text in texts],
        folder / "records",
        stop_settings(temperatures=[DYNAMIC.temperature]),
        run=RecordRun(kind="hidden", max_new_tokens=FIT_TOKENS, seed=0),
    )
    records, _ = load_records(folder / "records")
    model, _ = fit_stop("hidden", records.pop("inputs"), records)
    model.save(folder / "stop.safetensors")
    return folder / "stop.safetensors"


def decided(context: Context) -> list[tuple[float, tuple[float, float]]]:
    """Of each of `_decided_trees`: the share of what was drafted that was accepted, then tokens and draft calls."""
    found = []
    for settings in _decided_trees(decision_model(context.bench.engine)).values():
        steps = passes_of(context, settings, DYNAMIC)
        width = settings.target_width
        # A chain of the draft's is behind each token that the target starts; all chains end together.
        calls = [round(step.num_drafted / width) - (width > 1) for step in steps]
        tokens = sum(len(step.tokens) for step in steps)
        rate = sum(step.num_accepted for step in steps) / max(1, sum(calls))
        found.append((rate, (tokens / len(steps), sum(calls) / len(steps))))
    return found


def _decided_trees(stop_model: Path) -> dict[str, TreeSettings]:
    """Chains that the target starts, without the decision model and with it."""
    found = {}
    for width in DECIDED_WIDTHS:
        plain = found[f"{width} x 5"] = tree(width, 1, 1, 1, 1, 1)
        for confidence in CONFIDENCES:
            found[f"{width} x 5, decided at {confidence:g}"] = replace(
                plain, stop_model=stop_model, confidence=confidence
            )
    return found


def show_decided(found: Sequence[list[tuple[float, tuple[float, float]]]]) -> list[str]:
    """Rates of all trees, their speeds, and what the decision model gains at each width."""
    names = list(_decided_trees(Path("stop.safetensors")))
    speeds = [[pair for _, pair in trees] for trees in found]
    gains = []
    for place, width in enumerate(DECIDED_WIDTHS):
        plain, *stopped = range(place * (1 + len(CONFIDENCES)), (place + 1) * (1 + len(CONFIDENCES)))
        gains.append(show_gain(f"{width} x 5, the better decided one over the other", stopped, [plain], speeds))
    return [
        *show_rates(names, [[rate for rate, _ in trees] for trees in found]),
        "",
        *show_speeds("tree", names, speeds),
        "",
        *gains,
    ]


def show_rates(names: Sequence[str], found: Sequence[list[float]]) -> list[str]:
    """A row a tree."""
    columns = zip(*found, strict=True)
    table = [[name, in_words(column)] for name, column in zip(names, columns, strict=True)]
    return markdown([["tree", "acceptance rate"], *table])


def rates_table(
    name: str, source: str, claim: str, trees: dict[str, TreeSettings], sampling: SamplingSettings
) -> PaperTable:
    """The acceptance rates of some trees."""
    return PaperTable(
        name=name,
        source=f"Improving MCSD, {source} (temperature {sampling.temperature:g})",
        claim=claim,
        visit=lambda context: rates(context, trees, sampling),
        show=lambda found: show_rates(list(trees), found),
    )


TABLES = (
    rates_table(
        "mcsd-2",
        "table 2",
        "acceptance rates of one chain 0.17, of 4 x 2 x 2 x 1 0.29, with 2 tokens of the target's 0.47 "
        "(MT-Bench, Llama-2 7B with 68M)",
        METHODS,
        STATIC,
    ),
    rates_table(
        "mcsd-6",
        "table 3 and figure 6",
        "the acceptance rate grows with the number of chains that the target starts, up to 12: 0.74 for 16, "
        "where MCSD has 0.20",
        WIDTHS,
        DYNAMIC,
    ),
    rates_table(
        "mcsd-table-4",
        "table 4",
        "the rate for 16 x 5 is nearly the same at temperatures 0 and 1: 0.76 and 0.74; a larger draft's is 0.93 and "
        "0.95 (MT-Bench, Llama-2 7B with 68M and 1.1B)",
        FORK,
        COLD,
    ),
    PaperTable(
        name="mcsd-8",
        source="Improving MCSD, figure 8 (temperature 1)",
        claim="a decision model hardly makes chains faster: a little where they are few",
        visit=decided,
        show=show_decided,
    ),
    rates_table("mcsd-4", "figure 4", "a heat map of speed over shapes; the best is 2 x 4 x 3 x 1 x 1", SHAPES, STATIC),
)
