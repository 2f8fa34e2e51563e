"""Coupled texts: those of plain decoding token by token, whatever tree grows; and a like draft is always right."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.config import SamplingSettings
from edgespec.decode.loop import decode
from edgespec.decode.sequence import Sequence
from edgespec.grow import Growth
from edgespec.grow.batched import grown
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import exponential_noise
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Verification
from tests.edgespec.grow.tables import VOCAB, draft_logits, session_of, table_logits, target_logits
from tests.edgespec.verify.test_walks import random_tree
from tests.support.node_order import reordered

NUM_TOKENS = 20
COUPLED = [name for name, policy in POLICIES.items() if "coupled" in policy.draws]
TRUNCATIONS: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.15}, {"top_k": 6, "top_p": 0.9}]


def plain_text(target: int, sampling: SamplingSettings, prompt: list[int], *, seed: int, key: int) -> list[int]:
    """What the definition says: at each position the argmax of log p and the Gumbel noise that stands there."""
    text = list(prompt)
    for _ in range(NUM_TOKENS):
        log_p = to_probs(table_logits(target, tuple(text))[None], sampling)[0].log()
        gumbel = -exponential_noise(seed, key, len(text), VOCAB).log()
        text.append(int((log_p + (gumbel if sampling.temperature > 0 else 0)).argmax()))
    return text[len(prompt) :]


def text_of(sequence: Sequence, prompt: list[int]) -> list[int]:
    return [token for step in decode(sequence, prompt) for token in step.tokens]


@pytest.fixture(scope="module")
def tree_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees") / "tree.json"
    path.write_text(json.dumps([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [2, 0, 0]]))
    return path


def settings_of(name: str, size: int, depth: int, tree_file: Path) -> TreeSettings:
    """Coupled trees of a policy, of about that size."""
    policy = POLICIES[name]
    values: dict[str, Any] = {"policy": name, "draw": "coupled"}
    values |= {} if policy.budget is None else {policy.budget: size}
    values |= {"depth": depth} if policy.uses("depth") else {}
    values |= {"branching": (1 + size % 5, 2, 1, 1)[:depth]} if policy.uses("branching") else {}
    values |= {"tree_file": tree_file} if policy.uses("tree_file") else {}
    return TreeSettings(**values)


sampling_settings = st.builds(
    lambda temperature, truncation: SamplingSettings(temperature=temperature, **truncation),
    st.just(0.0) | st.floats(0.3, 1.5),
    st.sampled_from(TRUNCATIONS),
)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(COUPLED),
    size=st.integers(1, 64),
    depth=st.integers(1, 8),
    sampling=sampling_settings,
    seed=st.integers(0, 2**63 - 1),
    key=st.integers(0, 2**64 - 1),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    likeness=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_a_text_is_plain_decodings_whatever_the_policy_its_size_and_its_draft(
    tree_file: Path, name: str, size: int, depth: int, sampling: SamplingSettings, seed: int, key: int,
    prompt: list[int], likeness: float,
) -> None:  # fmt: skip
    tables = seed % 1000
    sequence = session_of(
        settings_of(name, size, depth, tree_file), sampling, target=target_logits(tables),
        draft=draft_logits(tables, likeness=likeness), max_new_tokens=NUM_TOKENS, seed=seed, key=key,
    )  # fmt: skip
    assert text_of(sequence, prompt) == plain_text(tables, sampling, prompt, seed=seed, key=key)


def in_another_order(tree: TokenTree, generator: torch.Generator) -> TokenTree:
    """The same tree: parents before their children, and nothing else as it was."""
    keys = torch.rand(tree.num_nodes, generator=generator)
    keys[0] = 0
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        keys[node] += keys[parent]
    return reordered(tree, keys.argsort())


def of_any_tokens(tree: TokenTree, generator: torch.Generator) -> TokenTree:
    """A tree of so many nodes that nobody drew: any shape, and any tokens."""
    anything = random_tree(generator, nodes=tree.num_nodes, vocab=VOCAB)
    return replace(
        anything, tokens=torch.cat([tree.tokens[:1], anything.tokens[1:]]), draw="coupled",
        draft_rows=torch.full_like(anything.tokens, -1),
    )  # fmt: skip


def without_likely_nodes(tree: TokenTree, _generator: torch.Generator) -> TokenTree:
    """A tree that lost its best nodes: growth that looked at what it had drawn."""
    kept = (tree.ranks != 0).logical_and(tree.parents == 0).nonzero().flatten().tolist()
    return reordered(tree, torch.tensor([0])) if not kept else replace(
        tree, tokens=tree.tokens[[0, *kept]], parents=torch.tensor([-1, *[0] * len(kept)]),
        ranks=tree.ranks[[0, *kept]], draft_rows=torch.full((1 + len(kept),), -1), scores=None, ancestors=None,
    )  # fmt: skip


@pytest.mark.parametrize("change", [in_another_order, of_any_tokens, without_likely_nodes])
@pytest.mark.parametrize("sampling", [SamplingSettings(temperature=0.7, top_p=0.9), SamplingSettings(temperature=1.2)])
@pytest.mark.parametrize("seed", range(10))
def test_a_text_is_plain_decodings_whatever_becomes_of_its_trees(
    change: Callable[[TokenTree, torch.Generator], TokenTree], sampling: SamplingSettings, seed: int
) -> None:
    sequence = session_of(
        TreeSettings(policy="opt-tree", size=1 + 6 * seed, depth=5), sampling, target=target_logits(seed),
        draft=draft_logits(seed), max_new_tokens=NUM_TOKENS, seed=seed, key=3,
    )  # fmt: skip
    right, generator = sequence.grow, torch.Generator().manual_seed(seed)

    def changed(root: int, depth: int) -> Growth:
        return change(grown(right(root, depth), sequence.drafter), generator)

    sequence.grow = changed
    text = text_of(sequence, [1, 2])[:NUM_TOKENS]  # a tree of any shape may reach behind the end
    assert text == plain_text(seed, sampling, [1, 2], seed=seed, key=3)


def steps_of(tree: TreeSettings, *, seed: int, draft: Any = None, temperature: float = 1.0) -> list[Any]:
    """Steps behind a prompt, with the draft's own temperature that of the target."""
    sequence = session_of(
        replace(tree, draft_temperature=temperature), SamplingSettings(temperature=temperature),
        target=target_logits(seed), draft=draft or target_logits(seed), max_new_tokens=40, seed=seed,
    )  # fmt: skip
    return list(decode(sequence, [1, 2, 3]))[1:]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_of_a_draft_that_is_the_target_every_node_of_a_chain_is_accepted(seed: int, temperature: float) -> None:
    """Both draw with the noise of the same position: one off, and next to nothing would be accepted."""
    chain = TreeSettings(policy="chain", draw="coupled", draft_tokens=5)
    steps = steps_of(chain, seed=seed, temperature=temperature)
    assert [len(step.tokens) for step in steps[:-1]] == [6] * (len(steps) - 1)


@pytest.mark.parametrize("name", [name for name in COUPLED if name != "none"])
def test_of_a_draft_that_is_the_target_the_best_child_is_the_one_that_is_taken(name: str, tree_file: Path) -> None:
    """Every tree is left by a node that has no children, or by the last layer: never by another token."""
    seen = []
    sequence = session_of(
        replace(settings_of(name, 24, 4, tree_file), draft_temperature=0.9), SamplingSettings(temperature=0.9),
        target=target_logits(5), draft=target_logits(5), max_new_tokens=60,
    )  # fmt: skip
    right = sequence.verify

    def remember(tree: TokenTree, *arguments: Any) -> Verification:
        acceptance = yield from right(tree, *arguments)
        seen.append((tree, acceptance))
        return acceptance

    sequence.verify = remember
    text_of(sequence, [4])
    for tree, acceptance in seen:
        assert bool((tree.ranks[list(acceptance.path)] == 0).all())
        assert (acceptance.path or (0,))[-1] not in tree.parents.tolist()


def test_the_shared_noise_makes_a_draft_that_is_little_like_the_target_worth_more() -> None:
    """Of 12 texts each: with noise of its own a chosen chain is accepted by p alone."""

    def tokens_a_pass(draw: str) -> float:
        chain = TreeSettings(policy="chain", draw=draw, draft_tokens=3)
        steps = [
            step for seed in range(12) for step in steps_of(chain, seed=seed, draft=draft_logits(seed), temperature=1.2)
        ]
        return sum(len(step.tokens) for step in steps) / len(steps)

    assert tokens_a_pass("coupled") > 1.3 * tokens_a_pass("chosen")
