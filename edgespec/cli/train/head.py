"""`edgespec train head`: a drafter for a target that has no small sibling."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.options.console import console_options
from edgespec.cli.options.group import FOLDER
from edgespec.cli.options.machine import MachineOptions, machine_options
from edgespec.cli.options.model import ModelOptions, target_options
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.train.data import DataOptions, data_options, features_of, training_options, without_draft
from edgespec.cli.train.progress import in_words, training_progress
from edgespec.errors import EdgespecError
from edgespec.train.training_settings import TrainingSettings

METHOD_NAMES = ("eagle", "hass", "coral")
WEIGHT = click.FloatRange(min=0)


@click.command(
    name="head",
    epilog="""\b
Examples:
  edgespec train head -m TARGET --data texts/ --method coral -o HEAD
  edgespec train head --data src/ -o HEAD --max-cpu-mem 2GiB -ngl 0
  edgespec generate prompts.jsonl -m TARGET -md HEAD

\b
eagle  one step: features alike, distributions alike
hass   three steps on the head's own features, as in drafting,
       and the target's most probable tokens count once more
coral  three steps, and the features of all steps told apart
       from all others
""",
)
@target_options
@data_options
@click.option("--method", type=click.Choice(METHOD_NAMES), default="coral", show_default=True)
@click.option("-o", "--output", type=FOLDER, required=True, help="The head's folder.")
@click.option("--overwrite", is_flag=True, help="Replace it if it exists.")
@click.option("--multi-steps", type=WholeRange(1, 8), help="Steps on the head's own features. [by the method]")
@click.option("--regression-weight", type=WEIGHT, help="Of smooth L1 between features. [1; coral 0.5]")
@click.option("--distribution-weight", type=WEIGHT, help="Of cross-entropy between distributions. [0.1]")
@click.option("--top-tokens-weight", type=WEIGHT, help="Of the target's ten most probable tokens. [hass 1, else 0]")
@click.option("--alignment-weight", type=WEIGHT, help="Of CSRA. [coral: it adds as much as the regression; else 0]")
@click.option("--feature-noise", type=WEIGHT, default=0.1, show_default=True, help="Noise on features that it reads.")
@training_options(training_steps=1500)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
@machine_options
@console_options()
def command(
    *,
    models: ModelOptions,
    asked: DataOptions,
    method: str,
    output: Path,
    overwrite: bool,
    multi_steps: int | None,
    regression_weight: float | None,
    distribution_weight: float | None,
    top_tokens_weight: float | None,
    alignment_weight: float | None,
    feature_noise: float,
    settings: TrainingSettings,
    as_json: bool,
    machine: MachineOptions,
    console: Console,
) -> int:
    """Train a feature head: one layer that continues the target's hidden states.

    One pass over the target writes its features to a folder, then the head is trained on them. A run that was
    interrupted goes on; the features are kept for other heads.
    """
    check_output(output, overwrite=overwrite)

    import_engine(console)
    from edgespec.draft.head_network import HeadFacts
    from edgespec.pair.pair import open_pair
    from edgespec.train.feature_files import FeatureFiles
    from edgespec.train.head_model import lender, new_head, save_head
    from edgespec.train.head_objective import Precision
    from edgespec.train.head_training import METHODS, train_head
    from edgespec.train.training_loop import TrainingRun, forget_checkpoint

    pair = without_draft(open_pair(models.target, None))
    folder = asked.features or output.with_name(output.name + ".features")
    run_config = machine.run_config(pair, context_tokens=asked.block_tokens)
    run = features_of(console, pair, asked, folder, machine, run_config)
    settings = settings.for_width(run.hidden_size)
    given = {
        "regression": regression_weight,
        "distribution": distribution_weight,
        "top_tokens": top_tokens_weight,
        "alignment": alignment_weight,
    }
    chosen = METHODS[method]
    weights = replace(chosen.weights, **{name: value for name, value in given.items() if value is not None})
    num_steps = multi_steps or chosen.num_steps
    chosen = replace(chosen, weights=weights, num_steps=num_steps, feature_noise=feature_noise)
    precision = Precision.on(run_config.device, run_config.dtype)
    facts = HeadFacts(target=pair.target.folder.name, target_fingerprint=run.target_fingerprint, method=method)
    training = output.with_name(output.name + ".training")
    started = time.perf_counter()
    with lender(pair.target, device=run_config.device, dtype=precision.lent_dtype(run_config.dtype)) as target:
        head = new_head(target, facts, seed=settings.seed)
        console.say(f"training: {method}, {settings.training_steps} steps; checkpoints go to '{training}'")
        with console.progress_bar() as bar:
            report = train_head(
                head,
                chosen,
                run=TrainingRun(
                    files=FeatureFiles(folder),
                    settings=settings,
                    folder=training,
                    identity=f"{facts} {run}",
                    progress=training_progress(console, bar, settings.training_steps),
                ),
                precision=precision,
            )
        save_head(head, facts, output)
    forget_checkpoint(training)
    found = {
        "head": str(output),
        "method": method,
        "target": facts.target,
        "target_fingerprint": facts.target_fingerprint,
        "features": {"folder": str(folder), "tokens": run.num_tokens, "blocks": run.num_blocks},
        "settings": {
            **asdict(settings),
            "steps_of_forward": chosen.num_steps,
            "weights": asdict(chosen.weights),
            "feature_noise": chosen.feature_noise,
        },
        "training_s": time.perf_counter() - started,
        **report.as_json(),
    }
    sys.stdout.write(json.dumps(found) + "\n" if as_json else _text(found))
    console.say(f"written: {output}")
    return 0


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise EdgespecError for an output folder that exists already, or whose parent does not."""
    if output.exists() and not overwrite:
        raise EdgespecError("E_OUTPUT_EXISTS", f"'{output}' exists.", "Choose another folder, or give --overwrite.")
    if not output.absolute().parent.is_dir():
        raise EdgespecError("E_OUTPUT", f"there is no folder '{output.parent}' to write in.", "Make it first.")


def _text(found: dict[str, Any]) -> str:
    """Return the report as text: how the head does on texts that it never saw."""
    return (
        f"{found['method']} head of {found['target']}: {found['blocks']} blocks learned from, "
        f"{found['held_out_blocks']} held out\n{in_words(found['held_out'])}\n"
    )
