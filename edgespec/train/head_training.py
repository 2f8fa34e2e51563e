"""Train a feature head as EAGLE, HASS or CORAL do, on features that were collected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.train.feature_files import FeatureFiles
from edgespec.train.head_model import own_tensors
from edgespec.train.head_objective import LossWeights, Precision, head_losses, held_out_agreement
from edgespec.train.training_loop import Progress, split_blocks, train
from edgespec.train.training_settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a head is trained: steps of the multi-step forward, and the losses' weights."""

    name: str
    num_steps: int
    weights: LossWeights

    def __post_init__(self) -> None:
        weights = (self.weights.regression, self.weights.distribution, self.weights.alignment)
        if self.num_steps < 1 or min(weights) < 0 or max(weights) == 0:
            raise EdgespecError("E_SETTING", f"a head cannot be trained so: {self}.", "Use weights of 0 or more.")


METHODS: Mapping[str, Method] = {
    "eagle": Method(name="eagle", num_steps=1, weights=LossWeights(regression=1.0)),
    "hass": Method(name="hass", num_steps=3, weights=LossWeights(regression=1.0)),
    # CORAL, appendix A: half the regression's weight, and 0.05 to 0.2 for CSRA.
    "coral": Method(name="coral", num_steps=3, weights=LossWeights(regression=0.5, alignment=0.1)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """What was trained on what, and how it does on held-out texts."""

    num_blocks: int
    num_held_out: int
    held_out: Mapping[str, float]  # see `held_out_agreement`

    def as_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {"blocks": self.num_blocks, "held_out_blocks": self.num_held_out, "held_out": dict(self.held_out)}


def train_head(
    model: PreTrainedModel,
    files: FeatureFiles,
    method: Method,
    settings: TrainingSettings,
    folder: Path,
    *,
    identity: str,
    precision: Precision,
    progress: Progress | None = None,
) -> HeadReport:
    """Train a head in place; checkpoints go to `folder`, and `identity` says what its features are of.

    Raises EdgespecError: see `edgespec.train.training_loop.train`.
    """
    device = model.get_input_embeddings().weight.device
    assert isinstance(device, torch.device)
    split = split_blocks(files, settings)

    def evaluate() -> dict[str, float]:
        return held_out_agreement(model, files, split.held_out, batch_blocks=settings.batch_blocks, precision=precision)

    found = train(
        own_tensors(model),
        lambda batch: head_losses(
            model, batch, num_steps=method.num_steps, weights=method.weights, precision=precision
        ),
        files,
        split,
        settings,
        folder,
        identity=f"{identity} {method}",
        device=device,
        evaluate=evaluate,
        progress=progress,
    )
    return HeadReport(num_blocks=len(split.train), num_held_out=len(split.held_out), held_out=found or {})
