"""A small tree is grown when a draft is loaded, so that no text need try what cannot pay."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from edgespec.config import SamplingSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.own_parts import reads_features
from edgespec.errors import EdgespecError
from edgespec.grow.batched import grown
from edgespec.grow.policies import OpenPolicy, make_grow
from edgespec.grow.text_draws import TextDraws
from edgespec.model.causal_model import CausalModel
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree, depths_on_host
from edgespec.tuning.draft_facts import FirstGrowth

SIZE, DEPTH = 8, 2
READ_TOKENS = 64
REPEATS = 2
SLOW_S = 0.25  # of a call: it says enough


def first_growth(
    draft: CausalModel, policy: OpenPolicy, sampling: SamplingSettings, *, vocab: int
) -> FirstGrowth | None:
    """Return what a small tree of a language model takes; None for a draft that reads a target's states, or fails."""
    if reads_features(draft.model):
        return None
    tree = policy.settings
    if tree.uses("size"):
        tree = replace(tree, size=min(tree.size, SIZE))
    noise = TextNoise(seed=0, key=0, vocab=vocab, device=draft.device)
    generator = torch.Generator(draft.device).manual_seed(0)
    draws = TextDraws(sampling=sampling, device=draft.device, generator=generator, noise=noise)
    drafter = LanguageModelDrafter(draft, vocab=vocab, sampling=tree.draft_sampling(sampling))
    grow = make_grow(replace(policy, settings=tree), drafter, draws)

    def timed(depth: int) -> tuple[float, TokenTree]:
        drafter.rewind()
        started = time.perf_counter()
        found = grown(grow(0, depth), drafter)
        return time.perf_counter() - started, found

    try:
        drafter.begin([0, 0])
        first_s, found = timed(1)  # the first call loads kernels, too
        if first_s > SLOW_S:
            return FirstGrowth(layers=1, nodes=found.num_nodes - 1, seconds=first_s, row_s=0.0)
        seconds, found = min((timed(DEPTH) for _ in range(REPEATS)), key=lambda one: one[0])
        layer_s, _ = timed(1)
        drafter.begin([0] * (2 + READ_TOKENS))
        read_s, _ = timed(1)
    except EdgespecError:  # a text will say it
        return None
    layers = max(1, *depths_on_host(found.parents.tolist()))
    row_s = max(0.0, read_s - layer_s) / READ_TOKENS
    return FirstGrowth(layers=layers, nodes=found.num_nodes - 1, seconds=seconds, row_s=row_s)
