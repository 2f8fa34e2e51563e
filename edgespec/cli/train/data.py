"""Options of commands that train on features, and the features themselves: read, or collected now."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console
from edgespec.cli.options.group import FOLDER, Command, with_options
from edgespec.cli.options.machine import MachineOptions
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.prompts.read import encode_prompts, read_prompts
from edgespec.cli.prompts.source import form_by_name, read_bytes
from edgespec.errors import EdgespecError
from edgespec.train.training_settings import DECAYS, TrainingSettings

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig
    from edgespec.train.feature_files import FeatureRun

DEFAULTS = TrainingSettings()
SNIFFED_BYTES = 8192  # a file with a zero byte in its first ones is no text
FEATURES_HELP = "Folder of the target's features; collecting goes on where it stopped."


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The texts or features to learn from."""

    data: Path | None
    features: Path | None
    data_tokens: int | None
    block_tokens: int


def data_options(function: Command) -> Command:
    """Add the options of texts and features, which are handed on as `asked`."""

    @functools.wraps(function)
    def call(
        *, data: Path | None, features: Path | None, data_tokens: int | None, block_tokens: int, **others: Any
    ) -> Any:
        asked = DataOptions(data=data, features=features, data_tokens=data_tokens, block_tokens=block_tokens)
        return function(asked=asked, **others)

    options = [
        click.option("--data", type=FOLDER, metavar="FILE|DIR",
                     help="Texts to learn from: a file, prompts as JSON lines, or all text files of a folder."),
        click.option("--features", type=FOLDER, help=FEATURES_HELP),
        click.option("--data-tokens", type=WholeRange(1), help="Learn from so many tokens at most. [all]"),
        click.option("--block-tokens", type=WholeRange(8, 8192), default=512, show_default=True,
                     help="The longest piece of a text that the target reads at once."),
    ]  # fmt: skip
    return with_options(call, options)


def training_options(*, training_steps: int) -> Callable[[Command], Command]:
    """Add the optimiser's options, which are handed on as `settings`."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(*, betas: str, **values: Any) -> Any:
            names = TrainingSettings.__dataclass_fields__.keys() - {"betas"}
            given = {name: values.pop(name) for name in names if name in values}
            return function(settings=TrainingSettings(betas=_betas(betas), **given), **values)

        positive = click.FloatRange(min=0, min_open=True)
        options = [
            click.option("--training-steps", type=WholeRange(1), default=training_steps, show_default=True,
                         help="Batches to learn from."),
            click.option("--batch", "batch_blocks", type=WholeRange(1), default=DEFAULTS.batch_blocks,
                         show_default=True, help="Blocks of a batch."),
            click.option("--learning-rate", type=positive, help="Of AdamW. [0.75 over the target's hidden size]"),
            click.option("--warmup-steps", type=WholeRange(0), default=DEFAULTS.warmup_steps, show_default=True,
                         help="Steps until the learning rate is reached."),
            click.option("--decay", type=click.Choice(DECAYS), default=DEFAULTS.decay, show_default=True,
                         help="How the learning rate then falls to 0."),
            click.option("--weight-decay", type=click.FloatRange(min=0), default=DEFAULTS.weight_decay,
                         show_default=True),
            click.option("--betas", default=",".join(map(str, DEFAULTS.betas)), show_default=True, help="AdamW's."),
            click.option("--gradient-clip", type=positive, default=DEFAULTS.gradient_clip, show_default=True,
                         help="Largest norm of the gradients together."),
            click.option("--evaluate-every", type=WholeRange(1), default=DEFAULTS.evaluate_every,
                         show_default=True, help="Steps between looks at held-out texts."),
            click.option("--checkpoint-every", type=WholeRange(1), default=DEFAULTS.checkpoint_every,
                         show_default=True, help="Steps between checkpoints, from which a run goes on."),
            click.option("--held-out-blocks", type=WholeRange(1), default=DEFAULTS.held_out_blocks,
                         show_default=True, help="Most blocks of held-out texts to look at."),
            click.option("--seed", type=WholeRange(0), default=0, show_default=True),
        ]  # fmt: skip
        return with_options(call, options)

    return decorate


def features_of(
    console: Console, pair: ModelPair, asked: DataOptions, folder: Path, machine: MachineOptions, run_config: RunConfig
) -> FeatureRun:
    """Return what a folder's features are of, after collecting those that are missing; raises EdgespecError.

    `place` has room for a block. Without texts a whole folder of this target's features is taken as it is.
    """
    from edgespec.pair.folder import fingerprint
    from edgespec.train.feature_files import FeatureFiles, read_run
    from edgespec.train.features import cut_blocks, feature_run

    if asked.data is None:
        if not folder.is_dir():
            what = "the built-in target" if asked.features is None else f"'{folder}'"
            raise EdgespecError(
                "E_SETTING", f"there are no texts to learn from, and no features of {what}.",
                "Give texts like those that will be continued: --data FILE or --data DIR.",
            )  # fmt: skip
        run = read_run(folder)
        if run.target_fingerprint != fingerprint(pair.target):
            raise EdgespecError(
                "E_FEATURES", f"'{folder}' holds features of '{run.target}'.", "Name that target, or other features."
            )
        if FeatureFiles(folder).num_blocks < run.num_blocks:
            raise EdgespecError("E_FEATURES", f"'{folder}' is not complete.", "Give its --data again, to go on.")
        return run
    block_tokens = run_config.context_tokens
    texts = encode_texts(pair, asked.data, max_tokens=asked.data_tokens)
    blocks = cut_blocks(texts, block_tokens=block_tokens, max_tokens=asked.data_tokens)
    run = feature_run(pair.target, blocks, block_tokens=block_tokens, dtype=run_config.dtype, quant=run_config.quant)
    console.say(f"texts: {len({block.text for block in blocks})}, {run.num_tokens} tokens in {run.num_blocks} blocks")
    from edgespec.cli.train.collect import collect

    collect(console, pair, blocks, folder, run, machine, run_config)
    return run


def encode_texts(pair: ModelPair, data: Path, *, max_tokens: int | None) -> list[list[int]]:
    """Encode the texts, in an order that mixes a folder's files, until there are `max_tokens`."""
    if data.is_file() and form_by_name(str(data)) in {"jsonl", "json", "parquet"}:
        return encode_prompts(pair, read_prompts(str(data)), raw=False)
    paths = text_files(data)
    random.Random(0).shuffle(paths)
    found: list[list[int]] = []
    num_tokens = 0
    for path in paths:
        if max_tokens is not None and num_tokens >= max_tokens:
            break
        text = read_bytes(str(path), what="a text file, or a folder of them").decode("utf-8", errors="ignore")
        found.append(pair.tokenizer(text, verbose=False)["input_ids"])
        num_tokens += len(found[-1])
    return found


def text_files(data: Path) -> list[Path]:
    """Return the file, or all text files below a folder, sorted; raises EdgespecError where there are none."""
    if data.is_file():
        return [data]
    paths = [
        path
        for path in sorted(data.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(data).parts) and _is_text(path)
    ]
    if not paths:
        raise EdgespecError("E_FILE_NOT_FOUND", f"there is no text in '{data}'.", "Name a text file, or a folder.")
    return paths


def _is_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(SNIFFED_BYTES)
    except OSError:
        return False
    return bool(start.strip()) and b"\0" not in start


def _betas(text: str) -> tuple[float, float]:
    try:
        first, second = map(float, text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"'{text}' is not two numbers, such as 0.9,0.95.", param_hint="--betas") from error
    return first, second


def without_draft(pair: ModelPair) -> ModelPair:
    """Return the pair without its draft."""
    return replace(pair, draft=None)
