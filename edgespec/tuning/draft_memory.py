"""How far a draft's guesses went in earlier runs here: one number a pair, kept for choosing among drafts.

It is the chance of a first child by which Sequoia's best trees of the same sizes yield as many tokens. Trees that grew
are better than those, so that it is a little high, alike for all drafts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.grow.sequoia import power_law, sequoia_table
from edgespec.machine.torch_threads import torch_threads
from edgespec.pair.folder import ModelFolder, fingerprint
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.user_paths import cache_folder, make_folder, written_whole
from edgespec.validation import parse_json

FORMAT = 1  # of the files
LEAST_TREES = 8  # of a run that says something
MOST_TREES = 512  # that earlier runs count as
MOST_NODES, MOST_LAYERS = 64, 48  # of a tree that a rate is found for
HALVINGS = 9

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRate:
    """The chance of a first child, and the number of trees that it is known by."""

    rate: float
    num_trees: float


def learned_rate(target: ModelFolder, draft: ModelFolder) -> LearnedRate | None:
    """Return what earlier runs here have learned of a draft with this target; None where nothing is kept."""
    try:
        content = parse_json(_file_of(target, draft).read_text(encoding="utf-8"))
        found = LearnedRate(rate=float(content["rate"]), num_trees=float(content["num_trees"]))
        is_usable = content["format"] == FORMAT and 0 < found.rate < 1 and found.num_trees > 0
        return found if is_usable else None
    except (OSError, ValueError, KeyError, TypeError, EdgespecError):
        return None


def keep_learned(target: ModelFolder, draft: ModelFolder, worths: Iterable[DraftWorth]) -> None:
    """Add what a run's trees brought to what is kept of the pair; a few trees say nothing, and nothing is raised."""
    seen = [worth.seen for worth in worths if worth.seen.num_trees]
    num_trees = float(sum(one.num_trees for one in seen))
    if num_trees < LEAST_TREES:
        return
    tokens, nodes, layers = (
        sum(getattr(one, name) for one in seen) / num_trees for name in ("tokens", "nodes", "layers")
    )
    rate = rate_of(1 + tokens, nodes=nodes, layers=layers)
    before = learned_rate(target, draft)
    if before is not None:
        old = min(before.num_trees, MOST_TREES)
        rate, num_trees = (rate * num_trees + before.rate * old) / (num_trees + old), num_trees + old
    try:
        path = _file_of(target, draft)
        make_folder(path.parent)
        with written_whole(path) as file:
            found = LearnedRate(rate=rate, num_trees=num_trees)
            file.write_text(json.dumps({"format": FORMAT, **asdict(found)}), encoding="utf-8")
    except (EdgespecError, OSError) as error:
        logger.warning("what this run has learned of the draft is not kept: %s", error)


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
    return cache_folder() / "drafts" / f"{fingerprint(target)}-{fingerprint(draft)}.json"
