"""The JSON record of one prompt: names that users of other tools know, stable from here on."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What all prompts of a run share."""

    sampling: SamplingSettings
    max_new_tokens: int
    seed: int
    seed_is_given: bool  # a random seed does not tell runs apart
    raw: bool
    profile: str | None = None  # the name of the one that settings come from
    predicted_per_s: float | None = None  # by its plan, where that is followed


def success_record(
    index: int,
    row: PromptRow,
    engine: Engine,
    result: GenerationResult,
    run: dict[str, Any],
    settings: RunSettings,
) -> dict[str, Any]:
    """The record of a finished text; `run` is what all records of the run share."""
    passes = result.passes
    completion_tokens = len(result.token_ids)
    return {
        **_head(index, row),
        "text": result.text,
        "turns": [result.text],
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
            "draw": engine.policy.draw(result.sampling),
            "lossless": engine.tree.is_lossless,
            "tree_size": engine.tree.num_nodes or None,
            "tree_depth": engine.tree.num_layers or None,
            "plan": {
                "profile": settings.profile,
                "predicted_tps": _rounded(settings.predicted_per_s),
                "actual_tps": _rounded(result.decode_tokens_per_s),
            },
            "passes": len(passes),
            "draft_n": sum(step.num_drafted for step in passes),
            "draft_n_accepted": sum(len(step.tokens) - 1 for step in passes),
            "mean_accept_len": _rounded(result.tokens_per_pass),
            "accept_lengths": [len(step.tokens) for step in passes],
            "draft_s": _rounded(sum(step.grow_s for step in passes)),
            "verify_s": _rounded(sum(step.target_s for step in passes)),
        },
        "memory": {"gpu_peak_bytes": _gpu_peak_bytes(engine), "cpu_peak_bytes": peak_resident_bytes()},
        **run,
        "created": _now(),
    }


def error_record(index: int, row: PromptRow, error: EdgespecError, run: dict[str, Any]) -> dict[str, Any]:
    """The record of a prompt that failed while it ran."""
    return {
        **_head(index, row),
        "text": None,
        "turns": [],
        "token_ids": [],
        "finish_reason": "error",
        "error": {"type": error.code, "message": error.what, "fix": error.fix},
        "usage": None,
        "timings": None,
        "spec": None,
        "memory": None,
        **run,
        "created": _now(),
    }


def run_fields(engine: Engine, settings: RunSettings) -> dict[str, Any]:
    """What all records of a run share, with a hash of every setting that shapes the text."""
    pair, tree = engine.pair, engine.tree
    fields = {
        "model": str(pair.target.folder),
        "model_revision": _revision(pair.target.folder),
        "draft_model": str(pair.draft.folder) if pair.draft else None,
        "quant": engine.quant or "none",
        "draft_quant": engine.draft_quant or "none",
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": str(engine.device),
    }
    shaping = {
        **fields,
        "sampling": sampling_fields(settings.sampling),
        "seed": settings.seed if settings.seed_is_given else None,
        "max_new_tokens": settings.max_new_tokens,
        "raw": settings.raw,
        "tree": {name: str(value) for name, value in dataclasses.asdict(tree).items()},
    }
    digest = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()
    return {
        "sampling": {**sampling_fields(settings.sampling), "seed": settings.seed},
        **fields,
        "config_hash": digest[:8],
        "edgespec": __version__,
    }


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
    category = row.meta.get("category")
    return {
        "schema": SCHEMA,
        "index": index,
        "id": row.id,
        "category": category,
        "meta": row.meta,
        "prompt": row.prompt,
    }


def _revision(folder: Path) -> str | None:
    """The commit of a Hugging Face cache snapshot."""
    resolved = folder.absolute()
    return resolved.name if resolved.parent.name == "snapshots" else None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
