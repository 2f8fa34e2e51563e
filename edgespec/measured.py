"""What a profile says, as the rooms that use it take it: acceptance, passes, shares of a pass, limits of a policy."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import torch

from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.opt_tree import stop_gain_at
from edgespec.grow.sequoia import best_limits, sequoia_table
from edgespec.tree.settings import TreeSettings
from edgespec.tuning.memory import known_costs
from profiles.schema import Profile


def acceptance_of(profile: Profile) -> AcceptanceModel | None:
    """Return the pair's own acceptance model, where one was fitted."""
    if profile.acceptance is None:
        return None
    return _acceptance(profile.name, json.dumps(profile.acceptance, default=str))


def with_stop_gain(tree: TreeSettings, profile: Profile) -> tuple[TreeSettings, tuple[str, ...]]:
    """Return OPT-Tree's settings with the delta that the profile's seconds give, and what is to be said of it.

    A layer is a call of the draft for one node that has children in the end: delta decides on the last layers, which
    are thin.
    """
    costs = known_costs(profile)
    layer_share = costs.growth.seconds(1, 1) - costs.growth.seconds(0, 0)
    layer_share /= costs.passes(1).seconds(1 + tree.num_nodes)
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
    4.3) by the profile; memory is planned for `largest_tree`.
    """
    costs = known_costs(profile)
    tree_s, layer_s, node_s = costs.growth.parts()
    sizes = torch.arange(1, largest_tree.num_nodes + 1)
    depths = torch.arange(1, min(largest_tree.depth, len(sizes)) + 1)[:, None]
    passes_s = torch.tensor([costs.passes(1).seconds(1 + size) for size in sizes.tolist()], dtype=torch.float64)
    seconds = passes_s + tree_s + node_s * sizes + layer_s * depths  # [depth, size]
    model = AcceptanceModel.load(tree.acceptance) if tree.acceptance else acceptance_of(profile) or default_acceptance()
    rates = model.rank_acceptance(temperature, tree.children)
    table = sequoia_table(rates, size=len(sizes), depth=len(depths), max_children=tree.width)
    size, depth = best_limits(table, seconds)
    tokens_per_s = table.expected_tokens(size, depth) / float(seconds[depth - 1, size - 1])
    nodes = "1 node" if size == 1 else f"{size} nodes"
    note = f"sequoia trees of {nodes}, depth {depth}: {tokens_per_s:.3g} tokens/s by profile {profile.name}"
    return replace(tree, size=size, depth=depth), (note,)


@functools.lru_cache(maxsize=4)
def _acceptance(name: str, document: str) -> AcceptanceModel:
    return AcceptanceModel.from_document(json.loads(document), Path(f"{name}.toml"))
