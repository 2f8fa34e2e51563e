"""Train a router over groups of the language model head, the head before it frozen.

The second of CORAL's two stages (section 3.3): cross-entropy of the router's distribution over groups and the
target's probabilities summed by group (equation 9), at the features that the head itself drafts from. Legend: n
rows, N groups.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.draft.head_router import HeadRouter, group_size
from edgespec.errors import EdgespecError
from edgespec.model.row_chunks import row_chunks
from edgespec.train.feature_files import FeatureBatch
from edgespec.train.head_model import own_tensors
from edgespec.train.head_objective import Precision, head_logits, vocab_of
from edgespec.train.head_steps import head_steps, step_rows
from edgespec.train.training_loop import TrainingReport, TrainingRun, train

ROUTER_PREFIX = "router."


def check_groups(vocab: int, num_groups: int, top_groups: int) -> None:
    """Raise EdgespecError where some groups would be empty, or `top_groups` is more than there are."""
    if not 1 <= num_groups <= vocab or group_size(vocab, num_groups) * (num_groups - 1) >= vocab:
        size = group_size(vocab, max(1, num_groups))
        fitting = -(-vocab // size)
        what = f"{vocab} tokens in {num_groups} groups of {size} leave some groups empty."
        raise EdgespecError("E_SETTING", what, f"Use `num_groups={fitting}`.")
    if not 1 <= top_groups <= num_groups:
        raise EdgespecError(
            "E_SETTING", f"there are no {top_groups} of {num_groups} groups.", f"Use 1 to {num_groups} `top_groups`."
        )


def train_router(model: PreTrainedModel, *, run: TrainingRun, num_steps: int, precision: Precision) -> TrainingReport:
    """Train a head's router in place on `num_steps` of the head, which stays as it is.

    `held_out` in the report: `cross_entropy` and the least that is possible, `mass_kept` of the target's
    probability in the groups that a row computes, `choice_kept`: how often the target's first choice is there.
    """
    device = model.device
    router = model.router
    assert isinstance(router, HeadRouter)
    parameters = {name: tensor for name, tensor in own_tensors(model).items() if name.startswith(ROUTER_PREFIX)}
    model.requires_grad_(False)
    for tensor in parameters.values():
        tensor.requires_grad_(True)

    def rows_of(batch: FeatureBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return all steps' features [n, h], the target's group probabilities [n, N], its first choice's group [n]."""
        with torch.no_grad(), precision.autocast(device):
            steps = head_steps(model, batch, num_steps=num_steps, mask_dtype=precision.mask_dtype)
            rows = [step_rows(batch, step).flatten() for step in range(1, num_steps + 1)]
            groups, choices = _target_groups(model, batch.features.flatten(0, 1), router.num_groups)
        hidden = torch.cat([step.flatten(0, 1)[which] for step, which in zip(steps, rows, strict=True)])
        return hidden, torch.cat([groups[which] for which in rows]), torch.cat([choices[which] for which in rows])

    def objective(batch: FeatureBatch, _generator: torch.Generator) -> dict[str, Tensor]:
        hidden, groups, _ = rows_of(batch)
        with precision.autocast(device):
            return {"loss": -(groups * router(hidden)).sum(-1).mean()}

    @torch.no_grad()
    def evaluate(held_out: Sequence[int]) -> dict[str, float]:
        sums: dict[str, float] = {}
        count, size = 0, run.settings.batch_blocks
        for start in range(0, len(held_out), size):
            batch = run.files.batch(held_out[start : start + size], device=device)
            hidden, groups, choices = rows_of(batch)
            with precision.autocast(device):
                log_router = router(hidden)
            best = log_router.topk(router.top_groups, -1).indices  # [n, top]
            found = {
                "cross_entropy": -(groups * log_router).sum(-1),
                "least_cross_entropy": -torch.xlogy(groups, groups).sum(-1),
                "mass_kept": groups.gather(-1, best).sum(-1),
                "choice_kept": (best == choices[:, None]).any(-1).float(),
            }
            count += hidden.shape[0]
            sums = {name: sums.get(name, 0.0) + float(values.sum()) for name, values in found.items()}
        return {name: total / max(1, count) for name, total in sums.items()}

    identified = replace(run, identity=f"{run.identity} router {router.num_groups} {num_steps}")
    return train(parameters, objective, run=identified, evaluate=evaluate)


def _target_groups(model: PreTrainedModel, target: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return group probabilities [n, N] after the target's features [n, h], and the group [n] of its first choice."""
    logits_of, vocab = head_logits(model), vocab_of(model)
    size = group_size(vocab, num_groups)
    sums, choices = [], []
    for rows in row_chunks(target.shape[0], vocab):
        p = logits_of(target[rows]).float().softmax(-1)
        choices.append(p.argmax(-1) // size)
        whole = torch.nn.functional.pad(p, (0, num_groups * size - vocab))
        sums.append(whole.view(-1, num_groups, size).sum(-1))
    return torch.cat(sums), torch.cat(choices)
