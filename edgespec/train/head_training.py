"""Train a feature head as EAGLE, HASS or CORAL do, on features that were collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.head_model import own_tensors
from edgespec.train.head_objective import LossWeights, Precision, head_losses, held_out_agreement, with_noise
from edgespec.train.training_loop import TrainingRun, split_blocks, train


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a head is trained: steps of the multi-step forward, the losses' weights, and noise."""

    name: str
    num_steps: int
    weights: LossWeights
    # On the target's features that the head reads, uniform between minus and plus so much: EAGLE's, which HASS
    # and CORAL keep. It is absolute, as theirs: features behind the final norm are of size 1 or so.
    feature_noise: float = 0.1

    def __post_init__(self) -> None:
        weights = [weight for weight in dataclasses.astuple(self.weights) if weight is not None]
        if self.num_steps < 1 or min(*weights, self.feature_noise) < 0 or max(weights) == 0:
            raise EdgespecError("E_SETTING", f"a head cannot be trained so: {self}.", "Use weights of 0 or more.")
        if self.weights.alignment is None and self.weights.regression == 0:
            raise EdgespecError(
                "E_SETTING",
                "CSRA cannot be as large as the regression, whose weight is 0.",
                "Give `alignment_weight` too, or leave the regression's weight.",
            )


METHODS: Mapping[str, Method] = {
    "eagle": Method(name="eagle", num_steps=1, weights=LossWeights(regression=1.0)),
    "hass": Method(name="hass", num_steps=3, weights=LossWeights(regression=1.0, top_tokens=1.0)),
    # CORAL, appendix A: half the regression's weight, and as much for CSRA. It is set beside HASS's alignment
    # alone (section 2.3), and its equation 3 has no top-K loss.
    "coral": Method(name="coral", num_steps=3, weights=LossWeights(regression=0.5, alignment=None)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """What was trained on what, and how it does on held-out texts."""

    num_blocks: int
    num_held_out: int
    held_out: Mapping[str, float]  # see `held_out_agreement`; and the weight that CSRA has by its balance

    def as_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {"blocks": self.num_blocks, "held_out_blocks": self.num_held_out, "held_out": dict(self.held_out)}


def train_head(
    model: PreTrainedModel,
    method: Method,
    *,
    run: TrainingRun,
    precision: Precision,
) -> HeadReport:
    """Train a head in place; raises EdgespecError: see `edgespec.train.training_loop.train`."""
    files, settings = run.files, run.settings
    device = model.get_input_embeddings().weight.device
    assert isinstance(device, torch.device)
    split = split_blocks(files, settings)

    def losses_of(batch: FeatureBatch, read: FeatureBatch) -> dict[str, Tensor]:
        return head_losses(
            model, batch, read=read, num_steps=method.num_steps, weights=method.weights, precision=precision
        )

    def objective(batch: FeatureBatch, generator: torch.Generator) -> dict[str, Tensor]:
        return losses_of(batch, with_noise(batch, method.feature_noise, generator))

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        size = settings.batch_blocks
        found = held_out_agreement(model, files, split.held_out, batch_blocks=size, precision=precision)
        if method.weights.alignment is None:
            batch = files.batch(split.held_out[:size], device=device)
            found["alignment_weight"] = float(losses_of(batch, batch)["alignment_weight"])
        return found

    found = train(
        own_tensors(model),
        objective,
        run=dataclasses.replace(run, identity=f"{run.identity} {method}"),
        split=split,
        device=device,
        evaluate=evaluate,
    )
    return HeadReport(num_blocks=len(split.train), num_held_out=len(split.held_out), held_out=found or {})
