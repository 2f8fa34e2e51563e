"""`edgespec train head`: a drafter for a target that has no small sibling."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.options.console import console_options
from edgespec.cli.options.machine import MachineOptions, machine_options
from edgespec.cli.options.model import ModelOptions, target_options
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.record import group, option, options_of
from edgespec.cli.train.data import HeadTrainingFlags, TrainOptions, features_of, make_training_settings
from edgespec.cli.train.training import check_output, in_words, training_run, write_report
from edgespec.train.training_settings import TrainingSettings

METHOD_NAMES = ("eagle", "hass", "coral")
WEIGHT = click.FloatRange(min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions(TrainOptions):
    """The options of training a head."""

    method: str = option(
        "--method", type=click.Choice(METHOD_NAMES), default="coral", show_default=True, help="Train by this method."
    )
    multi_steps: int | None = option(
        "--multi-steps", type=WholeRange(1, 8), help="Train this many steps on the head's own features. [by the method]"
    )
    regression_weight: float | None = option(
        "--regression-weight", type=WEIGHT, help="Weigh smooth L1 between features by this. [1; coral 0.5]"
    )
    distribution_weight: float | None = option(
        "--distribution-weight", type=WEIGHT, help="Weigh cross-entropy between distributions by this. [0.1]"
    )
    top_tokens_weight: float | None = option(
        "--top-tokens-weight", type=WEIGHT, help="Weigh the target's ten most probable tokens by this. [hass 1, else 0]"
    )
    alignment_weight: float | None = option(
        "--alignment-weight", type=WEIGHT,
        help="Weigh CSRA by this. [coral: it adds as much as the regression; else 0]",
    )  # fmt: skip
    feature_noise: float = option(
        "--feature-noise", type=WEIGHT, default=0.1, show_default=True,
        help="Add this much noise to the features that the head reads.",
    )  # fmt: skip
    training: TrainingSettings = group(HeadTrainingFlags, make_training_settings)

    @property
    def weights(self) -> dict[str, float]:
        """The weights that were given, by their names in `head_objective.Weights`."""
        given = {
            "regression": self.regression_weight,
            "distribution": self.distribution_weight,
            "top_tokens": self.top_tokens_weight,
            "alignment": self.alignment_weight,
        }
        return {name: value for name, value in given.items() if value is not None}


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
coral  three steps, and the features of all steps distinguished
       from all others
""",
)
@target_options
@options_of(HeadOptions, handed_on_as="options")
@machine_options
@console_options()
def command(*, models: ModelOptions, options: HeadOptions, machine: MachineOptions, console: Console) -> int:
    """Train a feature head: one layer that continues the target's hidden states.

    One pass over the target writes its features to a folder, then the head is trained on them. A run that was
    interrupted goes on; the features are kept for other heads.
    """
    check_output(options.path, overwrite=options.overwrite)
    output, method = options.path, options.method

    import_engine(console)
    from edgespec.draft.head_network import HeadFacts
    from edgespec.pair.pair import open_pair
    from edgespec.train.head_model import lender, new_head, save_head
    from edgespec.train.head_objective import Precision
    from edgespec.train.head_training import METHODS, train_head

    pair = replace(open_pair(models.target, None, models.tokenizer), draft=None)
    folder = options.data.features or output.with_name(output.name + ".features")
    run_config = machine.run_config(pair, context_tokens=options.data.block_tokens)
    run = features_of(console, pair, options.data, folder, machine, run_config)
    settings = options.training.for_width(run.hidden_size)
    chosen = METHODS[method]
    weights = replace(chosen.weights, **options.weights)
    num_steps = options.multi_steps or chosen.num_steps
    chosen = replace(chosen, weights=weights, num_steps=num_steps, feature_noise=options.feature_noise)
    precision = Precision.on(run_config.device, run_config.dtype)
    facts = HeadFacts(target=pair.target.folder.name, target_fingerprint=run.target_fingerprint, method=method)
    started = time.perf_counter()
    with lender(pair.target, device=run_config.device, dtype=precision.lent_dtype(run_config.dtype)) as target:
        head = new_head(target, facts, seed=settings.seed)
        with training_run(
            console, output, what=method, features=folder, settings=settings, identity=f"{facts} {run}"
        ) as training:
            report = train_head(head, chosen, run=training, precision=precision)
            save_head(head, facts, output)
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
    write_report(console, output, found, text=_text(found), as_json=options.as_json)
    return 0


def _text(found: dict[str, Any]) -> str:
    """Return the report as text: how the head does on texts that it never saw."""
    return (
        f"{found['method']} head of {found['target']}: {found['blocks']} blocks learned from, "
        f"{found['held_out_blocks']} held out\n{in_words(found['held_out'])}\n"
    )
