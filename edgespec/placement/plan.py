"""Where a pair's weights would live, from names and limits alone."""

from functools import partial
from pathlib import Path
from typing import Unpack

from edgespec.errors import EdgespecError
from edgespec.pair.drafts import planned_draft
from edgespec.pair.find import find_pair
from edgespec.pair.folder import open_architecture
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.pair.tree_support import supported_trees
from edgespec.placement.own_layer import acceptance_of_layer, steps_here, weigh_own_layer
from edgespec.placement.place import pair_weights, place_weights, read_memory
from edgespec.placement.run_config import RunConfigOptions, resolve_run_config
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement


def placement_for(
    target: str | Path | None = None,
    *,
    draft: str | Path | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    tree: TreeSettings | None = None,
    **options: Unpack[RunConfigOptions],
) -> Placement:
    """Return where the weights would live, and what memory would be spent on.

    Names mean what `Engine.from_pretrained` says. A device that is not here can be planned for by `limits`. Raises
    EdgespecError, with cheaper settings, where the pair does not fit.
    """
    target_folder, draft_folder = find_pair(target, draft, revision, draft_revision)
    if isinstance(draft_folder, tuple):
        raise EdgespecError("E_SETTING", "a placement is of one draft.", "Name one with `draft`.")
    if target_folder is None:
        target_folder, draft_folder = DEMO_FOLDER / "target", draft_folder or DEMO_FOLDER / "draft"
    tree = tree or TreeSettings()
    target_model = open_architecture(target_folder)
    draft_model = None
    if tree.needs_draft:
        target_model, draft_model = planned_draft(draft_folder, target_model)
    run_config = resolve_run_config(target_model, None, draft=draft_model, is_planned_only=True, **options)
    weights = pair_weights(target_model, draft_model, run_config)
    memory = read_memory(run_config.limits, run_config.device)
    place = partial(place_weights, weights, run_config=run_config, memory=memory)
    if draft_folder is None and draft_model is not None:
        step_of = steps_here(run_config, target_model.checkpoint)
        acceptance = acceptance_of_layer(weights, tree, None)
        draft_model = draft_model if weigh_own_layer(tree, place, step_of, acceptance).drafts else None
    tree = supported_trees(
        target_model, tree, has_draft=draft_model is not None, keeps_row_bits=run_config.needs_row_bits
    )
    return place(tree).placement
