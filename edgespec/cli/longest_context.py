"""A pair that is loaded with the longest context that fits memory, where no length was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cli.console import Console
from edgespec.cli.open_engine import corpus_tokens, open_engine, use_corpus
from edgespec.cli.options.engine import EngineOptions
from edgespec.errors import EdgespecError
from edgespec.text.context import check_ctx_size

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.run_config import RunConfig, RunConfigOptions

CONTEXTS = (8192, 4096, 2048, 1024, 512)  # that -c auto tries in turn, until one fits memory


def open_longest(
    console: Console, pair: ModelPair, options: EngineOptions, *, temperature: float, num_texts: int = 1
) -> Engine:
    """Return the engine with the context that -c sets, or the longest that fits; raises EdgespecError."""
    from edgespec.placement.pair_setup import set_up_by_profile
    from edgespec.placement.pair_sizes import PairSizes
    from edgespec.placement.run_config import resolve_run_config

    machine = options.machine
    check_ctx_size(machine.ctx_size, pair.max_context)
    most = pair.max_context or CONTEXTS[0]
    contexts = [machine.ctx_size] if machine.ctx_size else sorted({min(most, size) for size in CONTEXTS}, reverse=True)

    def run_config(context_tokens: int) -> RunConfig:
        run_options: RunConfigOptions = {**machine.options(context_tokens=context_tokens), "parallel": num_texts}
        run_options["corpus_tokens"] = corpus_tokens(options.corpus)
        return resolve_run_config(pair.target, pair.max_context, draft=pair.draft, **run_options)

    sizes = PairSizes(pair, run_config(contexts[0]))

    def load(context_tokens: int) -> Engine:
        setup = set_up_by_profile(pair, run_config(context_tokens), options.trees, temperature=temperature, sizes=sizes)
        engine = open_engine(
            console, setup, machine, self_check=options.self_check, draft_check=options.draft_check == "auto"
        )
        use_corpus(console, engine, options.corpus)
        return engine

    for context_tokens in contexts[:-1]:
        try:
            return load(context_tokens)
        except EdgespecError as error:
            if error.code != "E_MEMORY":
                raise
    return load(contexts[-1])
