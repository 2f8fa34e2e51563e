"""How far a draft's guesses went in earlier runs here, and what its trees took: kept for choosing among drafts.

How far is one number, the chance of a first child by which Sequoia's best trees of the same sizes yield as many tokens.
Trees that grew are better than those, so that it is a little high, alike for all drafts. Seconds are those of a mean
tree, where it grew, of a processor that no other program shares.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from edgespec.errors import EdgespecError
from edgespec.grow.sequoia import power_law, sequoia_table
from edgespec.machine.torch_threads import torch_threads
from edgespec.pair.folder import ModelFolder, fingerprint
from edgespec.tuning.costs import GrowthCosts
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.user_paths import LEARNED, cache_folder, make_folder, written_whole
from edgespec.validation import parse_json, read_as

FORMAT = 2  # of the files
LEAST_TREES = 8  # of all runs together, that say something
LEAST_TIMED = 2  # of a run whose seconds count: the first tree of a process is mostly the loading of kernels
MOST_TREES = 512  # that earlier runs count as
MOST_NODES, MOST_LAYERS = 64, 48  # of a tree that a rate is found for
HALVINGS = 9

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRate:
    """The chance of a first child, and the number of trees that it is known by."""

    rate: Annotated[float, Field(gt=0, lt=1)]
    num_trees: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanGrowth:
    """What growing a mean tree of one text takes while other programs are quiet, and the trees that it is known by."""

    nodes: Positive
    layers: Positive
    seconds: Positive
    num_trees: Positive
    place: str  # the device, and whatever else its seconds depend on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A pair's file."""

    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)] = FORMAT
    rate: LearnedRate | None = None
    growth: MeanGrowth | None = None


def learned_rate(target: ModelFolder, draft: ModelFolder) -> LearnedRate | None:
    """Return what earlier runs here have learned of a draft with this target; None where they had too few trees."""
    return _of_enough(_kept(target, draft).rate)


def learned_growth(target: ModelFolder, draft: ModelFolder, place: str, *, share: float = 1.0) -> MeanGrowth | None:
    """Return what a tree of the draft's takes in this place, by earlier runs; None where they timed too few.

    Other programs leave this `share` of a core now.
    """
    found = _of_enough(_growth_in(_kept(target, draft), place))
    return None if found is None else replace(found, seconds=found.seconds / share)


def keep_learned(
    target: ModelFolder, draft: ModelFolder, worths: Iterable[DraftWorth], growth: GrowthCosts | None = None,
    *, place: str = "", share: float = 1.0,
) -> None:  # fmt: skip
    """Add what a run's trees brought and took to what is kept of the pair; nothing is raised.

    `growth` was learned in this `place`, and takes the place of what was learned in another. Other programs left this
    `share` of a core to the run. The trees of runs that have a few each add up.
    """
    seen = [worth.seen for worth in worths if worth.seen.num_trees]
    num_trees = float(sum(one.num_trees for one in seen))
    if not num_trees:
        return
    tokens, nodes, layers = (
        sum(getattr(one, name) for one in seen) / num_trees for name in ("tokens", "nodes", "layers")
    )
    before = _kept(target, draft)
    rate = LearnedRate(rate=rate_of(1 + tokens, nodes=nodes, layers=layers), num_trees=num_trees)
    kept = replace(before, rate=_mean(rate, before.rate))
    if growth is not None and growth.num_trees >= LEAST_TIMED and (seconds := growth.seconds(layers, nodes)) > 0:
        num_timed = min(num_trees, growth.num_trees)
        took = MeanGrowth(nodes=nodes, layers=layers, seconds=share * seconds, num_trees=num_timed, place=place)
        kept = replace(kept, growth=_mean(took, _growth_in(before, place)))
    _write(target, draft, kept)


def let_age(target: ModelFolder, draft: ModelFolder) -> None:
    """Let what is kept of a draft that gives way count as half as many trees, and be forgotten below those that count.

    A draft that does not run is not measured. So one that was measured beside other programs, or with texts that it
    cannot guess, counts again as one that was never tried, after seven runs at most.
    """
    before = _kept(target, draft)
    kept = replace(before, rate=_aged(before.rate), growth=_aged(before.growth))
    if kept != before:
        _write(target, draft, kept)


def _write(target: ModelFolder, draft: ModelFolder, kept: _Kept) -> None:
    try:
        path = _file_of(target, draft)
        make_folder(path.parent)
        with written_whole(path) as file:
            file.write_text(json.dumps(asdict(kept)), encoding="utf-8")
    except (EdgespecError, OSError) as error:
        logger.warning("what runs have learned of the draft is not kept: %s", error)


Learned = TypeVar("Learned", LearnedRate, MeanGrowth)


def _aged(found: Learned | None) -> Learned | None:
    if found is None or found.num_trees < LEAST_TREES:
        return found
    num_trees = min(found.num_trees, MOST_TREES) / 2
    return replace(found, num_trees=num_trees) if num_trees >= LEAST_TREES else None


def _of_enough(found: Learned | None) -> Learned | None:
    """Return what is known by trees enough to say something."""
    return None if found is None or found.num_trees < LEAST_TREES else found


def _growth_in(kept: _Kept, place: str) -> MeanGrowth | None:
    return kept.growth if kept.growth is not None and kept.growth.place == place else None


def _mean(found: Learned, before: Learned | None) -> Learned:
    """Return the mean of what a run and earlier ones have found, by their trees; many old ones count as fewer."""
    if before is None:
        return found
    old, new = min(before.num_trees, MOST_TREES), found.num_trees
    means = {
        name: (value * new + getattr(before, name) * old) / (new + old)
        for name, value in asdict(found).items()
        if name not in {"num_trees", "place"}
    }
    return replace(found, num_trees=new + old, **means)


def _kept(target: ModelFolder, draft: ModelFolder) -> _Kept:
    """Return what is kept of a pair; nothing where that cannot be read."""
    try:
        content = parse_json(_file_of(target, draft).read_text(encoding="utf-8"))
        return read_as(_Kept, content, lambda key, wrong: EdgespecError("E_SETTING", f"{key} {wrong}", ""))
    except (OSError, ValueError, EdgespecError):
        return _Kept()


def rate_of(tokens: float, *, nodes: float, layers: float) -> float:
    """Return the chance of a first child by which the best trees of this size and depth yield so many tokens a pass."""
    size, depth = max(1, min(MOST_NODES, round(nodes))), max(1, min(MOST_LAYERS, round(layers), round(nodes)))
    low, high = 0.01, 0.995
    with torch_threads(1):  # several would wait for each other at each of many small operations
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            rates = power_law(middle)
            found = sequoia_table(rates, size=size, depth=depth, max_children=len(rates)).expected_tokens(size, depth)
            low, high = (middle, high) if found < tokens else (low, middle)
    return (low + high) / 2


def _file_of(target: ModelFolder, draft: ModelFolder) -> Path:
    return cache_folder() / LEARNED / f"{fingerprint(target)}-{fingerprint(draft)}.json"
