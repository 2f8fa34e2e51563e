"""Settings of trees for a target that follows no branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.pair.tree_support import as_chain, branches_of
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings


@pytest.mark.parametrize("policy", [policy for policy in POLICIES.values() if policy.name != "static"])
def test_what_a_policy_asks_for_is_named(policy: object) -> None:
    """Policies of fixed branches, and of children that are sampled by default, are no chains; the others are."""
    name = getattr(policy, "name", "")
    named = {
        "dyspec": "draw=sampled",
        "sequoia": "draw=sampled",
        "specinfer": "policy=specinfer",
        "mcsd": "policy=mcsd",
    }
    own = TreeSettings(policy=name)
    assert branches_of(own) == named.get(name)
    if name not in named:
        assert as_chain(own).max_children == (1 if own.uses("max_children") else None)


def test_shapes_without_branches_are_chains(tmp_path: Path) -> None:
    """Whatever the policy calls them."""
    file = tmp_path / "tree.json"
    file.write_text('{"parents": [-1, 0, 1]}')
    for tree in (
        TreeSettings(policy="specinfer", draw="coupled", branching=(1, 1)),
        TreeSettings(policy="mcsd", draw="coupled", fork=(1, 4)),
        TreeSettings(policy="static", draw="coupled", tree_file=file),
        TreeSettings(policy="sequoia", draw="coupled", max_children=1),
    ):
        assert branches_of(tree) is None
    branched = tmp_path / "branched.json"
    branched.write_text('{"parents": [-1, 0, 0]}')
    assert branches_of(TreeSettings(policy="static", draw="coupled", tree_file=branched)) == "policy=static"
