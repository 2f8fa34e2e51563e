"""The loop that trains: batches in an order that the seed fixes, AdamW, checkpoints.

It knows neither heads nor routers: they come as parameters and a function that gives the losses of a batch. A
run that goes on from a checkpoint ends, on a CPU, in the very numbers of one that was never interrupted.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.train.feature_files import FeatureBatch, FeatureFiles
from edgespec.train.networks import held_out_mask
from edgespec.train.training_settings import TrainingSettings
from edgespec.user_paths import written_whole

CHECKPOINT = "checkpoint.pt"
HELD_OUT_SHARE = 0.05
SEED_STRIDE = 1_000_003  # keeps the draws of different seeds apart, of epochs and of steps

# of a batch, and of a generator of random numbers: `loss`, and further losses for people
Objective = Callable[[FeatureBatch, torch.Generator], Mapping[str, Tensor]]
Evaluate = Callable[[Sequence[int]], Mapping[str, float]]  # of held-out blocks
# the number of a finished step, from 1 on; its losses; and an evaluation on held-out texts, where there was one
Progress = Callable[[int, Mapping[str, float], Mapping[str, float] | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The numbers of the blocks to train on, and of the held-out blocks."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The data and the settings of a training; it continues from the checkpoint in `folder` after an interruption."""

    files: FeatureFiles
    settings: TrainingSettings
    folder: Path
    identity: str  # tells a run from others with the same settings
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """The size of the training data, and the last evaluation."""

    num_blocks: int
    num_held_out: int
    held_out: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return the report as values for JSON."""
        return {"blocks": self.num_blocks, "held_out_blocks": self.num_held_out, "held_out": dict(self.held_out)}


def split_blocks(files: FeatureFiles, settings: TrainingSettings) -> Split:
    """Hold blocks out by text, so that evaluations are on unseen texts; of a single text, hold out its last blocks.

    Raises EdgespecError where there are not two blocks.
    """
    if files.num_blocks < 2:
        raise EdgespecError("E_FEATURES", "there are features of one block only.", "Give more text.")
    if int(files.texts.unique().numel()) > 1:
        is_held_out = held_out_mask(files.texts, HELD_OUT_SHARE, seed=0)
    else:
        count = max(1, round(HELD_OUT_SHARE * files.num_blocks))
        is_held_out = torch.arange(files.num_blocks) >= files.num_blocks - count
    held_out = is_held_out.nonzero()[:, 0]
    order = torch.randperm(held_out.shape[0], generator=torch.Generator().manual_seed(0))
    return Split(
        train=tuple((~is_held_out).nonzero()[:, 0].tolist()),
        held_out=tuple(held_out[order][: settings.held_out_blocks].tolist()),
    )


def train(
    parameters: Mapping[str, Tensor], objective: Objective, *, run: TrainingRun, evaluate: Evaluate | None = None
) -> TrainingReport:
    """Train parameters in place, on the device that they are on.

    Raises EdgespecError for a checkpoint of another run and for a loss that is not finite.
    """
    settings = run.settings
    split = split_blocks(run.files, settings)
    device = next(iter(parameters.values())).device
    optimizer = _optimizer(parameters, settings)
    path = run.folder / CHECKPOINT
    name = f"{run.identity} {settings}"
    first = _load(path, name, parameters, optimizer) if path.exists() else 0
    evaluation: Mapping[str, float] | None = None
    for step in range(first, settings.training_steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        batch = run.files.batch(batch_blocks(split.train, settings, step), device=device)
        optimizer.zero_grad(set_to_none=True)
        # A continued run draws the same numbers as one that was never interrupted.
        losses = objective(batch, torch.Generator().manual_seed(settings.seed * SEED_STRIDE + step))
        losses["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), settings.gradient_clip)
        found = {name: float(loss.detach()) for name, loss in losses.items()}  # a wait, for every step is checked
        if not bool((losses["loss"] + norm).isfinite()):
            raise _not_finite(step + 1, path)
        optimizer.step()
        is_last = step + 1 == settings.training_steps
        evaluation = None
        if evaluate and (is_last or (step + 1) % settings.evaluate_every == 0):
            evaluation = evaluate(split.held_out)
        if is_last or (step + 1) % settings.checkpoint_every == 0:
            _save(path, name, step + 1, parameters, optimizer)
        if run.progress:
            run.progress(step + 1, found, evaluation)
    if evaluate and evaluation is None:
        evaluation = evaluate(split.held_out)
    return TrainingReport(num_blocks=len(split.train), num_held_out=len(split.held_out), held_out=evaluation or {})


def batch_blocks(blocks: Sequence[int], settings: TrainingSettings, step: int) -> list[int]:
    """Return the blocks of a step; every epoch has its own order of all blocks, less those that fill no batch."""
    size = min(settings.batch_blocks, len(blocks))
    epoch, number = divmod(step, len(blocks) // size)
    generator = torch.Generator().manual_seed(settings.seed * SEED_STRIDE + epoch)
    order = torch.randperm(len(blocks), generator=generator)
    return [blocks[index] for index in order[number * size : (number + 1) * size].tolist()]


def forget_checkpoint(folder: Path) -> None:
    """Delete the checkpoint: the result is saved elsewhere, and another run may begin."""
    (folder / CHECKPOINT).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _optimizer(parameters: Mapping[str, Tensor], settings: TrainingSettings) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters.values() if parameter.dim() > 1]
    others = [parameter for parameter in parameters.values() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, betas=settings.betas)


def _save(path: Path, run: str, step: int, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint, whole or not at all; raises EdgespecError."""
    content = {
        "run": run,
        "step": step,
        "weights": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": optimizer.state_dict(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path, is_private=False) as partial:
            torch.save(content, partial)
    except (OSError, RuntimeError) as error:  # torch words a full disk in its own way
        raise EdgespecError(
            "E_OUTPUT", f"the checkpoint '{path}' cannot be written ({error}).", "Make room there, and go on."
        ) from error


def _load(path: Path, run: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint and return the steps that it has done. Raises EdgespecError for one of another run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        found, step, weights = content["run"], int(content["step"]), content["weights"]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise EdgespecError("E_CHECKPOINT", f"'{path}' is damaged ({error}).", "Delete it and train again.") from error
    if found != run or weights.keys() != parameters.keys():
        what = f"'{path}' is of another run: of {found}, not {run}."
        raise EdgespecError("E_CHECKPOINT", what, "Give the same settings to go on, or delete it to begin anew.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(content["optimizer"])
    return step


def _not_finite(step: int, path: Path) -> EdgespecError:
    kept = f" The last checkpoint is kept: '{path}'." if path.exists() else ""
    return EdgespecError(
        "E_TRAIN_NAN",
        f"the loss or its gradient is NaN or infinite in step {step}.{kept}",
        "Lower `learning_rate`, and delete the checkpoint to begin anew.",
    )
