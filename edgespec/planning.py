"""The memory plan of a pair that nobody has loaded: from headers, or from a config.json alone."""

from __future__ import annotations

from pathlib import Path

from edgespec.config import MemoryLimits, parse_quant
from edgespec.device import planning_device, resolve_dtype
from edgespec.model_folder import open_architecture, open_draft_architecture
from edgespec.named_pair import find_pair
from edgespec.pair import DEMO_FOLDER
from edgespec.plan import plan_pair
from edgespec.target import offload_errors
from edgespec.tree_settings import TreeSettings
from offload.placement import Placement


def plan_for(
    target: str | Path | None = None,
    *,
    draft: str | Path | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    tree: TreeSettings | None = None,
    limits: MemoryLimits | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quant: str | None = None,
    draft_quant: str | None = None,
    context_tokens: int = 2048,
    prompt_tokens: int | None = None,
) -> Placement:
    """Where the weights would live, and what memory would be spent on; names mean what `Engine.from_pretrained` says.

    A device that is not here can be planned for by `limits`. Raises EdgespecError, with cheaper settings, where
    the pair does not fit.
    """
    target_folder, draft_folder = find_pair(target, draft, revision, draft_revision)
    if target_folder is None:
        target_folder, draft_folder = DEMO_FOLDER / "target", draft_folder or DEMO_FOLDER / "draft"
    tree = tree or TreeSettings()
    wants_draft = draft_folder is not None and tree.policy != "none"
    target_model = open_architecture(target_folder)
    place = planning_device(device)
    with offload_errors():
        return plan_pair(
            target_model,
            open_draft_architecture(draft_folder, target_model) if draft_folder is not None and wants_draft else None,
            tree=tree if wants_draft else tree.plain(),
            limits=limits or MemoryLimits(),
            device=place,
            dtype=resolve_dtype(dtype, target_model.config, place),
            quant=parse_quant(quant),
            draft_quant=parse_quant(draft_quant, flag="--draft-quant"),
            context_tokens=context_tokens,
            prompt_tokens=prompt_tokens or context_tokens,
        ).placement
