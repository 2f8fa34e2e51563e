"""Growth of chosen children: the most probable tokens below each node, one draft call a layer of all texts' trees.

This engine is shared by OPT-Tree, EAGLE-2, C2T and adaptive's chosen trees. A rule gives every candidate
a score, which never grows from a node to its child (a running minimum sees to it), so that the best candidates
form trees. A candidate that is not among the best seen so far can lead to none that is, so neither it nor
what is below it is looked at. The finished trees are the same as if all had been looked at, with fewer nodes
drafted than the papers' own procedures need.

What was looked up for a text takes places too (`rivals.py`): what is not among the best of both is not looked at.

Texts that grow together share a budget: the best nodes of all their trees are kept, of each tree at most its size.
Without shares the budget leaves room for all trees at their size, and each is what it would be alone. With
them a layer, which is one draft call for all, follows where it pays for all of them together.

Chosen children are a function of the context, so any shape is lossless with membership. Coupled children are one
of the context and the text's noise: then the text is a function of both alone, and any tree is.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from edgespec.draft.distributions import Distributions, look_at
from edgespec.draft.lookup import LookedUp
from edgespec.grow.children import best_children
from edgespec.grow.growing import DraftRequest, Drawn, GrowingTrees
from edgespec.grow.rivals import Rivals
from edgespec.grow.selection import Selection, rank_within
from edgespec.sampling.noise import TextNoise
from edgespec.to_device import on_device
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree

# The growth of trees of several texts: it requests the distributions after nodes of some texts again and again
GrowthTogether: TypeAlias = Generator[dict[int, DraftRequest], dict[int, Distributions], list[TokenTree]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The candidates below k nodes of all texts, c each, and their features."""

    depth: int  # 1 is below the root
    q_drawn: Tensor  # [k, c], their q, or q' under the noise
    read: Sequence[Tensor]  # what the rule read of q: [k, ...] each
    values: Tensor  # [k], scores of their parents
    path_probability: Tensor  # [k, c], the product of q along the path, the token included
    temperature: Tensor  # [k], of their texts' target


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamRule:
    """The rule of a policy of chosen children. Texts of equal rules grow together."""

    score: Callable[[Candidates], Tensor]  # [k, c]
    read: Callable[[Drawn], tuple[Tensor, ...]] = lambda _drawn: ()  # what it needs to know of q, which is not kept
    num_candidates: int = 0  # that the score reads together; the first of them may become children
    layer_nodes: int | None = None  # most candidates kept of a text's layer
    layer_expanded: int | None = None  # most of them expanded
    stop_depths: frozenset[int] = frozenset()  # where the scores of those that may be expanded decide on the next layer
    stop_log_score: float = 0.0  # the least log of their sum that lets it follow


def by_path_probability(candidates: Candidates) -> Tensor:
    """Return the product of q along the path, the token included: [k, c]."""
    return candidates.path_probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """What a text's tree is to be: the candidates of largest score."""

    root: int
    rule: BeamRule
    draw: Draw
    size: int  # most nodes below the root
    share: int | None = None  # that the text adds to the budget of all trees; None: its size, and it stops by itself
    depth: int  # most layers below the root
    device: torch.device
    max_children: int | None = None  # of a node; None: as many as the tree may have nodes
    threshold: float = 0.0  # least score of a node
    stop_gain: float = 0.0  # no layer follows one that adds less to the sum of the tree's scores
    temperature: float = 0.0  # of the target
    noise: TextNoise | None = None  # of coupled children; at temperature 0 they have none
    keeps_draft_probs: bool = False
    rivals: Sequence[LookedUp] = ()  # that take places of its size

    @property
    def group(self) -> tuple[object, ...]:
        """What texts have in common that grow together; those that share a budget do so among themselves."""
        return self.rule, self.draw, self.device, self.keeps_draft_probs, self.share is None


class _Limits:
    """The settings in which the trees of a group differ."""

    def __init__(self, beams: Sequence[Beam], widths: Sequence[int], *, like: Tensor) -> None:
        device, dtype = like.device, like.dtype
        of_nodes = [[beam.threshold, beam.temperature, width] for beam, width in zip(beams, widths, strict=True)]
        self.of_nodes = on_device(of_nodes, device, dtype)  # [t, 3]
        self.has_stop_gain = any(beam.stop_gain > 0 for beam in beams)
        # Sums differ by rounding where nothing is gained: there is no limit of 0.
        self.stop_gain = on_device([beam.stop_gain or -torch.inf for beam in beams], device, dtype)  # [t]
        self.depth = on_device([beam.depth for beam in beams], device, dtype)  # [t]


def grow_beams(beams: Sequence[Beam]) -> GrowthTogether:  # noqa: C901 -- branches are rules of trees
    """Grow the trees of a group of texts.

    Nodes are numbered layer by layer, siblings from the most probable down.
    """
    rule, num_texts = beams[0].rule, len(beams)
    budget = sum(beam.size if beam.share is None else beam.share for beam in beams)
    sizes = [min(beam.size, budget) for beam in beams]
    widths = [beam.max_children or size for beam, size in zip(beams, sizes, strict=True)]
    count = max(rule.num_candidates, *widths)
    least_depth, most_depth = min(beam.depth for beam in beams), max(beam.depth for beam in beams)
    trees = GrowingTrees(
        [beam.root for beam in beams], device=beams[0].device, keeps_draft_probs=beams[0].keeps_draft_probs
    )
    expanded = None  # of the layer added last; None: all

    for depth in range(1, most_depth + 1):
        drawn, q_drawn, *read = _look(trees, (yield trees.ask(expanded)), beams, count=count, depth=depth)
        if depth == 1:
            limits = _Limits(beams, widths, like=q_drawn)
            rivals = Rivals([beam.rivals for beam in beams], like=q_drawn) if any(b.rivals for b in beams) else None
            places = None if rivals is None else (rivals.scores, rivals.texts)
            selection = Selection(sizes, budget, like=q_drawn, rivals=places)
            values = path_probability = q_drawn.new_ones(num_texts)  # of the nodes expanded last: [k]
        threshold, temperature, width = limits.of_nodes[trees.texts].T  # [k] each
        path_probability = path_probability[:, None] * q_drawn  # [k, c]
        if rivals is not None:
            rival_of = rivals.among(drawn)  # [k, c]
            by_rivals = rivals.chances(rival_of)
            path_probability = torch.maximum(path_probability, by_rivals)
        candidates = Candidates(
            depth=depth,
            q_drawn=q_drawn,
            read=read,
            values=values,
            path_probability=path_probability,
            temperature=temperature,
        )
        score = rule.score(candidates)
        if rivals is not None:
            score = torch.maximum(score, by_rivals)
        score = torch.minimum(score, values[:, None])
        is_candidate = (q_drawn > 0) & (score >= threshold[:, None])
        if min(widths) < count:
            is_candidate &= torch.arange(q_drawn.shape[1], device=score.device) < width[:, None]
        if depth not in rule.stop_depths:  # there candidates that cannot be selected count in the sum of the beam
            is_candidate &= score > selection.least[trees.texts, None]
        # The host waits here for the layer's width; a layer also has the next nonzero() and the widths of texts.
        row, rank = is_candidate.nonzero(as_tuple=True)
        if row.shape[0] == 0:
            break
        trees.add(row, rank, drawn[row, rank])
        scores, texts = score[row, rank], trees.texts[row]  # [j]
        if rule.layer_nodes is not None:
            scores = torch.where(rank_within(scores, texts, num_texts) < rule.layer_nodes, scores, 0)
        if rivals is not None:
            selection.withdraw(rival_of[row, rank])
        selection.add(scores, texts)
        if depth == most_depth:
            break
        most_below = scores if rivals is None else scores * rivals.left(rival_of[row, rank])
        is_expanded = most_below > selection.least[texts]
        if rule.layer_expanded is not None:
            is_beam = rank_within(scores, texts, num_texts) < rule.layer_expanded
            is_expanded &= is_beam
            if depth in rule.stop_depths:
                beam_scores = torch.zeros_like(limits.depth).index_add(0, texts, scores * is_beam)  # [t]
                is_expanded &= (beam_scores.log() >= rule.stop_log_score)[texts]
        if limits.has_stop_gain and beams[0].share is not None:  # a layer is one draft call for all
            is_expanded &= selection.gain_of_all() >= sum(beam.stop_gain for beam in beams)
        elif limits.has_stop_gain:
            is_expanded &= (selection.gains() >= limits.stop_gain)[texts]
        if depth >= least_depth:
            is_expanded &= (limits.depth > depth)[texts]
        (expanded,) = is_expanded.nonzero(as_tuple=True)
        if expanded.shape[0] == 0:
            break
        if rivals is not None:
            rivals.expand(rival_of[row, rank][expanded])
        values, path_probability = scores[expanded], path_probability[row, rank][expanded]

    return trees.all_finished(beams[0].draw, selection.selected(), scores=selection.scores)


def _look(
    trees: GrowingTrees, found: Mapping[int, Distributions], beams: Sequence[Beam], *, count: int, depth: int
) -> tuple[Tensor, ...]:
    """Return the `count` best children below each node, what they are valued by, and what the rule reads: [k, ...].

    Nothing else is kept of q: two layers of it would be the peak.
    """
    trees.keep(found)
    parts = []
    for text, q in found.items():
        noise = beams[text].noise
        look = partial(_read, rule=beams[text].rule, count=count, noise=None if noise is None else noise.below(depth))
        parts.append(look_at(q, look, at_q_alone=True))
    return parts[0] if len(parts) == 1 else tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _read(q: Tensor, _rows: slice, *, rule: BeamRule, count: int, noise: Tensor | None) -> tuple[Tensor, ...]:
    drawn, q_drawn = best_children(q, count, noise)
    return drawn, q_drawn, *rule.read(Drawn(draft_q=q, noise=noise, drawn=drawn, q_drawn=q_drawn))
