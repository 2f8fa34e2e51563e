"""What a profile says of trees: the settings of its plan, the pair's acceptance, and limits of other policies."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import torch

from edgespec.draft.calls import DraftCalls
from edgespec.grow.acceptance import AcceptanceModel, default_acceptance
from edgespec.grow.opt_tree import stop_gain_at
from edgespec.grow.sequoia import best_limits, sequoia_table
from edgespec.tree.policies import policy_named
from edgespec.tree.settings import TreeOptions, TreeSettings
from edgespec.tuning.draft_memory import LearnedRate, MeanGrowth, rate_of
from edgespec.tuning.memory import known_costs
from profiles.schema import Plan, Profile


def tree_settings(plan: Plan, trees: TreeOptions | None = None) -> TreeSettings:
    """Return the plan as settings, with the single values that `trees` give instead.

    Another policy than the plan's drops the plan, and so does what the plan's policy has no use for.
    """
    trees = trees or TreeOptions()
    given, policy = trees.explicit, policy_named(plan.policy)
    is_other = given.get("policy", plan.policy) != plan.policy or given.get("draw", policy.draws[0]) not in policy.draws
    if is_other or not all(map(policy.uses, given)):
        return trees.settings
    limits = {name: getattr(plan, name) for name in ("size", "threshold", "stop_gain") if policy.uses(name)}
    return TreeSettings(**{"policy": plan.policy, **limits, **given})


def acceptance_of(profile: Profile) -> AcceptanceModel | None:
    """Return the pair's own acceptance model, where one was fitted."""
    if profile.acceptance is None:
        return None
    return _acceptance(profile.name, json.dumps(profile.acceptance, default=str))


@functools.lru_cache(maxsize=4)
def _acceptance(name: str, document: str) -> AcceptanceModel:
    return AcceptanceModel.from_document(json.loads(document), Path(f"{name}.toml"))


def measured_draft(profile: Profile, plan: Plan, calls: DraftCalls) -> tuple[LearnedRate, MeanGrowth] | None:
    """Return how far the draft's guesses went in the plan's trees, and what these took; None where it had none."""
    seen, growth = [one for one in plan.by_size if one.nodes > 0 and one.layers > 0], known_costs(profile, calls).growth
    if not seen or not growth.is_known:
        return None
    mean = min(seen, key=lambda one: abs(one.size - plan.size))
    seconds = growth.seconds(mean.layers, mean.nodes)
    num_trees = max(1.0, plan.num_trees)
    rate = rate_of(mean.tokens, nodes=mean.nodes, layers=mean.layers)
    took = MeanGrowth(nodes=mean.nodes, layers=mean.layers, seconds=seconds, num_trees=num_trees, place=profile.name)
    return LearnedRate(rate=rate, num_trees=num_trees), took


def with_stop_gain(tree: TreeSettings, profile: Profile) -> tuple[TreeSettings, str]:
    """Return OPT-Tree's settings with the delta that the profile's seconds give, and a note of it.

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
    return replace(tree, stop_gain=stop_gain), note


def with_best_limits(
    tree: TreeSettings, largest_tree: TreeSettings, profile: Profile, temperature: float
) -> tuple[TreeSettings, str]:
    """Return Sequoia's settings of the size and depth of most tokens a second, and a note of them.

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
    return replace(tree, size=size, depth=depth), note
