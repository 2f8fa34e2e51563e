"""The memory that a pair needs and where its layers will live, known from headers, before any weight is read."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from edgespec.config import MIN_CONTEXT, MemoryLimits
from edgespec.draft.own_parts import is_copy, lent_layers
from edgespec.errors import EdgespecError
from edgespec.machine.environment import locks_little
from edgespec.machine.host_memory import (
    address_limit_bytes,
    free_addresses_bytes,
    free_host_bytes,
    room_for_system_bytes,
)
from edgespec.pair.folder import ModelFolder
from edgespec.pair.tree_support import tree_support
from edgespec.placement.cache_memory import layer_keys, may_wait
from edgespec.placement.copied_layers import copy_bytes
from edgespec.placement.drawing_memory import lookup_memory
from edgespec.placement.memory import CUDA_CONTEXT_BYTES, device_memory, host_memory
from edgespec.placement.plain_memory import plain_device_memory
from edgespec.placement.run_config import RunConfig
from edgespec.placement.tower_memory import tower_memory
from edgespec.placement.weights import Weights, weights_by_size
from edgespec.tree.settings import TreeSettings
from offload.errors import PlacementError
from offload.experts.expert_placement import place_on_demand, place_on_host
from offload.host_table import input_table
from offload.layer_store import LayerRecord
from offload.placement import GIB, KEYS, LayerKeys, PlaceBytes, Placement, place_layers
from offload.unpacked_once import added_bytes, with_unpacked

MARGIN_BYTES = GIB  # left free when no limit is given
NUM_SUGGESTIONS = 2
LEAST_GAIN = 0.03  # of the bytes of a pass, for which keys and values wait in RAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes that may be used; on a CPU both are the same memory."""

    device_budget_bytes: int
    host_budget_bytes: int
    host_room_bytes: int = 0  # of the host's budget, left for the system where memory is locked
    cache_bytes: int = 0  # free beyond the host's budget: pages of files may stay there


def usable_host_bytes() -> int:
    """Return the RAM that is free now, less the margin, for which there are addresses."""
    addresses = free_addresses_bytes()
    free_bytes = max(0, free_host_bytes() - MARGIN_BYTES)
    return free_bytes if addresses is None else min(free_bytes, addresses)


def read_memory(limits: MemoryLimits, device: torch.device) -> Memory:
    """Return how much of the memory that is free now may be used, within the limits.

    Raises EdgespecError for a device that is not there and has no limit to plan for.
    """
    host_bytes = usable_host_bytes()
    if device.type == "cpu":
        return memory_within(limits, host_bytes=host_bytes, free_device_bytes=None)
    room_bytes = room_for_system_bytes(host_bytes) if limits.max_cpu_bytes is None else 0
    if torch.cuda.is_available():
        # The plan counts the context, which exists as soon as anything is read of the device.
        free_bytes = torch.cuda.mem_get_info(device)[0] + CUDA_CONTEXT_BYTES
    elif limits.max_gpu_bytes is not None:
        free_bytes = limits.max_gpu_bytes  # a card that is only planned for
    else:
        raise EdgespecError(
            "E_DEVICE", f"there is no '{device}' whose memory could be read.", "Give its size: `max_gpu_bytes`."
        )
    memory = memory_within(limits, host_bytes=host_bytes, free_device_bytes=free_bytes)
    return replace(memory, host_room_bytes=room_bytes)


def memory_within(limits: MemoryLimits, *, host_bytes: int, free_device_bytes: int | None) -> Memory:
    """Return the memory that the limits leave.

    Without a limit, `host_bytes` of RAM may be used, and what is free on a device, less a margin. Where
    `free_device_bytes` is None there is no device but the CPU, and the RAM is both.
    """
    free_bytes = host_bytes
    host_bytes = limits.max_cpu_bytes if limits.max_cpu_bytes is not None else host_bytes
    if free_device_bytes is None:
        cache_bytes = max(0, free_bytes - host_bytes)
        return Memory(device_budget_bytes=host_bytes, host_budget_bytes=host_bytes, cache_bytes=cache_bytes)
    limit_bytes, margin_bytes = limits.max_gpu_bytes, limits.gpu_margin_bytes
    if margin_bytes is None:
        margin_bytes = MARGIN_BYTES if limit_bytes is None else 0
    usable_bytes = max(0, free_device_bytes - margin_bytes)  # more cannot be had, whatever the limit
    budget_bytes = usable_bytes if limit_bytes is None else min(usable_bytes, limit_bytes)
    return Memory(device_budget_bytes=budget_bytes, host_budget_bytes=host_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairWeights:
    """The weights of a pair, known by size: none of them is read yet."""

    target: Weights
    draft: Weights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWeights:
    """The weights of a pair, and where they will live."""

    target: Weights
    draft: Weights | None
    placement: Placement


def pair_weights(target: ModelFolder, draft: ModelFolder | None, run_config: RunConfig) -> PairWeights:
    """Return a pair's weights from its headers; raises EdgespecError where they do not make up the models."""
    dtype = run_config.dtype
    return PairWeights(
        target=weights_by_size(target, dtype=dtype, quant=run_config.quant),
        draft=None if draft is None else weights_by_size(draft, dtype=dtype, quant=run_config.draft_quant),
    )


def place_weights(weights: PairWeights, tree: TreeSettings, run_config: RunConfig, memory: Memory) -> PlacedWeights:
    """Return where each layer will live while these trees grow; without trees, the draft is left out.

    Raises EdgespecError with the table and cheaper settings when nothing fits.
    """
    draft = weights.draft if tree.needs_draft else None
    request = PlacementRequest(weights=replace(weights, draft=draft), tree=tree, run_config=run_config)
    try:
        placement = _place_request(request, memory)
    except PlacementError as error:
        limited = "" if address_limit_bytes() is None else " 'ulimit -v' limits it too: 'ulimit -v unlimited'."
        limits = run_config.limits
        is_limited = limits.max_cpu_bytes is not None or limits.max_gpu_bytes is not None
        way = "Raise the limit" if is_limited else "Free memory or set a limit (without one, 1 GiB stays free)"
        raise EdgespecError(error.code, error.what, way + _advice(request, memory) + limited) from error
    unused_bytes = memory.device_budget_bytes - placement.planned_bytes
    placed = replace(placement, is_cacheable=placement.disk_bytes <= unused_bytes + memory.cache_bytes)
    return PlacedWeights(target=weights.target, draft=draft, placement=placed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A pair, its trees and its run, which are to fit the memory."""

    weights: PairWeights
    tree: TreeSettings
    run_config: RunConfig
    unpacks_draft: bool = False  # the draft's packed weights are unpacked when they are loaded


def _place_request(request: PlacementRequest, memory: Memory) -> Placement:
    """Place all with the draft's packed weights unpacked, where there are such and that fits, else without."""
    draft, device = request.weights.draft, request.run_config.device
    is_other = draft is not None and not is_copy(draft.model.parts)  # an unpacked copy would be as large as its target
    if draft and is_other and added_bytes(draft.skeleton, (draft.skeleton.outside, *draft.skeleton.records), device):
        with suppress(PlacementError):
            return _place_table(replace(request, unpacks_draft=True), memory)
    return _place_table(request, memory)


def _place_table(request: PlacementRequest, memory: Memory) -> Placement:
    """Place all on the device where it fits; where it does not, let input embeddings wait in RAM beside a card."""
    lent = request.weights.draft.skeleton.lent if request.weights.draft else frozenset()
    # A draft that borrows the target's embeddings reads them in each of its passes.
    may_wait = request.run_config.device.type == "cuda" and not lent
    table = input_table(request.weights.target.skeleton) if may_wait else None
    try:
        placement = _place_mode(request, memory, table=None)
    except PlacementError:
        if table is None:
            raise
        return _place_mode(request, memory, table=table)
    if placement.is_resident or table is None:
        return placement
    try:
        return _place_mode(request, memory, table=table)
    except PlacementError:  # for want of RAM
        return placement


def _place_mode(request: PlacementRequest, memory: Memory, *, table: LayerRecord | None) -> Placement:
    """Place whole layers where all fit, or where the run is to have it so; else let their experts come on demand.

    Experts that are to stay with a CPU beside an accelerator are apart from their layers, even where all fit.
    """
    target, mode = request.weights.target.skeleton, request.run_config.expert_mode
    place_as = partial(_place_keys, request, memory, table)
    if not target.expert_groups or mode == "stream":
        return place_as(on_demand=False)
    if mode == "resident":
        return _checked_resident(place_as(on_demand=False))
    if mode == "cpu" and request.run_config.device.type == "cuda":
        return place_as(on_demand=True)
    try:
        whole = place_as(on_demand=False)
    except PlacementError:
        return place_as(on_demand=True)
    return whole if whole.is_resident else place_as(on_demand=True)


def _place_keys(request: PlacementRequest, memory: Memory, table: LayerRecord | None, *, on_demand: bool) -> Placement:
    """Let the keys and values of layers that stream wait in RAM where a pass then moves clearly fewer bytes.

    They do so, too, where nothing fits otherwise. Raises PlacementError where it does not fit so either.
    """
    keys = None if on_demand else _keys_that_may_wait(request)
    try:
        staying = _place_as(request, memory, table, on_demand=on_demand)
    except PlacementError:
        if keys is None:
            raise
        return _place_as(request, memory, table, on_demand=False, keys=keys)
    if keys is None or staying.is_resident or locks_little():
        return staying
    try:
        waiting = _place_as(request, memory, table, on_demand=False, keys=keys)
    except PlacementError:  # for want of RAM
        return staying
    mean_bytes = waiting.streamed_bytes + _mean_share(request.run_config) * waiting.keys_bytes
    pays = waiting.disk_bytes <= staying.disk_bytes and mean_bytes <= (1 - LEAST_GAIN) * staying.streamed_bytes
    return waiting if pays else staying


def _mean_share(run_config: RunConfig) -> float:
    """Return the share of the context that a text has on average while it grows; prompts may be unknown."""
    context = run_config.context_tokens
    prompt = run_config.prompt_tokens if run_config.prompt_tokens < context else 0
    return (prompt + context) / (2 * context)


def _keys_that_may_wait(request: PlacementRequest) -> LayerKeys | None:
    """Return the bytes of the target's keys and values by layer; None where they stay where they are.

    That is so on a CPU, whose memory is RAM, where others read them than their own layer, and in families' own caches.
    """
    target, draft = request.weights.target, request.weights.draft
    model = target.skeleton.model
    is_lent = draft is not None and bool(lent_layers(draft.skeleton.model))
    if request.run_config.device.type != "cuda" or is_lent:
        return None
    if tree_support(target.model).has_own_passes or not may_wait(model):
        return None
    return layer_keys(model, request.tree, request.run_config)


def _place_as(
    request: PlacementRequest,
    memory: Memory,
    table: LayerRecord | None,
    *,
    on_demand: bool,
    keys: LayerKeys | None = None,
) -> Placement:
    """Place all; keys and values that are given go with their layers."""
    target, draft, run_config = request.weights.target.skeleton, request.weights.draft, request.run_config
    draft_skeleton, on_cuda = draft.skeleton if draft else None, run_config.device.type == "cuda"
    planned: Any = {"tree": request.tree, "run_config": run_config, "table": table, "on_demand": on_demand}
    if tree_support(request.weights.target.model).has_own_passes:
        uses = plain_device_memory(target, draft_skeleton, **planned)
    else:
        uses = device_memory(target, draft_skeleton, budget_bytes=memory.device_budget_bytes, **planned)
        uses |= tower_memory(target, run_config)
    of_host = host_memory(target, dtype=run_config.dtype, table=table, on_demand=on_demand) if on_cuda else None
    (uses if of_host is None else of_host).update(lookup_memory(request.tree, run_config))
    for role, weights in (("target", request.weights.target), ("draft", draft)):
        # A copy of the target computes with the target's adapters.
        if weights is not None and weights.adapters and not is_copy(weights.model.parts):
            uses[f"{role}: adapters"] = sum(adapter.num_bytes for adapter in weights.adapters)
    if request.unpacks_draft and draft_skeleton is not None:
        records = (draft_skeleton.outside, *draft_skeleton.records)
        uses["draft: weights"] += added_bytes(draft_skeleton, records, run_config.device)
    options: PlaceBytes = {
        "device_memory": uses,
        "device_budget_bytes": memory.device_budget_bytes,
        "host_memory": of_host,
        "host_budget_bytes": memory.host_budget_bytes,
        "host_room_bytes": memory.host_room_bytes,
        "max_resident": run_config.limits.max_resident_layers,
    }
    if not on_demand and (copies := copy_bytes(request.weights.target, draft, run_config.device)):
        uses["draft: weights"] -= sum(copies)
        options["copy_bytes"] = copies
    if keys is not None:
        uses[KEYS] -= sum(keys.device_bytes)
        options["keys"] = keys
    if on_demand and on_cuda and run_config.expert_mode == "cpu":
        placement = place_on_host(target.dense_records, target.expert_groups, **options)
    elif on_demand:
        placement = place_on_demand(target.dense_records, target.expert_groups, **options)
    else:
        placement = place_layers(target.records, **options)
    placement = with_unpacked(placement, target, run_config.device)
    return replace(placement, has_table_on_host=table is not None, has_unpacked_draft=request.unpacks_draft)


def _checked_resident(placement: Placement) -> Placement:
    """Return the placement; raises PlacementError where layers, and their experts, would stream."""
    if placement.is_resident:
        return placement
    raise PlacementError(
        "E_MEMORY",
        f"`experts=resident` keeps all experts in memory, and {placement.in_words} fit:\n{placement.table()}\n",
        "Raise the limit, or let the experts come on demand: `experts=auto`.",
        needed_bytes=placement.planned_bytes + placement.streamed_bytes,
    )


def _advice(request: PlacementRequest, memory: Memory) -> str:
    """Return the rest of the sentence: cheaper settings that fit, and what they need; else what the cheapest need."""
    fitting, too_much = [], []
    for settings, cheaper in _cheaper(request):
        limits = replace(cheaper.run_config.limits, max_resident_layers=0)
        try:
            least = _place_request(replace(cheaper, run_config=replace(cheaper.run_config, limits=limits)), memory)
            fitting.append((settings, least.planned_bytes))
        except PlacementError as error:
            too_much.append((settings, error.needed_bytes))
    if fitting:
        # The first of each kind gives up least; of two, one changes the tree and one the context, where both help.
        kinds = {settings.split("=")[0]: (settings, needed_bytes) for settings, needed_bytes in reversed(fitting)}
        return f", or use {_named(list(kinds.values())[::-1])}."
    cheapest = sorted(too_much, key=lambda item: item[1])
    tried = f": even {_named(cheapest)} is too much" if cheapest else ""
    return f"{tried}. Quantised layers (`quant=nf4`) and, on a CPU, `dtype=bfloat16` may need less."


def _named(variants: list[tuple[str, int]]) -> str:
    return " or ".join(
        f"`{settings}` (from {num_bytes / GIB:.3f} GiB)" for settings, num_bytes in variants[:NUM_SUGGESTIONS]
    )


def _cheaper(request: PlacementRequest) -> Iterator[tuple[str, PlacementRequest]]:
    """Yield ever cheaper variants: fewer texts, smaller trees, shorter contexts, no tree, all together."""
    tree, run_config = request.tree, request.run_config
    context, prompt = run_config.context_tokens, run_config.prompt_tokens
    # A prompt as long as the context is one that is not known: it shrinks with the context.
    shortest = min(context, (prompt if prompt < context else 0) + MIN_CONTEXT)
    plain = replace(request, weights=replace(request.weights, draft=None), tree=tree.plain())

    def shorter(of: PlacementRequest, tokens: int) -> PlacementRequest:
        return replace(of, run_config=replace(run_config, context_tokens=tokens, prompt_tokens=min(prompt, tokens)))

    for count in [run_config.num_texts >> halvings for halvings in range(1, run_config.num_texts.bit_length())]:
        yield f"parallel={count}", replace(request, run_config=replace(run_config, num_texts=count))
    if tree.uses("size"):
        for size in [tree.size >> halvings for halvings in range(1, tree.size.bit_length())]:
            yield f"size={size}", replace(request, tree=replace(tree, size=size))
    for tokens in [context >> halvings for halvings in range(1, context.bit_length())]:
        if tokens > shortest:
            yield f"context_tokens={tokens}", shorter(request, tokens)
    if request.weights.draft is not None:
        yield "policy=none", plain
    if shortest < context:
        yield f"policy=none, context_tokens={shortest}", shorter(plain, shortest)
