"""The objective of a feature head, and its quality: losses of a batch, and agreement on held-out texts.

Legend: B blocks, S rows of a block, h hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.draft.own_parts import aux_states_of
from edgespec.model.family_logits import decoder_of, family_logits
from edgespec.model.row_chunks import row_chunks
from edgespec.train.feature_files import FeatureBatch, FeatureFiles
from edgespec.train.head_losses import TOP_TOKENS, LogitsOf, alignment_losses, distribution_losses, regression_loss
from edgespec.train.head_steps import first_row, head_steps, step_rows

HELD_OUT_DEPTH = 4  # tokens in a row that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """The weights of the losses in CORAL's equation 3, and of HASS's own; and what EAGLE-3 has of its own."""

    regression: float
    distribution: float = 0.1
    top_tokens: float = 0.0  # 0: no top-K loss
    alignment: float | None = 0.0  # 0: no CSRA; None: what makes it as large as the regression
    step_decay: float = 1.0  # what a step counts against the one before it
    feeds_gradient: bool = False  # through what is fed back: see `head_steps`

    @property
    def given(self) -> list[float]:
        """The weights of the four losses that are not left to a balance."""
        losses = (self.regression, self.distribution, self.top_tokens, self.alignment)
        return [weight for weight in losses if weight is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The numbers that training computes in: bf16 on CUDA where autocast allows it, float32 on a CPU."""

    is_mixed: bool

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> Precision:
        """Choose for a device: mixed on CUDA, unless the dtype is float32."""
        return cls(is_mixed=device.type == "cuda" and dtype != torch.float32)

    def lent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the target lends embedding and head: its own, or float32 where nothing is mixed."""
        return dtype if self.is_mixed else torch.float32

    @property
    def mask_dtype(self) -> torch.dtype:
        """Return the dtype that attention computes in."""
        return torch.bfloat16 if self.is_mixed else torch.float32

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return a context in which operations run in the precision that was chosen."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.is_mixed)


def with_noise(batch: FeatureBatch, size: float, generator: torch.Generator) -> FeatureBatch:
    """Return a batch whose features, or states between layers, have noise on them, uniform between -size and size.

    So EAGLE trains, with 0.1: a head that drafts reads its own features, which are not exact.
    """
    name = "features" if batch.states is None else "states"  # which a head reads
    rows: Tensor = getattr(batch, name)
    drawn = torch.rand(rows.shape, generator=generator).to(rows.device)
    return replace(batch, **{name: rows + size * (2 * drawn - 1)})


def head_losses(
    model: PreTrainedModel,
    batch: FeatureBatch,
    *,
    num_steps: int,
    weights: LossWeights,
    precision: Precision,
    read: FeatureBatch | None = None,
    target_logits: LogitsOf | None = None,
) -> dict[str, Tensor]:
    """Return the `loss` to lower and its parts, each a mean over steps; and CSRA's weight where it is found here.

    `read` is the head's input, where that is not the batch itself: the batch with noise. `target_logits` are made of
    the target's features, where the head does not borrow the target's own head. CORAL's appendix A
    chooses CSRA's weight by hand for every target, so that it adds about what the regression adds; here it is
    chosen so in every batch, since the two fall at different speeds.
    """
    with precision.autocast(batch.ids.device):
        steps = head_steps(
            model,
            read or batch,
            num_steps=num_steps,
            mask_dtype=precision.mask_dtype,
            feeds_gradient=weights.feeds_gradient,
        )
        features = [step.flatten(0, 1) for step in steps]  # [B * S, h] each
        target = batch.features.flatten(0, 1)
        first = first_row(model)
        rows = [step_rows(batch, step, first=first).flatten() for step in range(1, num_steps + 1)]
        found = distribution_losses(
            features,
            target,
            rows,
            logits_of=head_logits(model),
            target_logits_of=target_logits,
            vocab=vocab_of(model),
            num_top=TOP_TOKENS if weights.top_tokens else 0,
        )
        parts = {"distribution": found.distribution}
        if aux_states_of(model) is None:
            pairs = zip(features, rows, strict=True)
            parts["regression"] = [regression_loss(step[which], target[which]) for step, which in pairs]
    if weights.top_tokens:
        parts["top_tokens"] = found.top_tokens
    if weights.alignment != 0:  # in float32: similarities are divided by a small temperature
        parts["alignment"] = alignment_losses(features, target, rows)
    shares = torch.tensor([weights.step_decay**step for step in range(num_steps)], device=batch.ids.device)
    shares = shares / shares.sum()
    means = {name: (torch.stack(losses) * shares).sum() for name, losses in parts.items()}
    factors = {name: getattr(weights, name) for name in means}
    balance = {}
    if weights.alignment is None:
        balance["alignment_weight"] = weights.regression * (means["regression"] / means["alignment"]).detach()
        factors["alignment"] = balance["alignment_weight"]
    loss = torch.stack([factors[name] * mean for name, mean in means.items()]).sum()
    return {"loss": loss, **means, **balance}


@torch.no_grad()
def held_out_agreement(
    model: PreTrainedModel,
    files: FeatureFiles,
    blocks: Sequence[int],
    *,
    batch_blocks: int,
    precision: Precision,
    target_logits: LogitsOf | None = None,
) -> dict[str, float]:
    """Measure how well a head does on held-out blocks, whatever it was trained for.

    `acceptance_length`: 1 and, along the texts, the tokens in a row that the head's first choice shares with the
    target's, up to a depth of 4, averaged; `agreement_k`: the share of step k's rows where they agree;
    `regression_k` and `distribution_k`: the losses of step k, the former where the head is to make the target's
    features.
    """
    device, logits = model.device, head_logits(model)
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}

    def add(name: str, total: float, count: float) -> None:
        sums[name] = sums.get(name, 0.0) + total
        counts[name] = counts.get(name, 0.0) + count

    for start in range(0, len(blocks), batch_blocks):
        batch = files.batch(blocks[start : start + batch_blocks], device=device)
        with precision.autocast(device):
            steps = head_steps(model, batch, num_steps=HELD_OUT_DEPTH, mask_dtype=precision.mask_dtype)
            target = batch.features.flatten(0, 1)
            features = [step.flatten(0, 1) for step in steps]
            rows = [step_rows(batch, step, first=first_row(model)) for step in range(1, HELD_OUT_DEPTH + 1)]
            flat_rows = [which.flatten() for which in rows]
            entropies = distribution_losses(
                features, target, flat_rows, logits_of=logits, target_logits_of=target_logits, vocab=vocab_of(model)
            ).distribution
            choices = _choices(target_logits or logits, target, vocab_of(model))
            agree = [(_choices(logits, step, vocab_of(model)) == choices).view(batch.ids.shape) for step in features]
        for step, which in enumerate(flat_rows):
            count = float(which.sum())  # a report, not a step: waiting does not matter
            if aux_states_of(model) is None:
                loss = regression_loss(features[step][which], target[which])
                add(f"regression_{step + 1}", float(loss) * count, count)
            add(f"distribution_{step + 1}", float(entropies[step]) * count, count)
            add(f"agreement_{step + 1}", float((agree[step] & rows[step]).sum()), count)
        length, count = _lengths(agree, rows[-1])
        add("acceptance_length", length, count)
    return {name: total / max(1.0, counts[name]) for name, total in sums.items()}


def _lengths(agree: Sequence[Tensor], last_rows: Tensor) -> tuple[float, float]:
    """Return the summed lengths of all chains that end before the text does, and their number.

    Step k of the chain that starts at row s is at row s + k - 1; `last_rows` [B, S] are the last step's.
    """
    depth = len(agree)
    num_starts = agree[0].shape[1] - depth + 1
    if num_starts < 1:
        return 0.0, 0.0
    counted = last_rows[:, depth - 1 :]  # [B, starts]
    is_alive = counted.clone()
    length = counted.float()
    for step, same in enumerate(agree):
        is_alive &= same[:, step : step + num_starts]
        length += is_alive
    return float(length.sum()), float(counted.sum())


def _choices(logits_of: LogitsOf, features: Tensor, vocab: int) -> Tensor:
    """Return the most probable token [n] after features [n, h]."""
    return torch.cat([logits_of(features[rows]).argmax(-1) for rows in row_chunks(features.shape[0], vocab)])


def head_logits(model: PreTrainedModel) -> LogitsOf:
    """Return the family's logits [k, vocab] of features [k, h]; gradients pass through."""
    return functools.partial(family_logits, model, decoder_of(model))


def vocab_of(model: PreTrainedModel) -> int:
    """Return the number of the logits' columns."""
    return int(model.get_output_embeddings().weight.shape[0])
