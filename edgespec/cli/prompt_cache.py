"""The file of --prompt-cache, and the message about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.console import Console

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig
    from edgespec.text.prompt_cache import PromptCache


def open_prompt_cache(path: Path | None, pair: ModelPair, run_config: RunConfig) -> PromptCache | None:
    """Return the file, checked before weights are read; raises EdgespecError."""
    if path is None:
        return None
    from edgespec.text.prompt_cache import PromptCache, prompt_key

    return PromptCache(path, prompt_key(pair, run_config))


def use_prompt_cache(
    console: Console, engine: Engine, cache: PromptCache | None, prompts: Iterable[Sequence[int]]
) -> None:
    """Let the engine use the file, which will hold what these prompts have in common at their beginning."""
    if cache is None:
        return
    cache.keep_beginning(prompts)
    found = f"{cache.num_known} of the {cache.num_wanted} tokens that prompts begin with"
    console.say(f"prompt cache: '{cache.path}' has {found}")
    engine.use_prompt_cache(cache)
