"""Reading the target once for its features, with what a person sees meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.console import Console
from edgespec.cli.open_engine import open_engine
from edgespec.cli.options.machine import MachineOptions

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig
    from edgespec.train.feature_files import Block, FeatureRun


def collect(
    console: Console,
    pair: ModelPair,
    blocks: Sequence[Block],
    folder: Path,
    run: FeatureRun,
    machine: MachineOptions,
    run_config: RunConfig,
) -> None:
    """Collect what a folder of features lacks, if anything; raises EdgespecError."""
    from edgespec.placement.pair_setup import set_up
    from edgespec.train.feature_files import FeatureFiles, begin_run
    from edgespec.train.features import collect_features, place_groups
    from edgespec.tree.settings import TreeSettings

    begin_run(folder, run)
    if FeatureFiles(folder).num_blocks == run.num_blocks:
        console.say(f"features: all are in '{folder}'")
        return
    room = place_groups(pair.target.config, run_config)
    with (
        open_engine(console, set_up(pair, room.run_config, TreeSettings(policy="none")), machine) as engine,
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
