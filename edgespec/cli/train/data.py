"""Options of commands that train on features, and the features themselves: read, or collected now."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.console import Console
from edgespec.cli.open_engine import open_engine
from edgespec.cli.options.machine import MachineOptions
from edgespec.cli.options.numbers import WholeRange
from edgespec.cli.options.record import FOLDER, group, option
from edgespec.cli.prompts.read import encode_prompts, read_prompts
from edgespec.cli.prompts.source import form_by_name, read_bytes
from edgespec.errors import EdgespecError
from edgespec.train.training_settings import DECAYS, Decay, TrainingSettings

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig
    from edgespec.train.feature_files import Block, FeatureRun

DEFAULTS = TrainingSettings()
SNIFFED_BYTES = 8192  # a file with a zero byte in its first ones is no text
DATA_HELP = "Learn from these texts: a file, prompts as JSON lines, or all text files of a folder."
FEATURES_HELP = "Keep the target's features in this folder; collecting continues where it stopped."
POSITIVE = click.FloatRange(min=0, min_open=True)


def _betas(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[float, float]:
    try:
        first, second = map(float, text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"'{text}' is not two numbers, such as 0.9,0.95.") from error
    return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """The texts or features to learn from."""

    data: Path | None = option("--data", type=FOLDER, metavar="FILE|DIR", help=DATA_HELP)
    features: Path | None = option("--features", type=FOLDER, help=FEATURES_HELP)
    data_tokens: int | None = option(
        "--data-tokens", type=WholeRange(1), help="Learn from at most this many tokens. [all]"
    )
    block_tokens: int = option(
        "--block-tokens", type=WholeRange(8, 8192), default=512, show_default=True,
        help="Let the target read pieces of texts that are at most this long.",
    )  # fmt: skip


def _steps(default: int) -> Any:
    return option(
        "--training-steps", type=WholeRange(1), default=default, show_default=True, help="Learn from this many batches."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainingFlags:
    """The flags of `TrainingSettings`, for a head."""

    training_steps: int = _steps(1500)
    batch_blocks: int = option(
        "--batch", type=WholeRange(1), default=DEFAULTS.batch_blocks, show_default=True,
        help="Put this many blocks into a batch.",
    )  # fmt: skip
    learning_rate: float | None = option(
        "--learning-rate", type=POSITIVE, help="Set the learning rate of AdamW. [0.75 over the target's hidden size]"
    )
    warmup_steps: int = option(
        "--warmup-steps", type=WholeRange(0), default=DEFAULTS.warmup_steps, show_default=True,
        help="Reach the learning rate after this many steps.",
    )  # fmt: skip
    decay: Decay = option(
        "--decay", type=click.Choice(DECAYS), default=DEFAULTS.decay, show_default=True,
        help="Let the learning rate then fall to 0 in this way.",
    )  # fmt: skip
    weight_decay: float = option(
        "--weight-decay", type=click.FloatRange(min=0), default=DEFAULTS.weight_decay, show_default=True,
        help="Set the weight decay of AdamW.",
    )  # fmt: skip
    betas: tuple[float, float] = option(
        "--betas", callback=_betas, default=",".join(map(str, DEFAULTS.betas)), show_default=True,
        help="Set the two betas of AdamW.",
    )  # fmt: skip
    gradient_clip: float = option(
        "--gradient-clip", type=POSITIVE, default=DEFAULTS.gradient_clip, show_default=True,
        help="Clip the gradients where their common norm is above this.",
    )  # fmt: skip
    evaluate_every: int = option(
        "--evaluate-every", type=WholeRange(1), default=DEFAULTS.evaluate_every, show_default=True,
        help="Evaluate on held-out texts at intervals of this many steps.",
    )  # fmt: skip
    checkpoint_every: int = option(
        "--checkpoint-every", type=WholeRange(1), default=DEFAULTS.checkpoint_every, show_default=True,
        help="Write a checkpoint, from which a run continues, at intervals of this many steps.",
    )  # fmt: skip
    held_out_blocks: int = option(
        "--held-out-blocks", type=WholeRange(1), default=DEFAULTS.held_out_blocks, show_default=True,
        help="Evaluate on at most this many blocks of held-out texts.",
    )  # fmt: skip
    seed: int = option("--seed", type=WholeRange(0), default=0, show_default=True, help="Train with this seed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTrainingFlags(HeadTrainingFlags):
    """The same for a router, which learns faster."""

    training_steps: int = _steps(500)


def make_training_settings(flags: HeadTrainingFlags) -> TrainingSettings:
    """Return the settings that flags give; raises EdgespecError."""
    return TrainingSettings(**asdict(flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of every training of a head or of a part of one."""

    data: DataOptions = group(DataOptions)
    path: Path = option("-o", "--output", type=FOLDER, required=True, help="Write the head into this folder.")
    overwrite: bool = option("--overwrite", is_flag=True, help="Replace it if it exists.")
    as_json: bool = option("--json", is_flag=True, help="Write the report as JSON.")


def features_of(
    console: Console,
    pair: ModelPair,
    options: DataOptions,
    folder: Path,
    machine: MachineOptions,
    run_config: RunConfig,
    *,
    aux_layers: tuple[int, ...] = (),
) -> FeatureRun:
    """Return the run of a folder's features, after collecting those that are missing; raises EdgespecError.

    Without texts a whole folder of this target's features is taken as it is. Hidden states before `aux_layers`
    belong to them.
    """
    from edgespec.pair.folder import fingerprint
    from edgespec.pair.tree_support import check_gives_hidden_states
    from edgespec.train.feature_files import FeatureFiles, read_run
    from edgespec.train.features import cut_blocks, feature_run

    check_gives_hidden_states(pair.target)
    if options.data is None:
        if not folder.is_dir():
            what = "the built-in target" if options.features is None else f"'{folder}'"
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
        if aux_layers and run.aux_layers != aux_layers:
            found, wanted = list(run.aux_layers), list(aux_layers)
            what = f"'{folder}' has the target's hidden states after {found} layers, and not after {wanted}."
            raise EdgespecError("E_FEATURES", what, "Collect features again: give --data and another folder.")
        return run
    block_tokens = run_config.context_tokens
    texts = encode_texts(pair, options.data, max_tokens=options.data_tokens)
    blocks = cut_blocks(texts, block_tokens=block_tokens, max_tokens=options.data_tokens)
    run = feature_run(
        pair.target,
        blocks,
        block_tokens=block_tokens,
        dtype=run_config.dtype,
        quant=run_config.quant,
        aux_layers=aux_layers,
    )
    console.say(f"texts: {len({block.text for block in blocks})}, {run.num_tokens} tokens in {run.num_blocks} blocks")
    _collect(console, pair, blocks, folder, run, machine, run_config)
    return run


def _collect(
    console: Console,
    pair: ModelPair,
    blocks: Sequence[Block],
    folder: Path,
    run: FeatureRun,
    machine: MachineOptions,
    run_config: RunConfig,
) -> None:
    """Collect the features that a folder lacks; raises EdgespecError."""
    from edgespec.placement.pair_setup import set_up
    from edgespec.placement.pair_sizes import PairSizes
    from edgespec.train.feature_files import FeatureFiles, begin_run
    from edgespec.train.features import collect_features, place_groups
    from edgespec.tree.settings import TreeSettings

    begin_run(folder, run)
    if FeatureFiles(folder).num_blocks == run.num_blocks:
        console.say(f"features: all are in '{folder}'")
        return
    group = place_groups(pair.target.config, run_config, num_aux_layers=len(run.aux_layers))
    sizes = PairSizes(pair, run_config, memory=group.memory)
    setup = set_up(pair, run_config, TreeSettings(policy="none"), sizes=sizes)
    with open_engine(console, setup, machine) as engine, console.progress_bar() as bar:
        collect_features(
            engine.target_model,
            blocks,
            folder,
            run,
            group_rows=group.rows,
            announce=lambda path, num_bytes, free_bytes: console.say(
                f"features: {num_bytes / 1e6:.0f} MB go to '{path}' ({free_bytes / 1e9:.1f} GB free), "
                f"{group.rows} rows a pass over the target"
            ),
            progress=console.counting(bar, "collecting", "tokens"),
        )


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
