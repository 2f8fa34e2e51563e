"""A training run of a command: its checkpoints, its progress and its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import Console
from edgespec.errors import EdgespecError
from edgespec.train.training_settings import TrainingSettings

if TYPE_CHECKING:
    from edgespec.train.training_loop import Progress, TrainingRun


def check_output(path: Path, *, overwrite: bool) -> None:
    """Raise EdgespecError for an output that exists already, or whose folder does not."""
    if path.exists() and not overwrite:
        raise EdgespecError("E_OUTPUT_EXISTS", f"'{path}' exists.", "Choose another name, or give --overwrite.")
    if not path.absolute().parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{path.parent}' to write in.", "Make it first.")


@contextmanager
def training_run(
    console: Console, output: Path, *, what: str, features: Path, settings: TrainingSettings, identity: str
) -> Iterator[TrainingRun]:
    """Yield a run whose checkpoints lie beside the output; they are deleted once the context is left in order."""
    from edgespec.train.feature_files import FeatureFiles
    from edgespec.train.training_loop import TrainingRun, forget_checkpoint

    folder = output.with_name(output.name + ".training")
    console.say(f"training: {what}, {settings.training_steps} steps; checkpoints go to '{folder}'")
    with console.progress_bar() as bar:
        progress = _progress(console, bar, settings.training_steps)
        files = FeatureFiles(features)
        yield TrainingRun(files=files, settings=settings, folder=folder, identity=identity, progress=progress)
    forget_checkpoint(folder)


def write_report(console: Console, output: Path, report: Mapping[str, Any], *, text: str, as_json: bool) -> None:
    """Write the report to stdout, and name the output."""
    sys.stdout.write(json.dumps(report) + "\n" if as_json else text)
    console.say(f"written: {output}")


def _progress(console: Console, bar: Any, num_steps: int) -> Progress:
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
