"""The option --prompt-cache, and what is said of its file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.console import Console
from edgespec.cli.options.group import Command

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig
    from edgespec.text.prompt_cache import PromptCache

HELP = (
    "Keep what prompts begin with alike, read, in this file, and begin on what it has. `edgespec cache list` tells of "
    "it, wherever it lies."
)


def prompt_cache_option(function: Command) -> Command:
    """Add the option of the file, which is handed on as `prompt_cache`."""
    return click.option("--prompt-cache", type=click.Path(path_type=Path), metavar="FILE", help=HELP)(function)


def open_prompt_cache(path: Path | None, pair: ModelPair, run_config: RunConfig) -> PromptCache | None:
    """Return the file, checked before weights are read; raises EdgespecError."""
    if path is None:
        return None
    from edgespec.text.prompt_cache import PromptCache, prompt_key

    return PromptCache(path, prompt_key(pair, run_config))


def use_prompt_cache(
    console: Console, engine: Engine, cache: PromptCache | None, prompts: Iterable[Sequence[int]]
) -> None:
    """Let the engine begin on the file, which is to have what these prompts begin with alike."""
    if cache is None:
        return
    cache.keep_beginning(prompts)
    found = f"{cache.num_known} of the {cache.num_wanted} tokens that prompts begin with"
    console.say(f"prompt cache: '{cache.path}' has {found}")
    engine.use_prompt_cache(cache)
