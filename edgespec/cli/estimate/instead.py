"""What a target that has no draft could do instead, for `edgespec estimate`: draft for itself, or look up its text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.spelling import spelled
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.estimate.speed import PairOnHardware, SpeedEstimate
    from edgespec.pair.folder import ModelFolder
    from edgespec.placement.run_config import RunConfigOptions
    from edgespec.tree.settings import TreeSettings

GIB = 1 << 30
COPY = "self:nf4"


def instead_facts(
    pair: PairOnHardware,
    plain: SpeedEstimate,
    target: ModelFolder,
    tree: TreeSettings,
    run_options: RunConfigOptions,
    *,
    size: int | None,
) -> dict[str, Any]:
    """Return what the target's own copy would bring, and what looked up text does, as values for programs.

    `pair` has no draft, and `plain` is its speed. `why_not` is there in place of a copy's speed where there is none.
    """
    from edgespec.estimate.acceptance import assumed_acceptance
    from edgespec.estimate.speed import estimate_best
    from edgespec.pair.self_copy import open_self_copy
    from edgespec.pair.tree_support import tree_support
    from edgespec.placement.copied_layers import deep_trees
    from edgespec.placement.place import pair_weights
    from edgespec.placement.run_config import resolve_run_config

    looked_up = pair.assumptions.lookup_tokens * plain.likely.tokens_per_s
    facts: dict[str, Any] = {"lookup_tokens_per_s": float(f"{looked_up:.5g}")}
    if plain.weights.placement.is_resident:
        return {**facts, "why_not": "all of its layers stay in memory, and a copy would replace none", "best": "lookup"}
    if tree_support(target).has_own_passes:
        return {**facts, "why_not": "a copy would have to follow branches, which it cannot", "best": "lookup"}
    copy = open_self_copy(target, Path("self:nf4"))
    try:
        run_config = resolve_run_config(target, None, draft=copy, is_planned_only=True, **run_options)
        own = replace(pair, weights=pair_weights(target, copy, run_config), run_config=run_config)
        rates = assumed_acceptance(tree, None, draft_kind="copy").rates
        found = estimate_best(own, deep_trees(tree, copy), rates, size=size)
    except EdgespecError as error:
        return {**facts, "why_not": error.what.partition("\n")[0].rstrip(":. "), "best": "lookup"}
    per_s = found.likely.tokens_per_s
    return {
        **facts,
        "copy_tokens_per_s": float(f"{per_s:.5g}"),
        "copy_tokens_per_pass": round(found.likely.tokens, 2),
        "copy_nodes": found.nodes,
        "copy_bytes": found.weights.placement.device_bytes.get("draft: weights", 0),
        "best": "self" if per_s > looked_up else "lookup",
    }


def instead_lines(facts: dict[str, Any]) -> list[str]:
    """Return the same as lines for people."""
    looked_up = f"about {facts['lookup_tokens_per_s']:.3g} tokens/s where code repeats itself"
    if "why_not" in facts:
        return [
            f"no draft: what the text had before is looked up, {looked_up}",
            f"  -md self: {spelled(facts['why_not'])}",
        ]
    better = f"-md {COPY}" if facts["best"] == "self" else "looking up alone"
    return [
        f"no draft: -md {COPY} would make {facts['copy_tokens_per_s']:.3g} tokens/s by "
        f"{facts['copy_tokens_per_pass']:.3g} tokens a pass ({facts['copy_nodes']} nodes; its copies take "
        f"{facts['copy_bytes'] / GIB:.3f} GiB); "
        f"looked up text alone makes {looked_up}. Better: {better}"
    ]
