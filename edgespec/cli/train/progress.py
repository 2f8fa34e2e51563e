"""What a person sees of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgespec.cli.console import Console

TrainingProgress = Callable[[int, Mapping[str, float], Mapping[str, float] | None], None]


def training_progress(console: Console, bar: Any, num_steps: int) -> TrainingProgress:
    """Return a progress function that says losses now and then, and every evaluation on held-out texts."""
    task = bar.add_task("training", total=num_steps, note="") if bar is not None else None

    def update(step: int, losses: Mapping[str, float], held_out: Mapping[str, float] | None) -> None:
        note = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        console.say_sometimes(f"training: step {step} of {num_steps}, {note}")
        if held_out is not None:
            console.say(f"step {step} of {num_steps}, held out: {in_words(held_out)}")
        if bar is not None:
            bar.update(task, completed=step, note=note)

    return update


def in_words(held_out: Mapping[str, float]) -> str:
    """Return an evaluation in one line; measures of several steps stand together."""
    together: dict[str, list[str]] = {}
    for name, value in held_out.items():
        together.setdefault(name.rstrip("0123456789").rstrip("_").replace("_", " "), []).append(f"{value:.3f}")
    return ", ".join(f"{name} {' '.join(values)}" for name, values in sorted(together.items()))
