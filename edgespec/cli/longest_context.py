"""A pair that is loaded with the longest context that fits memory, where no length was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgespec.cli.options.engine import EngineOptions
from edgespec.errors import EdgespecError
from edgespec.text.context import check_ctx_size

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.pair_setup import PairSetup
    from edgespec.placement.run_config import RunConfigOptions

CONTEXTS = (8192, 4096, 2048, 1024, 512)  # that -c auto tries in turn, until one fits memory


def open_longest(
    pair: ModelPair,
    options: EngineOptions,
    *,
    temperature: float,
    num_texts: int = 1,
    load: Callable[[PairSetup], Engine],
) -> Engine:
    """Return the engine with the context that -c sets, or the longest that fits; raises EdgespecError."""
    from edgespec.placement.pair_setup import set_up_by_profile
    from edgespec.placement.pair_sizes import PairSizes
    from edgespec.placement.run_config import resolve_run_config

    machine = options.machine
    check_ctx_size(machine.ctx_size, pair.max_context)
    most = pair.max_context or CONTEXTS[0]

    def given(context_tokens: int) -> RunConfigOptions:
        return {**machine.options(context_tokens=context_tokens), "parallel": num_texts}

    contexts = [machine.ctx_size] if machine.ctx_size else sorted({min(most, size) for size in CONTEXTS}, reverse=True)
    configs = [
        resolve_run_config(pair.target, pair.max_context, draft=pair.draft, **named)
        for named in (given(context_tokens) for context_tokens in contexts)
    ]
    sizes = PairSizes(pair, configs[0])
    for run_config in configs:
        try:
            return load(set_up_by_profile(pair, run_config, options.trees, temperature=temperature, sizes=sizes))
        except EdgespecError as error:
            if error.code != "E_MEMORY" or run_config is configs[-1]:
                raise
    raise AssertionError("there is a context to try")
