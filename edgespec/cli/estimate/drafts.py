"""The drafts at hand side by side, for `edgespec estimate`: lines for people, facts for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import counted
from edgespec.cli.spelling import spelled

if TYPE_CHECKING:
    from pathlib import Path

    from edgespec.estimate.choice import ReckonedDraft
    from edgespec.pair.choices import DraftChoice
    from edgespec.pair.folder import ModelFolder

GIB = 1 << 30


def drafts_that_fit(names: Sequence[Path], target: ModelFolder, tokenizer: Path | None) -> tuple[DraftChoice, ...]:
    """Return the drafts of a list that one may be chosen of; none for a target that takes none.

    Raises EdgespecError for one that cannot be read, or whose tokens are others.
    """
    from edgespec.pair.drafts import planned_drafts
    from edgespec.pair.pair import check_vocabularies
    from edgespec.pair.tree_support import tree_support

    found = () if not names or tree_support(target).is_plain else planned_drafts(names, target)
    for one in found:
        check_vocabularies(target, one.model, tokenizer)
    return found


def draft_facts(found: Sequence[ReckonedDraft], *, lookup_tokens: float) -> list[dict[str, Any]]:
    """Return what each draft would bring, as values for programs; `why_not` is there for one that cannot draft here.

    Without a draft, what the text had before yields `lookup_tokens` a pass where code repeats itself.
    """
    return [_facts(one, lookup_tokens) for one in found]


def _facts(one: ReckonedDraft, lookup_tokens: float) -> dict[str, Any]:
    if one.estimate is None:
        return {"draft": one.draft.name, "why_not": one.about}
    likely, placement = one.estimate.likely, one.estimate.weights.placement
    facts = {
        "draft": one.draft.name,
        "tokens_per_s": float(f"{one.tokens_per_s:.5g}"),
        "tokens_per_pass": round(likely.tokens, 2),
        "nodes": one.estimate.nodes,
        "draft_s": float(f"{likely.draft_s:.5g}"),
        "bytes": one.num_bytes,
        "resident_layers": placement.num_resident,
        "acceptance": one.about,
    }
    if one.draft.model is None:
        facts["lookup_tokens_per_s"] = float(f"{lookup_tokens * one.tokens_per_s:.5g}")
    return facts


def draft_lines(facts: Sequence[dict[str, Any]], best: str) -> list[str]:
    """Return the same as lines for people, the fastest first."""
    ordered = sorted(facts, key=lambda one: -one.get("tokens_per_s", 0.0))
    return ["drafts at hand:", *(f"  {_line(one)}" for one in ordered), f"  most tokens a second: -md {best}"]


def _line(one: dict[str, Any]) -> str:
    if "why_not" in one:
        return f"{one['draft']}: not here: {spelled(one['why_not'])}"
    per_s = f"{one['draft']}: {one['tokens_per_s']:.3g} tokens/s"
    if "lookup_tokens_per_s" in one:
        return f"{per_s}; about {one['lookup_tokens_per_s']:.3g} where code repeats itself, which is looked up"
    return (
        f"{per_s} by {one['tokens_per_pass']:.3g} tokens a pass ({counted(one['nodes'], 'node')}, "
        f"{one['draft_s']:.2g} s of drafting; {one['bytes'] / GIB:.3f} GiB); acceptance {one['acceptance']}"
    )
