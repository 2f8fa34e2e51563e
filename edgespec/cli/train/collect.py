"""Reading the target once for its features, with what a person sees meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.console import Console
from edgespec.cli.options.options import MachineOptions, check_all_resident

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair
    from edgespec.train.feature_files import Block, FeatureRun


def collect(
    console: Console,
    pair: ModelPair,
    blocks: Sequence[Block],
    folder: Path,
    run: FeatureRun,
    machine: MachineOptions,
) -> None:
    """Collect the features that a folder lacks, if any; raises EdgespecError."""
    from edgespec.engine import Engine
    from edgespec.model.device import resolve_device, resolve_dtype
    from edgespec.train.feature_files import FeatureFiles, begin_run
    from edgespec.train.features import collect_features, room_for_groups
    from edgespec.tree.settings import TreeSettings

    begin_run(folder, run)
    if FeatureFiles(folder).num_blocks == run.num_blocks:
        console.say(f"features: all are in '{folder}'")
        return
    device = resolve_device(machine.device)
    dtype = resolve_dtype(machine.dtype, pair.target.config, device)
    room = room_for_groups(
        pair.target.config, machine.limits, block_tokens=run.block_tokens, dtype=dtype, device=device
    )
    with (
        Engine(
            pair,
            tree=TreeSettings(policy="none"),
            limits=room.limits,
            device=machine.device,
            dtype=machine.dtype,
            quant=machine.quant,
            context_tokens=run.block_tokens,
            on_plan=lambda engine: check_all_resident(
                machine,
                engine.placement.num_resident,
                pair.target.config.get_text_config(decoder=True).num_hidden_layers,
            ),
        ) as engine,
        console.progress_bar() as bar,
    ):
        collect_features(
            engine.target_model,
            blocks,
            folder,
            run,
            group_rows=room.rows,
            announce=lambda path, num_bytes, free_bytes: console.say(
                f"features: {num_bytes / 1e6:.0f} MB go to '{path}' ({free_bytes / 1e9:.1f} GB free), "
                f"{room.rows} rows a pass over the target"
            ),
            progress=console.counting(bar, "collecting", "tokens"),
        )
