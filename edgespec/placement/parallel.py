"""How many texts under way pay: a text's cache is weighed against a layer that stays resident."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.placement.place import pair_weights, place_weights, read_memory
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement

MAX_TEXTS = 16  # growth costs each text a little, and little is gained by more
SPREAD = 1.25  # of the texts under way over the mean of all
COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShares:
    """What the parts of a step take, where a pass that streams all layers takes 1: a guess, unless it was measured."""

    resident: float = 0.15  # of a pass whose layers are all resident
    text: float = 0.02  # of each text, with its tree
    # Texts have smaller trees in company: the tokens of each over those of one alone, at so many texts
    tokens_left: float = 1.0
    at_texts: int = 2

    def step(self, placement: Placement, num_texts: int) -> float:
        """Return the seconds of a step, where one over the weights, all streamed, takes 1."""
        streamed = 1 - placement.resident_share
        return streamed + self.resident * (1 - streamed) + self.text * num_texts

    def tokens(self, num_texts: int) -> float:
        """Return the tokens that a step yields all texts, where it yields 1 to one alone."""
        return num_texts * math.pow(self.tokens_left, math.log(num_texts) / math.log(self.at_texts))


def texts_that_pay(
    pair: ModelPair,
    run_config: RunConfig,
    tree: TreeSettings,
    *,
    num_waiting: int,
    mean_tokens: float,
    shares: PassShares,
) -> RunConfig:
    """Return the place with as many texts under way, of `num_waiting`, as make most tokens a second of all.

    `place` is that of one text; texts have `mean_tokens`. Where nothing fits, one text is left to say so.
    """
    weights = pair_weights(pair.target, pair.draft if tree.policy != "none" else None, run_config)
    memory = read_memory(run_config.limits, run_config.device)
    best, most_per_s = run_config, 0.0
    for count in sorted({*COUNTS, min(num_waiting, MAX_TEXTS)}):
        if count > max(1, num_waiting):
            break
        own = with_texts(run_config, count, mean_tokens)
        try:
            placement = place_weights(weights, tree, own, memory).placement
        except EdgespecError:
            break
        per_s = shares.tokens(count) / shares.step(placement, count)
        if per_s > most_per_s:
            best, most_per_s = own, per_s
    return best


def with_texts(run_config: RunConfig, count: int, mean_tokens: float) -> RunConfig:
    """Return the place for so many texts, with room for a few that are longer than the mean."""
    tokens = run_config.context_tokens + int((count - 1) * min(run_config.context_tokens, SPREAD * mean_tokens))
    return replace(run_config, num_texts=count, cache_tokens=tokens)
