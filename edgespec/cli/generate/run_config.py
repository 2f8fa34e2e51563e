"""Every setting of a run that shapes its texts, by name: what results must have in common to be mixed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from edgespec.cli.generate.requests import RunSettings
from edgespec.config import SamplingSettings
from edgespec.tree.settings import TreeSettings

if TYPE_CHECKING:
    import torch

    from edgespec.pair.pair import ModelPair


def run_config(
    pair: ModelPair,
    run: RunSettings,
    tree: TreeSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quant: str | None,
    draft_quant: str | None,
) -> dict[str, Any]:
    """Return the settings by name.

    Models are known by their content, so that a folder may move; of the tree only what is not default is kept.
    """
    from edgespec.pair.folder import fingerprint

    default = dataclasses.asdict(TreeSettings())
    chosen = {name: value for name, value in dataclasses.asdict(tree).items() if value != default[name]}
    return {
        "target": f"{pair.target.folder.name} {fingerprint(pair.target)}",
        "draft": f"{pair.draft.folder.name} {fingerprint(pair.draft)}" if pair.draft else None,
        "quant": quant or "none",
        "draft_quant": draft_quant or "none",
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        **sampling_fields(run.sampling),
        "seed": run.seed if run.seed_is_given else None,
        "max_new_tokens": run.max_new_tokens,
        "raw": run.raw,
        "system": run.system,
        "stop": list(run.stop),
        "profile": run.profile,
        **{f"tree.{name}": value if isinstance(value, (int, float)) else str(value) for name, value in chosen.items()},
    }


def config_hash(config: dict[str, Any]) -> str:
    """Return eight digits that two configurations share only if they are the same."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]


def sampling_fields(sampling: SamplingSettings) -> dict[str, float | int]:
    """Return the sampling settings under their usual names."""
    return {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": int(sampling.top_k),
        "min_p": float(sampling.min_p),
    }
