"""`edgespec train head`: a drafter for a target that has no small sibling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from edgespec.errors import EdgespecError
from edgespec.train.training_settings import TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from edgespec.train.feature_files import FeatureRun

METHOD_NAMES = ("eagle", "hass", "coral", "eagle3")
WEIGHT = click.FloatRange(min=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions(TrainOptions):
    """The options of training a head."""

    method: str = option(
        "--method", type=click.Choice(METHOD_NAMES), default="coral", show_default=True, help="Train by this method."
    )
    draft_vocab: int | None = option(
        "--draft-vocab", type=WholeRange(1),
        help="Let an eagle3 head know this many tokens, the most frequent ones. [all, at most 32000]",
    )  # fmt: skip
    multi_steps: int | None = option(
        "--multi-steps", type=WholeRange(1, 8), help="Train this many steps on the head's own features. [by the method]"
    )
    regression_weight: float | None = option(
        "--regression-weight", type=WEIGHT, help="Weigh smooth L1 between features by this. [1; coral 0.5; eagle3 0]"
    )
    distribution_weight: float | None = option(
        "--distribution-weight", type=WEIGHT, help="Weigh cross-entropy between distributions by this. [0.1; eagle3 1]"
    )
    top_tokens_weight: float | None = option(
        "--top-tokens-weight", type=WEIGHT, help="Weigh the target's ten most probable tokens by this. [hass 1, else 0]"
    )
    alignment_weight: float | None = option(
        "--alignment-weight", type=WEIGHT,
        help="Weigh CSRA by this. [coral: it adds as much as the regression; else 0]",
    )  # fmt: skip
    feature_noise: float | None = option(
        "--feature-noise", type=WEIGHT, help="Add this much noise to the features that the head reads. [0.1; eagle3 0]"
    )
    training: TrainingSettings = group(HeadTrainingFlags, make_training_settings)

    @property
    def weights(self) -> dict[str, Any]:
        """The weights that were given, by their names in `head_objective.Weights`."""
        stated = {
            "regression": self.regression_weight,
            "distribution": self.distribution_weight,
            "top_tokens": self.top_tokens_weight,
            "alignment": self.alignment_weight,
        }
        return {name: value for name, value in stated.items() if value is not None}


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
eagle3 seven steps on hidden states of three layers, distributions
       alike; written as other engines read it
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
    _check_method(options)

    import_engine(console)
    from edgespec.pair.pair import open_pair
    from edgespec.train.eagle3_head import default_aux_layers
    from edgespec.train.head_model import lender
    from edgespec.train.head_objective import Precision, head_logits
    from edgespec.train.head_training import METHODS, train_head

    pair = replace(open_pair(models.target, None, models.tokenizer), draft=None)
    folder = options.data.features or output.with_name(output.name + ".features")
    run_config = machine.run_config(pair, context_tokens=options.data.block_tokens)
    aux_layers = default_aux_layers(pair.target.config) if method == "eagle3" else ()
    run = features_of(console, pair, options.data, folder, machine, run_config, aux_layers=aux_layers)
    settings = options.training.for_width(run.hidden_size)
    chosen = METHODS[method]
    noise = chosen.feature_noise if options.feature_noise is None else options.feature_noise
    chosen = replace(
        chosen,
        weights=replace(chosen.weights, **options.weights),
        num_steps=options.multi_steps or chosen.num_steps,
        feature_noise=noise,
    )
    precision = Precision.on(run_config.device, run_config.dtype)
    name = pair.target.folder.name
    started = time.perf_counter()
    with lender(pair.target, device=run_config.device, dtype=precision.lent_dtype(run_config.dtype)) as target:
        head, save = _new(target, options, run, folder, named=name)
        with training_run(
            console,
            output,
            what=method,
            features=folder,
            settings=settings,
            identity=f"{name} {options.draft_vocab} {run}",
        ) as training:
            report = train_head(head, chosen, run=training, precision=precision, target_logits=head_logits(target))
            save(output)
    found = {
        "head": str(output),
        "method": method,
        "target": name,
        "target_fingerprint": run.target_fingerprint,
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


def _check_method(options: HeadOptions) -> None:
    """Raise EdgespecError for an option that the method has no use for."""
    if options.method != "eagle3" and options.draft_vocab is not None:
        what = (
            f"a {options.method} head borrows its target's whole vocabulary, not --draft-vocab {options.draft_vocab}."
        )
        raise EdgespecError("E_SETTING", what, "Use --method eagle3, or leave it out.")
    useless = [name for name in ("regression", "alignment") if options.weights.get(name)]
    if options.method == "eagle3" and useless:
        what = f"an eagle3 head makes no features like its target's, and --{useless[0]}-weight compares them."
        raise EdgespecError("E_SETTING", what, "Use --method coral, or leave it out.")


def _new(
    target: PreTrainedModel, options: HeadOptions, run: FeatureRun, features: Path, *, named: str
) -> tuple[PreTrainedModel, Callable[[Path], None]]:
    """Return a fresh head of the form that the method trains, and what writes its folder."""
    from edgespec.draft.head_network import HeadFacts
    from edgespec.train.eagle3_head import MOST_TOKENS, most_frequent, new_eagle3
    from edgespec.train.feature_files import FeatureFiles
    from edgespec.train.head_model import new_head, save_head

    if options.method == "eagle3":
        counts = FeatureFiles(features).token_counts(target.config.get_text_config(decoder=True).vocab_size)
        known = most_frequent(counts, min(options.draft_vocab or MOST_TOKENS, counts.shape[0]))
        eagle3 = new_eagle3(target, run.aux_layers, known, named=named, seed=options.training.seed)
        return eagle3.model, eagle3.save
    facts = HeadFacts(target=named, target_fingerprint=run.target_fingerprint, method=options.method)
    head = new_head(target, facts, seed=options.training.seed)
    return head, partial(save_head, head, facts)


def _text(found: dict[str, Any]) -> str:
    """Return the report as text: how the head does on texts that it never saw."""
    return (
        f"{found['method']} head of {found['target']}: {found['blocks']} blocks learned from, "
        f"{found['held_out_blocks']} held out\n{in_words(found['held_out'])}\n"
    )
