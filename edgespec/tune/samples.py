"""What every contender's tree yields at the same texts: grown, looked at by the target, valued exactly.

Prompts are continued by real steps, with the tree of one contender as guide, and at each step all
contenders grow their trees from the same text. The chance of each sampled or chosen node to be accepted is exact for
the target's p and the draft's q, so that few texts say much; coupled ones are accepted or not, by the text's noise,
which all of them share.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.draft.open_drafter import open_drafter
from edgespec.engine import Engine
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.batched import grown
from edgespec.grow.policies import make_grow, open_policy
from edgespec.model.target import Target
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_one
from edgespec.sampling.noise import TextNoise, generator_at
from edgespec.train.candidates import CandidateRecords, path_records
from edgespec.train.records import node_values
from edgespec.tree.policies import Draw
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree, depths, product_on_path
from edgespec.tune.entrants import Contender, rank_values
from edgespec.verify import accept_alone
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import verifier
from profiles.tuner import TreeSample

Key = tuple[str, Draw]  # policy, draw


@dataclass(slots=True)
class Samples:
    """What was seen of one temperature so far."""

    trees: dict[Key, list[TreeSample]] = field(default_factory=lambda: defaultdict(list))
    records: list[CandidateRecords] = field(default_factory=list)  # of a tree each
    prompts: list[int] = field(default_factory=list)  # that each place is behind

    @property
    def num_texts(self) -> int:
        """Count the different prompts that were continued."""
        return len(set(self.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text that is being continued: both caches hold it, the root excepted."""

    target: Target
    drafter: LanguageModelDrafter
    root: int

    def drafting(self, tree: TreeSettings, sampling: SamplingSettings) -> LanguageModelDrafter:
        """Return the drafter without a tree, set to draw as these trees do."""
        self.drafter.rewind()
        self.drafter.sampling = tree.draft_sampling(sampling)
        return self.drafter


def start_text(
    engine: Engine, ids: Sequence[int], *, sampling: SamplingSettings, tree: TreeSettings, generator: torch.Generator
) -> Text:
    """Read a prompt and draw the first token; the draft is set to draw for trees like `tree`."""
    assert engine.draft_model is not None
    target = Target(engine.target_model)
    drafter = open_drafter(engine.draft_model, target, sampling=tree.draft_sampling(sampling))
    logits = target.prefill(torch.tensor(list(ids), device=engine.device))
    drafter.begin(ids)
    root = draw_one(to_probs(logits[None], sampling)[0], generator)
    return Text(target=target, drafter=drafter, root=root)


def sample_text(
    engine: Engine,
    ids: Sequence[int],
    contenders: Sequence[Contender],
    model: AcceptanceModel,
    into: Samples,
    *,
    sampling: SamplingSettings,
    steps: int,
    seed: int,
) -> list[int]:
    """Grow and value every contender's trees at `steps` steps behind a prompt; the first contender is the guide.

    Returns the prompt with what was added to it.
    """
    temperature = sampling.temperature
    generator = generator_at(seed, 0, len(ids), engine.device)
    recorded = TreeSettings().draft_sampling(sampling)  # adaptive's: its acceptance is what records are for
    widest = max((contender.settings for contender in contenders), key=lambda settings: settings.num_drafted)
    text = start_text(engine, ids, sampling=sampling, tree=widest, generator=generator)
    noise = TextNoise(seed=seed, key=0, vocab=text.target.vocab, device=engine.device)
    noise.start(len(ids))  # the root's position
    root, added = text.root, [text.root]
    for _ in range(steps):
        # The guide comes last: its rows are then the ones in the draft's cache, which a commit keeps.
        trees = []
        drawn_from = generator.get_state()
        for contender in [*contenders[1:], contenders[0]]:
            generator.set_state(drawn_from)  # the same luck for all: differences are the policies' own
            policy = open_policy(contender.settings).with_acceptance(model)
            drafter = text.drafting(contender.settings, sampling)
            grow = make_grow(policy, drafter, sampling=sampling, device=engine.device, generator=generator,
                             noise=noise, keeps_draft_probs=True)  # fmt: skip
            trees.append((contender, grown(grow(root, contender.settings.num_layers), drafter)))
        guide = trees[-1][1]
        for group in in_groups(trees, most_nodes=engine.tree.num_nodes):
            forest, places = merged([tree for _, tree in group])
            hidden = text.target.look(forest)
            for (contender, tree), place in zip(group, places, strict=True):
                rows = TargetRows(hidden[place], text.target.logits, sampling, vocab=text.target.vocab)
                p = rows.all_probs()
                rates = rank_values(model, temperature=temperature, draw=contender.draw)
                acceptance = accept_alone(verifier(sampling, contender.draw, noise)(tree, rows, generator))
                values = path_values(tree, acceptance.path) if tree.draw == "coupled" else node_values(tree, p)
                # A tree of no nodes says something too: that this policy gives up here.
                into.trees[contender.key].append(tree_sample(tree, values, contender, rates))
                if tree.draw == "coupled" and contender.settings.draft_sampling(sampling) == recorded:
                    into.records.append(path_records(tree, p, acceptance, temperature=temperature, generator=generator))
        path = torch.tensor(acceptance.path, dtype=torch.long, device=engine.device)
        text.target.commit(tuple(place[path].tolist()))
        text.drafter.commit(root, guide.draft_rows[path].tolist(), guide.tokens[path].tolist())
        root = acceptance.next_token
        noise.advance(1 + len(acceptance.path))
        added += [*guide.tokens[path].tolist(), root]
    return [*ids, *added]


def cut_to(contenders: Sequence[Contender], samples: Samples) -> Samples:
    """Return the samples as they would be if these contenders' trees had never been larger."""
    trees = {contender.key: samples.trees[contender.key] for contender in contenders}
    for contender in contenders:
        if contender.is_nested:
            size, depth = contender.settings.size, contender.settings.depth
            trees[contender.key] = [
                tree.cut(size=size, depth=depth, threshold=-math.inf) for tree in trees[contender.key]
            ]
    return Samples(trees=defaultdict(list, trees), records=list(samples.records), prompts=list(samples.prompts))


def in_groups(
    trees: Sequence[tuple[Contender, TokenTree]], *, most_nodes: int
) -> list[list[tuple[Contender, TokenTree]]]:
    """Group the trees that are verified together: a group has at most `most_nodes` below the root, or one tree."""
    groups: list[list[tuple[Contender, TokenTree]]] = [[]]
    count = 0
    for contender, tree in trees:
        if groups[-1] and count + tree.num_nodes - 1 > most_nodes:
            groups.append([])
            count = 0
        groups[-1].append((contender, tree))
        count += tree.num_nodes - 1
    return groups


def merged(trees: Sequence[TokenTree]) -> tuple[TokenTree, list[Tensor]]:
    """Merge trees of the same root into one of all their paths; return it, and where each tree's nodes stand in it.

    What several trees share stands in it once, so that one pass over the weights verifies all of them.
    """
    first = trees[0]
    tokens, parents = [int(first.tokens[0])], [-1]
    known: dict[tuple[int, int], int] = {}
    places = []
    for tree in trees:
        place = [0]
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
            key = place[parent], token
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
            place.append(known[key])
        places.append(torch.tensor(place, device=first.tokens.device))
    forest = TokenTree(
        tokens=torch.tensor(tokens, device=first.tokens.device),
        parents=torch.tensor(parents, device=first.tokens.device),
        ranks=torch.zeros(len(tokens), dtype=torch.long, device=first.tokens.device),
        draw=first.draw,
        draft_rows=torch.full((len(tokens),), -1, device=first.tokens.device),
    )
    return forest, places


def path_values(tree: TokenTree, path: tuple[int, ...]) -> Tensor:
    """Return V [n] of coupled nodes: 1 along the path that the text takes, and 0 elsewhere."""
    values = torch.zeros(tree.num_nodes, dtype=torch.float64, device=tree.tokens.device)
    values[[0, *path]] = 1.0
    return values


def tree_sample(tree: TokenTree, values: Tensor, contender: Contender, rates: Sequence[float]) -> TreeSample:
    """Return a tree as the tuner sees it, for V [n] of its nodes; `rates` are the acceptance by rank of its draw."""
    return TreeSample.from_nodes(
        scores=_scores(tree, contender, rates)[1:].double().cpu().numpy(),
        values=values[1:].double().cpu().numpy(),
        depths=depths(tree.parents)[1:].cpu().numpy(),
        parents=(tree.parents[1:] - 1).cpu().numpy(),
    )


def _scores(tree: TokenTree, contender: Contender, rates: Sequence[float]) -> Tensor:
    """Return scores [n] that order the nodes: the m best are the tree of budget m."""
    if tree.scores is not None:
        return tree.scores
    if contender.settings.uses("acceptance"):
        by_rank = torch.tensor([*rates, 0.0], dtype=torch.float64, device=tree.tokens.device)
        factors = by_rank[tree.ranks.clamp(max=len(rates))].clamp(min=1e-12)
        factors[0] = 1.0
        return product_on_path(factors, tree.parents)
    return -depths(tree.parents).double()
