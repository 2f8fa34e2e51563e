"""What a profile measured, as the rooms that use it take it: acceptance, curves of passes, shares of a pass, plans."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.opt_tree import stop_gain_at
from edgespec.grow.sequoia import best_limits, sequoia_table
from edgespec.tree.settings import TreeSettings
from profiles.cost import Curve
from profiles.schema import Plan, Profile, TemperaturePlan, Timings


def acceptance_of(profile: Profile) -> AcceptanceModel:
    """Return the pair's acceptance model."""
    return _acceptance(profile.name, json.dumps(profile.acceptance, default=str))


def plan_at(profile: Profile, temperature: float) -> TemperaturePlan:
    """Return the plan of the nearest measured temperature; greedy decoding has its own where there is one."""
    return min(
        profile.plans,
        key=lambda plan: ((plan.temperature == 0) != (temperature == 0), abs(plan.temperature - temperature)),
    )


def plan_for_texts(plan: TemperaturePlan, num_texts: int) -> Plan:
    """Return the plan for the number of texts that is nearest to this one."""
    return min((plan.best, *plan.by_texts), key=lambda found: abs(math.log2(found.num_texts / num_texts)))


def verify_curve(profile: Profile) -> Curve:
    """Return the curve of the seconds of a pass over the nodes below the root."""
    return _curve(profile.verify)


def pass_points(profile: Profile) -> dict[int, list[tuple[float, float]]]:
    """Return the rows of passes and their seconds, by the texts that share them."""
    curve = verify_curve(profile)
    alone = [(1 + count, float(curve(count))) for count in curve.counts]
    together = {
        found.num_texts: [(float(found.num_texts + timing.count), timing.median_s) for timing in found.steps]
        for found in profile.together
    }
    return {1: alone, **together}


def with_stop_gain(tree: TreeSettings, profile: Profile) -> tuple[TreeSettings, tuple[str, ...]]:
    """Return OPT-Tree's settings with the delta that the profile's seconds ask for, and what is to be said of it.

    Nothing changes where its growth was not timed. A layer is a call of the draft for one node that has children in the
    end: delta decides on the last layers, which are thin.
    """
    timed = [cost for cost in profile.growth if (cost.policy, cost.draw) == (tree.policy, tree.children)]
    if not timed:
        return tree, ()
    layer_s = float(_curve(profile.draft)(max(1.0, timed[0].rows_per_inner))) + timed[0].layer_s
    layer_share = layer_s / (float(verify_curve(profile)(tree.num_nodes)) + profile.rest_s)
    stop_gain = stop_gain_at(layer_share)
    note = (
        f"opt-tree stops where a layer adds less than {stop_gain:.2g} tokens: one takes {layer_share:.2g} of a pass, "
        f"by profile {profile.name}"
    )
    return replace(tree, stop_gain=stop_gain), (note,)


def with_best_limits(
    tree: TreeSettings, largest_tree: TreeSettings, profile: Profile, temperature: float
) -> tuple[TreeSettings, tuple[str, ...]]:
    """Return Sequoia's settings of the size and depth of most tokens a second, and what is to be said of them.

    Tokens are expected by the acceptance by rank that the trees will have, seconds are t(n) + d c (Sequoia, section
    4.3) by what the profile timed; `largest_tree` has the largest trees that memory is planned for. Nothing changes
    where growth was not timed.
    """
    timed = [cost for cost in profile.growth if (cost.policy, cost.draw) == (tree.policy, tree.children)]
    if not timed:
        return tree, ()
    (cost, *_), largest = timed, min(largest_tree.num_nodes, profile.verify[-1].count)
    sizes, depths = np.arange(1, largest + 1), np.arange(1, min(largest_tree.depth, largest) + 1)[:, None]
    layer_s = _curve(profile.draft)(np.maximum(1.0, cost.rows_per_inner * sizes / depths)) + cost.layer_s
    seconds = verify_curve(profile)(sizes) + profile.rest_s + cost.base_s + cost.node_s * sizes + depths * layer_s
    model = AcceptanceModel.load(tree.acceptance) if tree.acceptance else acceptance_of(profile)
    rates = model.rank_acceptance(temperature, tree.children)
    table = sequoia_table(rates, size=largest, depth=len(depths), max_children=tree.width)
    size, depth = best_limits(table, torch.from_numpy(seconds))
    tokens_per_s = table.expected_tokens(size, depth) / float(seconds[depth - 1, size - 1])
    nodes = "1 node" if size == 1 else f"{size} nodes"
    note = f"sequoia trees of {nodes}, depth {depth}: {tokens_per_s:.3g} tokens/s by profile {profile.name}"
    return replace(tree, size=size, depth=depth), (note,)


def _curve(timings: Timings) -> Curve:
    return Curve(tuple(float(timing.count) for timing in timings), tuple(timing.median_s for timing in timings))


@functools.lru_cache(maxsize=4)
def _acceptance(name: str, document: str) -> AcceptanceModel:
    return AcceptanceModel.from_document(json.loads(document), Path(f"{name}.toml"))
