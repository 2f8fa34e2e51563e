"""A tree of what the draft grew and of what was looked up: the best nodes of both, each token once below a parent."""

import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from edgespec.config import SamplingSettings
from edgespec.decode.loop import decode
from edgespec.draft.lookup import LookedUp
from edgespec.grow.merged import merged
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.lookup_choice import LookupSource
from tests.edgespec.grow.tables import session_of, table_logits
from tests.edgespec.verify.test_walks import random_tree


def drafted_tree(seed: int, nodes: int) -> TokenTree:
    """A tree of random tokens and chances."""
    tree = random_tree(torch.Generator().manual_seed(seed), nodes=nodes, vocab=5)
    scores = [float("inf")]
    for node in range(1, nodes):
        parent = int(tree.parents[node])
        scores.append((1.0 if parent == 0 else scores[parent]) * random.Random(seed + node).uniform(0.05, 0.4))
    return TokenTree(
        tokens=tree.tokens, parents=tree.parents, ranks=tree.ranks, draw="coupled",
        draft_rows=torch.arange(nodes), scores=torch.tensor(scores),
    )  # fmt: skip


def random_candidates(seed: int, count: int) -> list[LookedUp]:
    rng, found = random.Random(seed), list[LookedUp]()
    while len(found) < count:
        parent = rng.randrange(-1, len(found))
        token = rng.randrange(5)
        if any(one.parent == parent and one.token == token for one in found):
            continue
        chance, layer = (1.0, 0) if parent < 0 else (found[parent].chance, found[parent].layer)
        found.append(LookedUp(parent, token, chance * rng.uniform(0.05, 0.4), layer + 1))
    return found


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        found.append((*found[parent], token))
    return found


def paths_looked_up(found: list[LookedUp]) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = []
    for one in found:
        places.append((*(() if one.parent < 0 else places[one.parent]), one.token))
    return places


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_of_both_are_a_tree_of_distinct_siblings(seed: int) -> None:
    drafted, looked_up = drafted_tree(seed, 9), random_candidates(seed, 9)
    size = 3 + seed % 9
    whole = merged(drafted, looked_up, lambda chances, _: len(chances))
    tree = merged(drafted, looked_up, lambda chances, _: min(size, len(chances)))
    assert set(paths(whole)[1:]) == {*paths(drafted)[1:], *paths_looked_up(looked_up)}
    assert len(set(paths(tree))) == tree.num_nodes == min(size, whole.num_nodes - 1) + 1
    assert sorted(tree.scores.tolist()) == sorted(whole.scores.tolist())[-tree.num_nodes :]
    parents = tree.parents.tolist()
    assert parents[0] == -1
    assert all(parent < node for node, parent in enumerate(parents))
    layers = [len(path) for path in paths(tree)]
    assert layers == sorted(layers)
    seen: dict[int, list[float]] = {}
    for parent, rank, score in zip(parents[1:], tree.ranks.tolist()[1:], tree.scores.tolist()[1:], strict=True):
        below = seen.setdefault(parent, [])
        assert rank == len(below)
        below.append(score)
        assert below == sorted(below, reverse=True)


@pytest.mark.parametrize("seed", range(6))
def test_the_drafts_nodes_keep_their_rows_and_those_of_the_text_alone_are_marked(seed: int) -> None:
    drafted, looked_up = drafted_tree(seed, 9), random_candidates(seed, 9)
    tree = merged(drafted, looked_up, lambda chances, _: len(chances))
    rows = dict(zip(paths(drafted), drafted.draft_rows.tolist(), strict=True))
    assert tree.looked_up is not None
    for path, row, is_looked_up in zip(paths(tree), tree.draft_rows.tolist(), tree.looked_up, strict=True):
        assert row == rows.get(path, -1)
        assert is_looked_up == (path not in rows)


def test_a_token_that_both_propose_has_the_larger_chance_and_siblings_share_what_there_is() -> None:
    drafted = TokenTree(
        tokens=torch.tensor([0, 1, 2]), parents=torch.tensor([-1, 0, 0]), ranks=torch.tensor([0, 0, 1]),
        draw="coupled", draft_rows=torch.tensor([0, -1, -1]), scores=torch.tensor([torch.inf, 0.6, 0.3]),
    )  # fmt: skip
    tree = merged(drafted, [LookedUp(-1, 2, 0.9, 1), LookedUp(0, 3, 0.45, 2)], lambda chances, _: len(chances))
    assert tree.tokens.tolist() == [0, 2, 1, 3]
    assert tree.scores[1:].tolist() == pytest.approx([0.6, 0.4, 0.3])


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("policy", ["lookup", "adaptive", "opt-tree", "sequoia", "chain"])
def test_a_text_with_looked_up_tokens_is_plain_decodings(policy: str, temperature: float) -> None:
    """The target goes by the last token alone, so that its texts repeat; the draft is like it, or not at all."""
    sampling = SamplingSettings(temperature=temperature)
    texts, num_looked_up = [], 0
    size = {POLICIES[policy].budget: 6} if POLICIES[policy].budget else {}
    for tree in (TreeSettings(policy="none"), TreeSettings(policy=policy, draw="coupled", **size)):
        for likeness in (0.0, 0.8):
            sequence = session_of(
                tree, sampling, target=lambda text: table_logits(5, text[-1:]),
                draft=lambda text, likeness=likeness: likeness * table_logits(5, text[-1:]) + 1.0,
                max_new_tokens=40, lookup=LookupSource(),
            )  # fmt: skip
            steps = list(decode(sequence, [1, 2, 3]))
            texts.append([token for step in steps for token in step.tokens])
            num_looked_up += sum(step.num_looked_up for step in steps)
    assert texts == [texts[0]] * 4
    assert num_looked_up > 3


def _taken(most: int, chances: Sequence[float], _num_drafted: int) -> int:
    return min(most, len(chances))


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_is_the_path_of_most_expected_tokens(seed: int) -> None:
    """The tokens of the best path of the merged tree, and no others; as many of them as are to be taken."""
    tree, found = drafted_tree(seed, nodes=6), random_candidates(seed, count=12)
    whole = merged(tree, found, partial(_taken, 100))
    scores = dict(zip(paths(whole), whole.scores.tolist(), strict=True))
    expected = {path: sum(scores[path[:end]] for end in range(1, len(path) + 1)) for path in scores}
    best = max(expected, key=lambda path: expected[path])
    for most in (1, 2, len(best)):
        chain = merged(tree, found, partial(_taken, most), is_chain=True)
        assert paths(chain)[-1] == best[:most]
        assert chain.parents.tolist() == [*range(-1, min(most, len(best)))]
