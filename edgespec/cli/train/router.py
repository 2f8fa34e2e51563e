"""`edgespec train router`: the groups of the language model head that a draft needs."""

import time
from dataclasses import asdict, dataclass, replace

import click

from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import import_engine
from edgespec.cli.options.console import console_options
from edgespec.cli.options.machine import MachineOptions, machine_options
from edgespec.cli.options.model import ModelOptions, model_options
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.record import group, option, options_of
from edgespec.cli.train.data import RouterTrainingFlags, TrainOptions, features_of, make_training_settings
from edgespec.cli.train.training import check_output, in_words, training_run, write_report
from edgespec.errors import EdgespecError
from edgespec.train.training_settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions(TrainOptions):
    """The options of training a router."""

    groups: int = option(
        "--groups", type=WholeRange(2), default=16, show_default=True,
        help="Divide the vocabulary into this many groups of one size.",
    )  # fmt: skip
    top_groups: int = option(
        "--top-groups",
        type=WholeRange(1),
        default=2,
        show_default=True,
        help="Compute this many groups for every node.",
    )
    multi_steps: int = option(
        "--multi-steps", type=WholeRange(1, 8), default=3, show_default=True,
        help="Learn from this many steps of the head.",
    )  # fmt: skip
    training: TrainingSettings = group(RouterTrainingFlags, make_training_settings)


@click.command(
    name="router",
    epilog="""\b
Examples:
  edgespec train router -m TARGET -md HEAD --groups 16 --top-groups 2 -o ROUTED
  edgespec generate prompts.jsonl -m TARGET -md ROUTED

The features that the head was trained on are used where they are kept. It pays
where the vocabulary is large: from about 128 thousand tokens on.
""",
)
@model_options
@options_of(RouterOptions, handed_on_as="options")
@machine_options
@console_options()
def command(*, models: ModelOptions, options: RouterOptions, machine: MachineOptions, console: Console) -> int:
    """Train a router for a head: only the groups of the vocabulary that a draft needs are then computed.

    The head itself is left as it is; the result is a head with a router.
    """
    check_output(options.path, overwrite=options.overwrite)
    output, groups, top_groups = options.path, options.groups, options.top_groups
    if models.draft is None:
        raise EdgespecError("E_SETTING", "there is no head to train a router for.", "Name one with -md.")

    import_engine(console)
    from edgespec.pair.pair import open_pair
    from edgespec.train.head_model import lender, load_head, save_head
    from edgespec.train.head_objective import Precision, vocab_of
    from edgespec.train.router_training import ROUTER_PREFIX, check_groups, train_router

    pair = open_pair(models.target, models.draft, models.tokenizer)
    if pair.draft is None or pair.draft.head is None:
        what = f"'{models.draft}' is no feature head of eagle, hass or coral."
        raise EdgespecError("E_SETTING", what, "Train one: edgespec train head.")
    facts = replace(pair.draft.head, router_groups=groups, top_groups=top_groups)
    alone = replace(pair, draft=None)
    run_config = machine.run_config(alone, context_tokens=options.data.block_tokens)
    precision = Precision.on(run_config.device, run_config.dtype)
    folder = options.data.features or models.draft.with_name(models.draft.name + ".features")
    started = time.perf_counter()
    with lender(pair.target, device=run_config.device, dtype=precision.lent_dtype(run_config.dtype)) as target:
        check_groups(vocab_of(target), groups, top_groups)
        run = features_of(console, alone, options.data, folder, machine, run_config)
        settings = options.training.for_width(run.hidden_size)
        head = load_head(target, models.draft, facts, fresh=(ROUTER_PREFIX,))
        with training_run(
            console, output, what=f"{groups} groups", features=folder, settings=settings, identity=f"{facts} {run}"
        ) as training:
            report = train_router(head, run=training, num_steps=options.multi_steps, precision=precision)
            save_head(head, facts, output)
    found = {
        "head": str(output),
        "groups": groups,
        "top_groups": top_groups,
        "features": {"folder": str(folder), "tokens": run.num_tokens, "blocks": run.num_blocks},
        "settings": {**asdict(settings), "steps_of_forward": options.multi_steps},
        "training_s": time.perf_counter() - started,
        **report.as_json(),
    }
    text = f"router of {groups} groups, {top_groups} computed: {in_words(report.held_out)}\n"
    write_report(console, output, found, text=text, as_json=options.as_json)
    return 0
