"""What one step of a placed pair moves and computes, and the seconds that it takes where rates are known.

Estimates are made of it (`estimate/`), and so is the choice whether a target's own layer drafts (`own_layer.py`).
"""

import math
from dataclasses import dataclass, replace

from edgespec.draft.calls import BY_LAYER, DraftCalls
from edgespec.draft.own_parts import calls_of
from edgespec.placement.copied_layers import as_computed
from edgespec.placement.pass_load import model_load, with_locked
from edgespec.placement.place import PlacedWeights
from edgespec.placement.run_config import RunConfig
from edgespec.tuning.draft_memory import MeanGrowth
from profiles.roofline import (
    ExpertSeconds,
    ModelLoad,
    Rates,
    compute_s,
    draft_call_s,
    expert_seconds,
    noise_s,
    stream_s,
    verify_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """The seconds of one step, and the tokens that it yields."""

    num_texts: int  # that share it
    tokens: float  # of a text
    draft_s: float
    noise_s: float  # to make the noise of the positions that all texts gain, while the pass goes on
    stream_s: float  # of the target's pass; it and compute_s go on at once
    compute_s: float
    experts: ExpertSeconds | None  # that come on top of them, where a mixture's move on demand
    pass_s: float  # the longer of stream and compute, the experts, and the head

    @property
    def step_s(self) -> float:
        """The seconds of drafting and of the pass after it, which noise is made beside."""
        return self.draft_s + max(self.pass_s, self.noise_s)

    @property
    def tokens_per_s(self) -> float:
        """The tokens a second of all texts once their prompts are read."""
        return self.num_texts * self.tokens / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoad:
    """What passes of both models move and compute on one placement."""

    target: ModelLoad
    draft: ModelLoad | None
    calls: DraftCalls = BY_LAYER  # of the draft
    noise_vocab: int = 0  # numbers of a position's noise, where tokens are drawn by it
    growth: MeanGrowth | None = None  # what a tree of the draft's took here


def pair_load(
    weights: PlacedWeights, run_config: RunConfig, *, draws: bool = False, locked_bytes: float = math.inf,
    growth: MeanGrowth | None = None,
) -> PairLoad:  # fmt: skip
    """Return what passes of both models move and compute, at the end of the context.

    Where it `draws`, noise is made; no more than `locked_bytes` of layers wait in locked memory. `growth` is what a
    tree of the draft's took here.
    """
    draft = as_computed(weights.target, weights.draft, weights.placement)
    device, num_texts, keys = run_config.device, run_config.num_texts, run_config.context_tokens
    target = model_load(weights.target, weights.placement, keys=keys, num_texts=num_texts, device=device)
    calls = calls_of(draft.model.parts if draft else None)
    drafting = None if draft is None else model_load(draft, None, keys=keys, num_texts=num_texts, device=device)
    return PairLoad(
        target=with_locked(target, locked_bytes) if device.type == "cuda" else target,
        draft=None if drafting is None else replace(drafting, is_recorded=run_config.records_passes),
        calls=calls,
        noise_vocab=weights.target.skeleton.model.get_output_embeddings().weight.shape[0] if draws else 0,
        growth=growth,
    )


def step_seconds(load: PairLoad, rates: Rates, num_texts: int, *, nodes: int, depth: int, tokens: float) -> StepSeconds:
    """Return the seconds of one step: draft calls of the trees' mean width, or of a block's rows, and a pass.

    The pass is over the root and the nodes of every text's tree. Where a tree's growth was measured, that of others is
    as many times longer or shorter than these sums have it as that one's.
    """
    draft_s = _draft_s(load, rates, num_texts, nodes=nodes, depth=depth)
    if draft_s and (seen := load.growth) is not None:
        draft_s *= seen.seconds / _draft_s(load, rates, 1, nodes=seen.nodes, depth=seen.layers)
    rows = num_texts * (1 + nodes)
    experts = load.target.experts
    return StepSeconds(
        num_texts=num_texts,
        tokens=tokens,
        draft_s=draft_s,
        noise_s=noise_s(rates, vocab=load.noise_vocab, positions=num_texts * (1 + tokens)),
        stream_s=stream_s(load.target, rates),
        compute_s=compute_s(load.target, rates, rows=rows),
        experts=expert_seconds(experts, rates, rows=rows, num_texts=num_texts) if experts else None,
        # The head looks at the rows of the accepted paths, one after the other.
        pass_s=verify_s(load.target, rates, rows=rows, head_calls=num_texts * tokens, num_texts=num_texts),
    )


def _draft_s(load: PairLoad, rates: Rates, num_texts: int, *, nodes: float, depth: float) -> float:
    if not nodes or load.draft is None:
        return 0.0
    width = num_texts * (load.calls.num_rows or math.ceil(nodes / depth))
    return load.calls.of(depth) * draft_call_s(load.draft, rates, width=width, num_texts=num_texts)
