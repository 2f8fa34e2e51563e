"""What a pair will need and where its layers will live: known before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from edgespec.config import MIN_CONTEXT, MemoryLimits, parse_quant
from edgespec.errors import EdgespecError
from edgespec.model.device import planning_device, resolve_dtype
from edgespec.model.target import offload_errors
from edgespec.pair.find import find_pair
from edgespec.pair.folder import ModelFolder, open_architecture, open_draft_architecture
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.placement.memory import cache_rows, device_uses, host_uses
from edgespec.placement.weights import Weights, plan_weights
from edgespec.tree.settings import TreeSettings, settings_used_by
from offload.errors import MemoryPlanError
from offload.placement import GIB, Placement, place_layers
from offload.skeleton import Skeleton

MARGIN_BYTES = GIB  # left free when no limit is given
NUM_SUGGESTIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A pair, its settings, and the memory that there is."""

    target: Skeleton
    draft: Skeleton | None
    tree: TreeSettings
    context_tokens: int
    prompt_tokens: int
    dtype: torch.dtype
    device: torch.device
    device_budget_bytes: int
    host_budget_bytes: int
    max_resident: int | None


def memory_budgets(limits: MemoryLimits, device: torch.device) -> tuple[int, int]:
    """Bytes of device memory and of RAM that may be used; on a CPU they are the same memory.

    Raises EdgespecError for a device that is not there and has no limit to plan for.
    """
    free_bytes = psutil.virtual_memory().available
    host_bytes = limits.max_cpu_bytes if limits.max_cpu_bytes is not None else max(0, free_bytes - MARGIN_BYTES)
    if device.type == "cpu":
        return host_bytes, host_bytes
    limit_bytes, margin_bytes = limits.max_gpu_bytes, limits.gpu_margin_bytes
    if torch.cuda.is_available():
        free_gpu_bytes, _ = torch.cuda.mem_get_info(device)
    elif limit_bytes is not None:
        free_gpu_bytes = limit_bytes  # a card that is only planned for
    else:
        raise EdgespecError(
            "E_DEVICE", f"there is no '{device}' whose memory could be asked for.", "Give its size: `max_gpu_bytes`."
        )
    if margin_bytes is None:
        margin_bytes = MARGIN_BYTES if limit_bytes is None else 0
    usable_bytes = max(0, free_gpu_bytes - margin_bytes)
    # More than is free cannot be had, whatever the limit.
    return usable_bytes if limit_bytes is None else min(usable_bytes, limit_bytes), host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """The pair's weights, known by size, and where they will live."""

    target: Weights
    draft: Weights | None
    placement: Placement


def check_tree_fits(tree: TreeSettings, planned: TreeSettings) -> None:
    """Raise EdgespecError for trees that need more room than those that memory was planned for."""
    if all(rows <= room for rows, room in zip(cache_rows(0, tree), cache_rows(0, planned), strict=True)):
        return
    drafted_per_node = tree.num_drafted // (tree.num_nodes + 1)
    largest = max(0, min(planned.num_nodes, planned.num_drafted // drafted_per_node - 1))
    raise EdgespecError(
        "E_TREE_SIZE",
        f"{tree.policy} trees of {tree.num_nodes} nodes need more memory than is planned, which has room for "
        f"{largest}.",
        f"Use {largest} or less, or start with `size={tree.num_nodes}`.",
    )


def plan_pair(
    target: ModelFolder,
    draft: ModelFolder | None,
    *,
    tree: TreeSettings,
    limits: MemoryLimits,
    device: torch.device,
    dtype: torch.dtype,
    quant: str | None,
    draft_quant: str | None,
    context_tokens: int,
    prompt_tokens: int,
) -> PairPlan:
    """Plan a pair from its headers; raises EdgespecError when it does not fit, OffloadError when it is no model."""
    target_weights = plan_weights(target, dtype=dtype, quant=quant)
    draft_weights = plan_weights(draft, dtype=dtype, quant=draft_quant) if draft is not None else None
    device_bytes, host_bytes = memory_budgets(limits, device)
    request = PlanRequest(
        target=target_weights.planned,
        draft=draft_weights.planned if draft_weights else None,
        tree=tree,
        context_tokens=context_tokens,
        prompt_tokens=prompt_tokens,
        dtype=dtype,
        device=device,
        device_budget_bytes=device_bytes,
        host_budget_bytes=host_bytes,
        max_resident=limits.max_resident_layers,
    )
    return PairPlan(target=target_weights, draft=draft_weights, placement=plan_memory(request))


def plan_memory(request: PlanRequest) -> Placement:
    """Where each layer lives; raises EdgespecError with the table and cheaper settings when nothing fits."""
    try:
        return _place(request)
    except MemoryPlanError as error:
        raise EdgespecError(error.code, error.what, _advice(request)) from error


def _place(request: PlanRequest) -> Placement:
    on_accelerator = request.device.type == "cuda"
    return place_layers(
        request.target.records,
        device_uses=device_uses(
            request.target,
            request.draft,
            tree=request.tree,
            context_tokens=request.context_tokens,
            prompt_tokens=request.prompt_tokens,
            dtype=request.dtype,
            device=request.device,
        ),
        device_budget_bytes=request.device_budget_bytes,
        host_uses=host_uses(request.target) if on_accelerator else None,
        host_budget_bytes=request.host_budget_bytes,
        max_resident=request.max_resident,
    )


def _advice(request: PlanRequest) -> str:
    """Cheaper settings that fit, each with what it needs at least; where none does, what the cheapest need."""
    fitting, too_much = [], []
    for settings, cheaper in _cheaper(request):
        try:
            needed_bytes = _place(replace(cheaper, max_resident=0)).planned_bytes
            fitting.append((settings, needed_bytes))
        except MemoryPlanError as error:
            too_much.append((settings, error.needed_bytes))
    if fitting:
        # The first of each kind gives up least; of two, one changes the tree and one the context, where both help.
        kinds = {settings.split("=")[0]: (settings, needed_bytes) for settings, needed_bytes in reversed(fitting)}
        return f"Raise the limit, or use {_named(list(kinds.values())[::-1])}."
    cheapest = sorted(too_much, key=lambda item: item[1])
    tried = f": even {_named(cheapest)} is too much" if cheapest else ""
    return f"Raise the limit{tried}. Quantised layers (`quant=nf4`) and, on a CPU, `dtype=bfloat16` may need less."


def _named(variants: list[tuple[str, int]]) -> str:
    return " or ".join(
        f"`{settings}` (from {num_bytes / GIB:.3f} GiB)" for settings, num_bytes in variants[:NUM_SUGGESTIONS]
    )


def _cheaper(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Ever cheaper variants of the request: smaller trees, shorter contexts, no tree, all together."""
    tree, context, prompt = request.tree, request.context_tokens, request.prompt_tokens
    # A prompt as long as the context is one that is not known: it shrinks with the context.
    shortest = min(context, (prompt if prompt < context else 0) + MIN_CONTEXT)
    plain = replace(request, draft=None, tree=tree.plain())
    if "size" in settings_used_by(tree.policy):
        for size in [tree.size >> halvings for halvings in range(1, tree.size.bit_length())]:
            yield f"size={size}", replace(request, tree=replace(tree, size=size))
    for tokens in [context >> halvings for halvings in range(1, context.bit_length())]:
        if tokens > shortest:
            yield f"context_tokens={tokens}", replace(request, context_tokens=tokens, prompt_tokens=min(prompt, tokens))
    if request.draft is not None:
        yield "policy=none", plain
    if shortest < context:
        short = replace(plain, context_tokens=shortest, prompt_tokens=min(prompt, shortest))
        yield f"policy=none, context_tokens={shortest}", short


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
            draft_quant=parse_quant(draft_quant, setting="draft_quant"),
            context_tokens=context_tokens,
            prompt_tokens=prompt_tokens or context_tokens,
        ).placement
