"""How many texts under way pay, before anything is measured: a text's cache against a layer that stays resident."""

from __future__ import annotations

from dataclasses import replace

from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair
from edgespec.placement.place import pair_weights, place_weights, read_memory
from edgespec.placement.run_place import RunPlace
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement

MOST_TEXTS = 16  # growth costs each text a little, and little is gained by more
SPREAD = 1.25  # of the texts under way over the mean of all
COUNTS = (1, 2, 4, 8, 16)
# Seconds of a pass over weights that are streamed: the same where they are resident, and for a row's arithmetic
RESIDENT_SHARE, ROW_SHARE = 0.15, 0.02


def texts_that_pay(
    pair: ModelPair, place: RunPlace, tree: TreeSettings, *, num_waiting: int, mean_tokens: float
) -> RunPlace:
    """Return the place with as many texts under way, of `num_waiting`, as make most tokens a second of all.

    `place` is that of one text; texts have `mean_tokens`. Where nothing fits, one text is left to say so.
    """
    weights = pair_weights(pair.target, pair.draft if tree.policy != "none" else None, place)
    memory = read_memory(place.limits, place.device)
    best, most_per_s = place, 0.0
    for count in sorted({*COUNTS, min(num_waiting, MOST_TEXTS)}):
        if count > max(1, num_waiting):
            break
        own = with_texts(place, count, mean_tokens)
        try:
            placement = place_weights(weights, tree, own, memory).placement
        except EdgespecError:
            break
        per_s = count / _pass_s(placement, count)
        if per_s > most_per_s:
            best, most_per_s = own, per_s
    return best


def with_texts(place: RunPlace, count: int, mean_tokens: float) -> RunPlace:
    """Return the place for so many texts, with room for a few that are longer than the mean."""
    tokens = place.context_tokens + int((count - 1) * min(place.context_tokens, SPREAD * mean_tokens))
    return replace(place, num_texts=count, cache_tokens=tokens)


def _pass_s(placement: Placement, num_texts: int) -> float:
    """Return the seconds of a pass, where one over the weights, all streamed, takes 1."""
    streamed = 1 - placement.num_resident / placement.num_layers
    return streamed + RESIDENT_SHARE * (1 - streamed) + ROW_SHARE * num_texts
