"""Train a feature head as EAGLE, HASS or CORAL do, on features that were collected."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.head_losses import LogitsOf
from edgespec.train.head_objective import LossWeights, Precision, head_losses, held_out_agreement, with_noise
from edgespec.train.training_loop import TrainingReport, TrainingRun, train


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to train a head: steps of the multi-step forward, the losses' weights, and noise."""

    name: str
    num_steps: int
    weights: LossWeights
    # On the target's features that the head reads, uniform between minus and plus this: EAGLE's, which HASS
    # and CORAL keep. It is absolute, as theirs: features after the final norm are of size 1 or so.
    feature_noise: float = 0.1

    def __post_init__(self) -> None:
        weights = self.weights.given
        if self.num_steps < 1 or min(*weights, self.feature_noise) < 0 or max(weights) == 0:
            raise EdgespecError("E_SETTING", f"a head cannot be trained so: {self}.", "Use weights of 0 or more.")
        if self.weights.alignment is None and self.weights.regression == 0:
            what = "CSRA cannot be as large as the regression, whose weight is 0."
            raise EdgespecError("E_SETTING", what, "Give `alignment_weight` too, or leave the regression's weight.")


METHODS: Mapping[str, Method] = {
    "eagle": Method(name="eagle", num_steps=1, weights=LossWeights(regression=1.0)),
    "hass": Method(name="hass", num_steps=3, weights=LossWeights(regression=1.0, top_tokens=1.0)),
    # CORAL, appendix A: half the regression's weight, and as much for CSRA. It is set beside HASS's alignment
    # alone (section 2.3), and its equation 3 has no top-K loss.
    "coral": Method(name="coral", num_steps=3, weights=LossWeights(regression=0.5, alignment=None)),
    # EAGLE-3: distributions alone, unrolled over the head's own output, later steps for less (its public code).
    "eagle3": Method(
        name="eagle3",
        num_steps=7,
        weights=LossWeights(regression=0.0, distribution=1.0, step_decay=0.8, feeds_gradient=True),
        feature_noise=0.0,
    ),
}


def train_head(
    model: PreTrainedModel,
    method: Method,
    *,
    run: TrainingRun,
    precision: Precision,
    target_logits: LogitsOf | None = None,
) -> TrainingReport:
    """Train a head in place; raises EdgespecError: see `edgespec.train.training_loop.train`.

    `target_logits` are those of the target's features, where the head has a language model head of its own.
    `held_out` in the report: see `held_out_agreement`; and the weight that CSRA has by its balance.
    """

    def losses_of(batch: FeatureBatch, read: FeatureBatch) -> dict[str, Tensor]:
        return head_losses(
            model,
            batch,
            read=read,
            num_steps=method.num_steps,
            weights=method.weights,
            precision=precision,
            target_logits=target_logits,
        )

    def objective(batch: FeatureBatch, generator: torch.Generator) -> dict[str, Tensor]:
        return losses_of(batch, with_noise(batch, method.feature_noise, generator))

    @torch.no_grad()
    def evaluate(held_out: Sequence[int]) -> dict[str, float]:
        size = run.settings.batch_blocks
        found = held_out_agreement(
            model, run.files, held_out, batch_blocks=size, precision=precision, target_logits=target_logits
        )
        if method.weights.alignment is None:
            batch = run.files.batch(held_out[:size], device=model.device)
            found["alignment_weight"] = float(losses_of(batch, batch)["alignment_weight"])
        return found

    identified = dataclasses.replace(run, identity=f"{run.identity} {method}")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return train(trained, objective, run=identified, evaluate=evaluate)
