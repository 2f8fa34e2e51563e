"""Training for so many seconds of a core: a few steps are timed, and the rest of the run is as long as is asked for.

A run that was stopped goes on from its last checkpoint with the steps that it began with. How it does on held-out
texts is kept beside what it makes, a line of JSON a look: the learning curve.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from edgespec.train.feature_files import FeatureFiles
from edgespec.train.training_loop import Progress, TrainingRun
from edgespec.train.training_settings import TrainingSettings

HELD_OUT_BLOCKS = 8
TIMED_STEPS = 8  # whose seconds say how many steps there are in all
NUM_LOOKS = 4  # at held-out texts
NUM_CHECKPOINTS = 10
MOST_WARMUP_STEPS, WARMUP_SHARE = 50, 0.1
Made = TypeVar("Made")  # what is trained, afresh or further
Learn = Callable[[Made, TrainingRun], object]


def run_of(given: argparse.Namespace, folder: Path, steps: int, *, width: int, progress: Progress) -> TrainingRun:
    """Return a run of so many steps on the features of `given.out`, whose checkpoints lie in the folder."""
    settings = TrainingSettings(
        training_steps=steps, learning_rate=given.learning_rate, seed=given.seed,
        warmup_steps=min(MOST_WARMUP_STEPS, round(WARMUP_SHARE * steps)), held_out_blocks=HELD_OUT_BLOCKS,
        evaluate_every=max(TIMED_STEPS, steps // NUM_LOOKS), checkpoint_every=max(1, steps // NUM_CHECKPOINTS),
    ).for_width(width)  # fmt: skip
    files = FeatureFiles(given.out / "features")
    return TrainingRun(files=files, settings=settings, folder=folder, identity=folder.name, progress=progress)


def steps_within(given: argparse.Namespace, make: Callable[[], Made], learn: Learn[Made], *, width: int) -> int:
    """Return how many steps take as many seconds of a core as are asked for; looks at held-out texts come on top."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(
            given, Path(folder), TIMED_STEPS, width=width, progress=lambda *_: ends.append(time.process_time())
        )
        learn(make(), run)
    return max(1, round(given.seconds * (len(ends) - 2) / (ends[-2] - ends[0])))  # the last one's ends with a look


def train_timed(
    given: argparse.Namespace, name: str, make: Callable[[], Made], learn: Learn[Made], *, width: int
) -> Made:
    """Return what `make` makes once it has learned for as many seconds of a core as are asked for."""
    work: Path = given.out / f"{name}.training"
    planned, curve = work / "steps.json", given.out / f"{name}.curve.jsonl"

    def note(step: int, losses: Mapping[str, float], held_out: Mapping[str, float] | None) -> None:
        if held_out is not None:
            with curve.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "losses": losses, "held_out": held_out}) + "\n")

    if not planned.exists():
        steps = steps_within(given, make, learn, width=width)
        work.mkdir(parents=True, exist_ok=True)
        planned.write_text(json.dumps(steps), encoding="utf-8")
    steps = json.loads(planned.read_text(encoding="utf-8"))
    print(f"{name}: {steps} steps, for {given.seconds:.0f} s of a core", flush=True)
    one, started = make(), time.process_time()
    learn(one, run_of(given, work, steps, width=width, progress=note))
    print(f"{name}: {time.process_time() - started:.0f} s of a core in this run, with looks", flush=True)
    if curve.exists():
        print(f"{name}: {in_words(json.loads(curve.read_text(encoding='utf-8').splitlines()[-1]))}", flush=True)
    return one


def in_words(look: Mapping[str, Mapping[str, float]]) -> str:
    """Return the last look at held-out texts as words."""
    losses, held_out = look["losses"], look["held_out"]
    shown = ", ".join(f"{key} {value:.3f}" for key, value in held_out.items())
    return f"loss {losses['loss']:.3f}; held out: {shown}"


def forget(given: argparse.Namespace, name: str) -> None:
    """Delete the checkpoint of a run whose result is saved."""
    shutil.rmtree(given.out / f"{name}.training")
