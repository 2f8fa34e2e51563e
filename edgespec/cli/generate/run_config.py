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
    from edgespec.profiled import PairSetup


def run_config(setup: PairSetup, run: RunSettings) -> dict[str, Any]:
    """The settings; models are known by their content, so that a folder may move; of the tree, what is not default."""
    from edgespec.pair.folder import fingerprint

    pair, place, tree = setup.pair, setup.place, setup.tree
    default = dataclasses.asdict(TreeSettings())
    chosen = {name: value for name, value in dataclasses.asdict(tree).items() if value != default[name]}
    return {
        "target": f"{pair.target.folder.name} {fingerprint(pair.target)}",
        "draft": f"{pair.draft.folder.name} {fingerprint(pair.draft)}" if pair.draft else None,
        "quant": place.quant or "none",
        "draft_quant": place.draft_quant or "none",
        "dtype": str(place.dtype).removeprefix("torch."),
        "device": place.device.type,
        **sampling_fields(run.sampling),
        "seed": run.seed,
        "max_new_tokens": run.max_new_tokens,
        "raw": run.raw,
        "system": run.system,
        "stop": list(run.stop),
        "grammar": None if run.grammar is None else f"{run.grammar.form} {run.grammar.text}",
        "logprobs": run.logprobs,
        "profile": run.profile,
        **{f"tree.{name}": value if isinstance(value, (int, float)) else str(value) for name, value in chosen.items()},
    }


def config_hash(config: dict[str, Any]) -> str:
    """Return eight digits that two configurations share only if they are the same."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]


def sampling_fields(sampling: SamplingSettings) -> dict[str, Any]:
    """Return the sampling settings under their usual names."""
    return {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": int(sampling.top_k),
        "min_p": float(sampling.min_p),
        "repetition_penalty": float(sampling.repetition_penalty),
        "presence_penalty": float(sampling.presence_penalty),
        "frequency_penalty": float(sampling.frequency_penalty),
        "logit_bias": {str(token): float(bias) for token, bias in dict(sampling.logit_bias).items()},
        "ignore_eos": sampling.ignore_eos,
    }
