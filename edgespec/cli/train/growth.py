"""`edgespec train acceptance|classifier|stop`: fit the small models of growth on a pair's own verification records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console, counted
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.open_engine import open_engine
from edgespec.cli.open_pair import open_named_pair
from edgespec.cli.options.console import console_options
from edgespec.cli.options.distribution import parse_temperatures
from edgespec.cli.options.machine import MachineOptions, machine_options
from edgespec.cli.options.model import ModelOptions, model_options
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.prompts import InputOptions
from edgespec.cli.options.record import FOLDER, option, options_of
from edgespec.cli.prompts.read import encode_prompts, read_prompts
from edgespec.cli.prompts.report import say_unused_keys
from edgespec.cli.train.training import check_output, write_report

if TYPE_CHECKING:
    from edgespec.grow.classifier import Classifier
    from edgespec.grow.stop_model import StopKind
    from edgespec.train.records import Records

WHATS = {
    "acceptance": "what `adaptive` predicts, and the rates by rank of `sequoia`",
    "classifier": "C2T's confidence in a candidate",
    "stop": "a decision model that ends the drafting of chains and static trees",
}
HELP = """{first}.

Collects records of what the target accepts of the draft's trees, and fits a small model on them. The records
are kept: a run that was interrupted goes on, and another model is fitted at once.
"""
RECORDS_HELP = "Keep the records in this folder; collecting continues where it stopped. [OUTPUT.records]"
TEMPERATURES_HELP = "Record at these temperatures, as 0,0.6,1. [acceptance all three, classifier 0, stop 0.6,1]"
DEFAULT_TEMPERATURES = {"acceptance": "0,0.6,1", "classifier": "0", "stop": "0.6,1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthOptions(InputOptions):
    """The options of recording and fitting."""

    prompts: str = option("--prompts", required=True, help="Decode these texts, as for `edgespec generate`.")
    path: Path = option("-o", "--output", type=FOLDER, required=True, help="Write the model to this file.")
    overwrite: bool = option("--overwrite", is_flag=True, help="Replace it if it exists.")
    records: Path | None = option("--records", type=FOLDER, help=RECORDS_HELP)
    max_new_tokens: int = option(
        "-n", "--max-new-tokens", type=WholeRange(1), default=16, show_default=True,
        help="Decode this many tokens of every prompt.",
    )  # fmt: skip
    tree_size: int = option(
        "--tree-size", type=WholeRange(8, 768), default=128, show_default=True,
        help="Record trees of this many nodes (acceptance).",
    )  # fmt: skip
    temps: str | None = option("--temps", help=TEMPERATURES_HELP)
    kind: StopKind = option(
        "--kind", type=click.Choice(["hidden", "probabilities"]), default="hidden", show_default=True,
        help="Let a decision model read this of the draft (stop).",
    )  # fmt: skip
    initial: Path | None = None
    seed: int = option("--seed", type=WholeRange(0), default=0, show_default=True, help="Draw with this seed.")
    as_json: bool = option("--json", is_flag=True, help="Write the report as JSON.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierOptions(GrowthOptions):
    """The same for a classifier, which may begin as another."""

    initial: Path | None = option("--from", type=FOLDER, help="Begin as this classifier: another pair's.")


def _fit_growth(
    what: str, models: ModelOptions, options: GrowthOptions, machine: MachineOptions, console: Console
) -> int:
    output, max_new_tokens = options.path, options.max_new_tokens
    temperatures = parse_temperatures(options.temps or DEFAULT_TEMPERATURES[what])
    check_output(output, overwrite=options.overwrite)
    rows = read_prompts(options.prompts, input_format=options.source_format, say=console.say)
    say_unused_keys(console, rows, applies=False)

    import_engine(console)
    from edgespec.grow.classifier import Classifier
    from edgespec.placement.pair_setup import set_up
    from edgespec.train import collect
    from edgespec.train.record_files import load_records

    begins = None if options.initial is None else Classifier.load(options.initial)
    pair = open_named_pair(models)
    encoded = encode_prompts(pair, rows, raw=True)
    folder = options.records or output.with_name(output.name + ".records")
    settings = {
        "acceptance": collect.acceptance_settings(
            size=options.tree_size, temperatures=temperatures, truncated=pair.default_sampling()
        ),
        "classifier": collect.classifier_settings(temperatures=temperatures),
        "stop": collect.stop_settings(temperatures=temperatures),
    }[what]
    trees = [setting.tree for setting in settings]
    longest = max(map(len, encoded)) + max_new_tokens + max(tree.num_layers for tree in trees)
    largest = max(trees, key=lambda tree: (tree.num_nodes, tree.num_drafted))
    run_config = replace(machine.run_config(pair, context_tokens=machine.ctx_size or longest), keeps_draft_probs=True)
    with open_engine(console, set_up(pair, run_config, largest), machine) as engine:
        console.say(f"records of {counted(len(encoded), 'prompt')} go to '{folder}'")
        with console.progress_bar() as bar:
            collect.collect(
                engine,
                encoded,
                folder,
                settings,
                run=collect.RecordRun(
                    kind=options.kind if what == "stop" else what, max_new_tokens=max_new_tokens, seed=options.seed
                ),
                progress=console.counting(bar, "collecting", "parts"),
            )
    found, headers = load_records(folder)
    console.say(f"fitting on {counted(found['prompt'].shape[0], 'record')} of {counted(len(headers), 'part')}")
    about = {"target": pair.target.folder.name, "prompts": str(len(encoded))}
    about |= {"draft": pair.draft.named.name} if pair.draft else {}
    report = _fit(what, found, options, about=about, initial=begins)
    write_report(console, output, report, text=_text(report), as_json=options.as_json)
    return 0


def growth_command(what: str) -> click.Command:
    """Make the command that fits one of WHATS."""
    record = ClassifierOptions if what == "classifier" else GrowthOptions

    @click.command(name=what, help=HELP.format(first=WHATS[what][0].upper() + WHATS[what][1:]))
    @model_options
    @options_of(record, handed_on_as="options")
    @machine_options
    @console_options()
    def command(*, models: ModelOptions, options: GrowthOptions, machine: MachineOptions, console: Console) -> int:
        return _fit_growth(what, models, options, machine, console)

    return command


def _fit(
    what: str, records: Records, options: GrowthOptions, *, about: dict[str, str], initial: Classifier | None
) -> dict[str, Any]:
    """Fit a small model on records and write it; return the report."""
    from edgespec.train.fit import CLASSIFIER, STOP, TUNING, fit_acceptance, fit_classifier, fit_stop
    from edgespec.train.networks import FitSettings

    if what == "acceptance":
        model, held_out = fit_acceptance(records, about=about, settings=FitSettings(seed=options.seed))
        model.save(options.path)
        return {"model": what, "networks": [asdict(held_out)]}
    if what == "classifier":
        settings = CLASSIFIER if initial is None else TUNING
        classifier, classified = fit_classifier(records, replace(settings, seed=options.seed), initial=initial)
        classifier.save(options.path)
        measures = {"recall": classified.recall, "positive_rate": classified.positive_rate}
        return {"model": what, **measures, "networks": [asdict(classified.fit)]}
    settings = replace(STOP, seed=options.seed)
    stop_model, fitted = fit_stop(options.kind, records.pop("inputs"), records, settings=settings)
    stop_model.save(options.path)
    return {"model": what, "kind": options.kind, "networks": [asdict(fitted)]}


def _text(report: dict[str, Any]) -> str:
    """Return the report as text: losses, and how far predictions can be relied on."""
    lines = []
    for network in report["networks"]:
        lines.append(
            f"{network['name']}: log loss {network['log_loss']:.4f} nats on {network['num_held_out']} held-out records "
            f"(without it {network['baseline_log_loss']:.4f}, at best {network['least_log_loss']:.4f}), "
            f"expected calibration error {network['calibration_error']:.4f}"
        )
        lines.append(f"{'predicted':>12}{'observed':>10}{'share':>8}")
        lines += [
            f"{bucket['predicted']:>12.3f}{bucket['observed']:>10.3f}{bucket['weight']:>8.3f}"
            for bucket in network["reliability"]
        ]
    if "recall" in report:
        lines.append(f"recall {report['recall']:.3f}, positive rate {report['positive_rate']:.3f}, at threshold 0.5")
    return "\n".join([*lines, ""])
