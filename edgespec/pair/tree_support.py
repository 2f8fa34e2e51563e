"""How a model that is opened is decoded: through trees, by chains, or plainly. It is found once for each."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from edgespec.errors import EdgespecError
from edgespec.model.mechanisms.known import read_by
from edgespec.model.tree_support import TreeSupport, check_reads_trees, support_of
from edgespec.pair.folder import MAX_OPEN, ModelFolder
from edgespec.tree.looked_up import without_draft
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings, preset_shape


def branches_of(tree: TreeSettings) -> str | None:
    """Return the setting that asks for branches, or for another draw than chains have; None where nothing does."""
    if tree.policy == "none":
        return None
    if tree.target_width > 1:
        return f"target_width={tree.target_width}"
    shape = preset_shape(tree)
    if shape is not None and shape.depth < shape.num_nodes - 1:
        return f"fork={'x'.join(map(str, tree.fork))}" if tree.fork else f"policy={tree.policy}"
    if tree.max_children is not None and tree.max_children > 1:
        return f"max_children={tree.max_children}"
    return f"draw={tree.children}" if tree.children != "coupled" else None


def as_chain(tree: TreeSettings) -> TreeSettings:
    """Return settings that ask for no branches, with one child a node."""
    return replace(tree, max_children=1) if tree.uses("max_children") else tree


CPU = torch.device("cpu")  # a family's code is the same on each device
ROW_ALONE = "where numbers have few bits a row's depend on the rows beside it, so here it takes one token a pass"


@functools.lru_cache(maxsize=MAX_OPEN)
def tree_support(model: ModelFolder) -> TreeSupport:
    """Return how a target is decoded; raises EdgespecError for one that can be shown to work in no way.

    A model that reads a target's hidden states is a draft, and has none of its own.
    """
    return support_of(model.config, device=CPU, is_tried=model.is_tried)


def notes_of_support(target: ModelFolder, *, keeps_row_bits: bool) -> tuple[str, ...]:
    """Return what is to be said of a target whose cache follows no trees, or none with branches, and why."""
    support = tree_support(target)
    if not support.has_own_passes:
        if keeps_row_bits and _has_other_bits(target):
            return (f"{target.config.model_type}: {ROW_ALONE} (dtype=float32 has trees)",)
        return ()
    alone = ""
    if support.name == "chains" and keeps_row_bits:
        alone = f"; {ROW_ALONE} (dtype=float32 has chains)"
    return (f"{target.config.model_type}: {support.in_words}{alone}",)


def supported_trees(target: ModelFolder, tree: TreeSettings, *, has_draft: bool, keeps_row_bits: bool) -> TreeSettings:
    """Return the trees that a target's cache can follow: without a draft of what the text has had before, or none.

    Raises EdgespecError as `followed_trees` does.
    """
    if not has_draft and tree_support(target).is_plain:
        return tree.plain()
    tree = followed_trees(target, tree, keeps_row_bits=keeps_row_bits)
    return tree if has_draft else without_draft(tree)


def followed_trees(target: ModelFolder, tree: TreeSettings, *, keeps_row_bits: bool) -> TreeSettings:
    """Return the trees with one child a node where the target's cache follows no branches.

    None where its rows are to keep the bits of plain decoding, which transformers' own attention does not, nor do
    mixers of unknown functions. Raises EdgespecError for settings that ask for branches.
    """
    support = tree_support(target)
    if support.name == "trees" and keeps_row_bits and _has_other_bits(target):
        return tree.plain()
    if support.name != "chains":
        return tree
    branches = branches_of(tree)
    if branches is not None:
        what = f"model type '{target.config.model_type}' grows no trees of `{branches}`: it is {support.in_words}."
        fix = "Use `policy=chain`, or leave the trees' settings out."
        if branches == f"draw={tree.children}" and "coupled" in POLICIES[tree.policy].draws:
            fix = "Use `draw=coupled`, or leave the trees' settings out."
        raise EdgespecError("E_PLAIN", what, fix)
    return tree.plain() if keeps_row_bits else as_chain(tree)


def _has_other_bits(target: ModelFolder) -> bool:
    """Return whether a tree's rows have other bits than single ones: mixers' own code sums otherwise for several."""
    return any(record.has_other_bits for record in read_by(target.config.get_text_config(decoder=True)))


def check_gives_hidden_states(target: ModelFolder) -> None:
    """Raise EdgespecError for a target whose passes give logits alone, of which no draft can learn."""
    support = tree_support(target)
    if support.has_own_passes:
        what = (
            f"model type '{target.config.model_type}' gives no hidden states to learn from: it is {support.in_words}."
        )
        raise EdgespecError("E_PLAIN", what, "Use another target.")


def check_may_draft(target: ModelFolder, draft: ModelFolder | None) -> None:
    """Raise EdgespecError for a draft that no trees can grow from: the target's cache, or its own, follows none."""
    if draft is None:
        return
    tree_support(target).check_takes(target.config.model_type, is_language_model=draft.is_language_model)
    if draft.is_language_model:
        check_reads_trees(draft.config)
