"""The device and the number formats a pair runs in, settled once from the settings, and handed on whole."""

from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch

from edgespec.config import MemoryLimits, check_num_texts, parse_experts, require
from edgespec.machine.cpu import check_threads
from edgespec.machine.device import keeps_row_bits, planning_device, resolve_device
from edgespec.pair.folder import ModelFolder
from edgespec.placement.number_formats import resolve_formats
from edgespec.validation import checked_options

DEFAULT_CONTEXT_TOKENS = 2048


class RunConfigOptions(TypedDict, total=False):
    """The run config as a caller names it; each option has a default."""

    device: str | torch.device  # auto, cpu, cuda or cuda:N
    dtype: str | torch.dtype  # auto, float32, bfloat16 or float16
    quant: str | None  # of the target's layers: none, auto, nf4, int4 or int8; None keeps published 4-bit weights
    draft_quant: str | None
    experts: str  # of a mixture: auto, stream, resident or cpu
    exact: bool  # near ties are decided by rows that are read as in plain decoding; False
    cuda_graphs: bool | None  # the draft's calls are recorded and replayed; None: on CUDA, for one text at a time
    limits: MemoryLimits | None  # None: what is free, less a margin
    context_tokens: int  # of the longest text, 2048
    prompt_tokens: int | None  # of the longest prompt; None: as long as the context
    threads: int | None  # of the processor; None: as many as pay, step by step
    parallel: int  # texts under way at once, 1
    cache_tokens: int | None  # of all texts under way together; None: as many as each may have
    corpus_tokens: int  # that texts are continued by, beside themselves, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The device, the number formats, the memory and the length of the texts that a run is planned for."""

    device: torch.device
    dtype: torch.dtype  # that layers compute in
    quant: str | None = (
        None  # the format of the target's layers; None, none: as their files have them (`NumberFormats`)
    )
    draft_quant: str | None = None
    expert_mode: str = (
        "auto"  # of a mixture: on demand where it streams, with their layers, all resident, or on the CPU
    )
    cuda_graphs: bool | None = None  # the draft reads rows of one text in few shapes, which CUDA records and replays
    limits: MemoryLimits
    context_tokens: int
    prompt_tokens: int
    threads: int | None = None  # of the processor; None: as many as pay, step by step
    num_texts: int = 1  # under way at once
    cache_tokens: int | None = None  # of all texts under way together; None: each may be as long as the context
    corpus_tokens: int = 0  # that texts are continued by, beside themselves
    exact: bool = False  # near ties are decided by rows that are read as in plain decoding
    keeps_draft_probs: bool = False  # of all trees, for measurements and records

    @property
    def records_passes(self) -> bool:
        """Whether the draft's passes have few shapes, so that CUDA can record them."""
        return self.device.type == "cuda" and self.num_texts == 1 if self.cuda_graphs is None else self.cuda_graphs

    @property
    def keeps_row_bits(self) -> bool:
        """Whether the target's rows have the bits of plain decoding among any others."""
        return keeps_row_bits(self.dtype, self.device)

    @property
    def needs_row_bits(self) -> bool:
        """Whether rows of trees may decide nothing that a single row would decide otherwise."""
        return self.exact or self.keeps_row_bits

    @property
    def all_tokens(self) -> int:
        """The number of tokens that all texts under way may have together."""
        needed = self.cache_tokens or self.num_texts * self.context_tokens
        return max(self.context_tokens, min(needed, self.num_texts * self.context_tokens))


def resolve_run_config(
    target: ModelFolder,
    max_context: int | None,
    *,
    draft: ModelFolder | None = None,
    is_planned_only: bool = False,
    **options: Unpack[RunConfigOptions],
) -> RunConfig:
    """Return the run config for a pair that has `max_context` positions; raises EdgespecError.

    With `is_planned_only` the device need not be there.
    """
    given = checked_options(RunConfigOptions, options)
    for setting in ("context_tokens", "prompt_tokens", "cache_tokens"):
        count = given.get(setting, 1)
        require(count >= 1, f"`{setting}={count}` is no number of tokens.", "Use 1 or more.")
    name = str(given.get("device", "auto"))
    device = planning_device(name) if is_planned_only else resolve_device(name)
    given_tokens = given.get("context_tokens", DEFAULT_CONTEXT_TOKENS)
    context_tokens = min(given_tokens, max_context or given_tokens)
    expert_mode = parse_experts(given.get("experts", "auto"))
    formats = resolve_formats(
        target,
        draft,
        device=device,
        dtype=given.get("dtype", "auto"),
        quants=(given.get("quant"), given.get("draft_quant")),
        expert_mode=expert_mode,
        max_cpu_bytes=given.get("limits", MemoryLimits()).max_cpu_bytes,
    )
    return RunConfig(
        device=device,
        dtype=formats.dtype,
        quant=formats.quant,
        draft_quant=formats.draft_quant,
        expert_mode=expert_mode,
        cuda_graphs=given.get("cuda_graphs"),
        limits=given.get("limits", MemoryLimits()),
        context_tokens=context_tokens,
        prompt_tokens=given.get("prompt_tokens", context_tokens),
        threads=check_threads(given.get("threads")),
        num_texts=check_num_texts(given.get("parallel", 1)),
        cache_tokens=given.get("cache_tokens"),
        corpus_tokens=given.get("corpus_tokens", 0),
        exact=given.get("exact", False),
    )
