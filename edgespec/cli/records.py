"""The JSON record of one prompt: names that users of other tools know, stable from here on."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec import __version__
from edgespec.cli.prompts import PromptRow
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.config import SamplingSettings
    from edgespec.engine import Engine
    from edgespec.results import GenerationResult

SCHEMA = "edgespec.result/1"


def success_record(
    index: int, row: PromptRow, engine: Engine, result: GenerationResult, run: dict[str, Any]
) -> dict[str, Any]:
    """The record of a finished text; `run` is what all records of the run share."""
    passes = result.passes
    completion_tokens = len(result.token_ids)
    return {
        **_head(index, row),
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "error": None,
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": 0,
            "completion_tokens": completion_tokens,
            "total_tokens": result.prompt_tokens + completion_tokens,
        },
        "timings": {
            "ttft_s": _rounded(result.time_to_first_token_s),
            "prefill_s": _rounded(result.prefill_s),
            "prefill_tps": _rounded(result.prompt_tokens / result.prefill_s),
            "decode_s": _rounded(result.total_s - result.time_to_first_token_s),
            "decode_tps": _rounded(result.decode_tokens_per_s),
            "total_s": _rounded(result.total_s),
        },
        "spec": {
            "mode": "off" if engine.tree.policy == "none" else "tree",
            "policy": engine.tree.policy,
            "tree_size": engine.tree.size,
            "tree_depth": engine.tree.depth,
            "passes": len(passes),
            "draft_n": sum(step.num_drafted for step in passes),
            "draft_n_accepted": sum(len(step.tokens) - 1 for step in passes),
            "mean_accept_len": _rounded(result.tokens_per_pass),
            "accept_lengths": [len(step.tokens) for step in passes],
            "draft_s": _rounded(sum(step.grow_s for step in passes)),
            "verify_s": _rounded(sum(step.target_s for step in passes)),
        },
        "memory": {"gpu_peak_bytes": _gpu_peak_bytes(engine), "cpu_peak_bytes": peak_resident_bytes()},
        "sampling": {**sampling_fields(result.sampling), "seed": result.seed},
        **run,
        "created": _now(),
    }


def error_record(index: int, row: PromptRow, error: EdgespecError, run: dict[str, Any]) -> dict[str, Any]:
    """The record of a prompt that failed while it ran."""
    return {
        **_head(index, row),
        "text": None,
        "token_ids": [],
        "finish_reason": "error",
        "error": {"type": error.code, "message": error.what},
        **run,
        "created": _now(),
    }


def run_fields(engine: Engine, sampling: SamplingSettings, *, max_new_tokens: int, seed: int) -> dict[str, Any]:
    """What all records of a run share, with a hash of every setting that shapes the text."""
    pair, tree = engine.pair, engine.tree
    fields = {
        "model": str(pair.target.folder),
        "draft_model": str(pair.draft.folder) if pair.draft else None,
        "quant": "none",
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.device),
    }
    settings = {
        **fields,
        "sampling": sampling_fields(sampling),
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "tree": [tree.policy, tree.size, tree.depth, tree.threshold, tree.max_children, tree.draft_temperature],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return {**fields, "config_hash": digest[:8], "edgespec": __version__}


def sampling_fields(sampling: SamplingSettings) -> dict[str, float | int]:
    """The sampling settings under their usual names."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }


def peak_resident_bytes() -> int | None:
    """The most memory this process has held; None where the system does not tell."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux that inherits the peak of the process that started this one.
        peak_kib = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
        return int(peak_kib[1]) * 1024 if peak_kib else None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _gpu_peak_bytes(engine: Engine) -> int | None:
    if engine.device.type != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_allocated(engine.device)


def _head(index: int, row: PromptRow) -> dict[str, Any]:
    return {"schema": SCHEMA, "index": index, "id": row.id, "meta": row.meta, "prompt": row.prompt}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
