"""The contract: what comes out has the target's own distribution, whatever the draft proposes.

Texts of three tokens from a vocabulary of four, both models tables of random logits in float32
that disagree; the first token comes from the prompt's pass, the others through trees. Chi-square
over the 64 outcomes, 63 degrees of freedom. A right version fails with probability 1 in 1,000 (the
seed is fixed); the wrong versions planted below fall under 1e-6. Their smallest biases are those of sampled
children, which 1,600 texts tell; of chosen ones 500 do. Coupled texts equal plain decoding's besides, and need 300.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.decode.loop import decode
from edgespec.decode.sequence import Sequence, TextSettings
from edgespec.grow import Growth, best_first
from edgespec.grow.beam import Beam
from edgespec.grow.best_first import grow_best_first
from edgespec.grow.dyspec import predict_slots
from edgespec.grow.opt_tree import OPT_TREE_RULE
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import TextNoise
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree, root_only
from edgespec.verify import Verification, rejection
from edgespec.verify.rejection import verify_rejection
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import Verify
from edgespec.verify.walk import verify_coupled, verify_membership
from scripts.check.lossless import PROMPT_IDS, VOCAB, TableDrafter, TableTarget, distributions, table

NUM_TOKENS = 3
SAMPLED_TEXTS, CHOSEN_TEXTS, COUPLED_TEXTS = 1_600, 500, 300
Path = tuple[int, ...]


TARGET_LOGITS = table(1, NUM_TOKENS + 1, torch.float32)
DRAFT_LOGITS = table(2, NUM_TOKENS + 1, torch.float32)

CPU = torch.device("cpu")
GrowTree = Callable[[int, int, torch.Generator, TextNoise], Growth]


def grow_sampled(root: int, max_depth: int, generator: torch.Generator, noise: TextNoise) -> Growth:
    return grow_best_first(
        root,
        predict=predict_slots,
        size=5,
        depth=min(3, max_depth),
        threshold=0.0,
        max_children=3,
        draws=TextDraws(sampling=SamplingSettings(), device=CPU, generator=generator, noise=noise),
    )


def grow_chosen(root: int, max_depth: int, _generator: torch.Generator, _noise: TextNoise, **others: Any) -> Growth:
    return Beam(
        root=root,
        rule=OPT_TREE_RULE,
        size=5,
        depth=min(3, max_depth),
        max_children=3,
        device=CPU,
        keeps_draft_probs=True,
        **{"draw": "chosen", **others},
    )


def grow_coupled(root: int, max_depth: int, generator: torch.Generator, noise: TextNoise) -> Growth:
    return grow_chosen(root, max_depth, generator, noise, draw="coupled", noise=noise)


def grow_nothing(root: int, _depth: int, _generator: torch.Generator, _noise: TextNoise) -> Growth:
    return root_only(root, draw="coupled", device=CPU)


VerifyTree = Callable[[TokenTree, TargetRows, torch.Generator, TextNoise], Verification]


def texts(
    sampling: SamplingSettings, draft_sampling: SamplingSettings, *, count: int, grow_tree: GrowTree, verify: VerifyTree
) -> list[Path]:
    """Texts through these trees, or plainly."""
    target = TableTarget(TARGET_LOGITS, sampling)
    drafter = TableDrafter(distributions(DRAFT_LOGITS, draft_sampling))
    # One more than is looked at: a tree that ended with the text would have no second layer.
    settings = TextSettings(sampling=sampling, max_new_tokens=NUM_TOKENS + 1)
    generator = torch.Generator().manual_seed(11)

    found = []
    for key in range(count):
        noise = TextNoise(seed=11, key=key, vocab=VOCAB, device=CPU)

        def steps(root: int, max_depth: int, noise: TextNoise = noise) -> Growth:
            return grow_tree(root, max_depth, generator, noise)

        def verify_tree(
            tree: TokenTree, rows: TargetRows, generator: torch.Generator, noise: TextNoise = noise
        ) -> Verification:
            return verify(tree, rows, generator, noise)

        sequence = Sequence(
            target=target,  # type: ignore[arg-type]
            drafter=drafter,
            settings=settings,
            generator=generator,
            noise=noise,
            draws_coupled=grow_tree in (grow_coupled, grow_nothing),
            grow=steps,
            verify=verify_tree,
        )
        steps = decode(sequence, PROMPT_IDS)
        found.append(tuple(token for step in steps for token in step.tokens)[:NUM_TOKENS])
    return found


def law_p_value(sampling: SamplingSettings, found: list[Path]) -> float:
    """The chi-square p-value of the texts' distribution against the target's."""
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=NUM_TOKENS), 0)
    for text in found:
        counts[text] += 1
    expected = {}
    for path in counts:
        p = [to_probs(TARGET_LOGITS[path[:index]][None], sampling)[0] for index in range(NUM_TOKENS)]
        expected[path] = len(found) * float(torch.stack([p[i][path[i]] for i in range(NUM_TOKENS)]).prod())
    possible = [path for path in counts if expected[path] > 0]
    assert sum(counts[path] for path in possible) == len(found), "a token of no probability came out"
    observed = [counts[path] for path in possible]
    return float(stats.chisquare(observed, [expected[path] for path in possible], sum_check=False).pvalue)


PLAIN = SamplingSettings(temperature=1.0)
OTHER_DRAFT = (
    (PLAIN, PLAIN),
    (SamplingSettings(temperature=0.7, top_p=0.9), SamplingSettings(temperature=0.6, top_k=2)),
)


def without_noise(verify: Verify) -> VerifyTree:
    return lambda tree, rows, generator, _noise: verify(tree, rows, generator)


def with_noise(tree: TokenTree, rows: TargetRows, _generator: torch.Generator, noise: TextNoise) -> Verification:
    return verify_coupled(tree, rows, noise)


def outcome_p_value(
    sampling: SamplingSettings,
    draft_sampling: SamplingSettings,
    *,
    count: int = SAMPLED_TEXTS,
    grow_tree: GrowTree = grow_sampled,
    verify: Verify = verify_rejection,
) -> float:
    found = texts(sampling, draft_sampling, count=count, grow_tree=grow_tree, verify=without_noise(verify))
    return law_p_value(sampling, found)


RULES: dict[str, tuple[int, GrowTree, Verify]] = {
    "sampled-rejection": (SAMPLED_TEXTS, grow_sampled, verify_rejection),
    "chosen-membership": (CHOSEN_TEXTS, grow_chosen, verify_membership),
}


@pytest.mark.parametrize(("sampling", "draft_sampling"), OTHER_DRAFT, ids=["plain", "truncated"])
@pytest.mark.parametrize("rule", RULES)
def test_texts_through_trees_have_the_targets_distribution(
    rule: str, sampling: SamplingSettings, draft_sampling: SamplingSettings
) -> None:
    count, grow_tree, verify = RULES[rule]
    assert outcome_p_value(sampling, draft_sampling, count=count, grow_tree=grow_tree, verify=verify) > 1e-3


@pytest.mark.parametrize(("sampling", "draft_sampling"), OTHER_DRAFT, ids=["plain", "truncated"])
def test_coupled_texts_are_plain_decodings_and_have_the_targets_distribution(
    sampling: SamplingSettings, draft_sampling: SamplingSettings
) -> None:
    found, plain = (
        texts(sampling, draft_sampling, count=COUPLED_TEXTS, grow_tree=grow_tree, verify=with_noise)
        for grow_tree in (grow_coupled, grow_nothing)
    )
    assert found == plain
    assert law_p_value(sampling, found) > 1e-3


def test_selecting_nodes_by_their_own_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = best_first._slot_values

    def by_value(*arguments: Any) -> tuple[Tensor, Tensor]:
        _, child_values = right(*arguments)
        return child_values, child_values

    monkeypatch.setattr(best_first, "_slot_values", by_value)
    assert outcome_p_value(PLAIN, PLAIN) < 1e-6


def test_verifying_with_another_q_than_was_drawn_from_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection._try_children

    def untruncated(p: Tensor, q: Tensor | None, *arguments: Any) -> tuple[int | None, Tensor]:
        return right(p, None if q is None else (q + 0.1) / (1 + 0.1 * VOCAB), *arguments)

    monkeypatch.setattr(rejection, "_try_children", untruncated)
    assert outcome_p_value(PLAIN, PLAIN) < 1e-6


def test_drawing_the_bonus_from_p_instead_of_the_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection._try_children

    def no_residual(p: Tensor, *arguments: Any) -> tuple[int | None, Tensor]:
        return right(p, *arguments)[0], p

    monkeypatch.setattr(rejection, "_try_children", no_residual)
    assert outcome_p_value(PLAIN, PLAIN) < 1e-6


def as_if(draw: Draw, verify: Verify) -> Verify:
    """The rule without its refusal of other draws."""
    return lambda tree, rows, generator: verify(dataclasses.replace(tree, draw=draw), rows, generator)


def test_rejection_of_chosen_children_is_caught() -> None:
    """Why it is refused: q is not what chosen children were drawn from."""
    verify = as_if("sampled", verify_rejection)
    assert outcome_p_value(PLAIN, PLAIN, count=CHOSEN_TEXTS, grow_tree=grow_chosen, verify=verify) < 1e-6


def test_membership_of_sampled_children_is_unbiased_and_accepts_less() -> None:
    """It is refused for what it wastes: whatever the tree's tokens are, the draw had no part in them."""
    lengths: dict[str, list[int]] = {"membership": [], "rejection": []}

    def counted(name: str, verify: Verify) -> Verify:
        def verify_and_count(tree: TokenTree, rows: TargetRows, generator: torch.Generator) -> Verification:
            acceptance = yield from verify(tree, rows, generator)
            lengths[name].append(len(acceptance.path))
            return acceptance

        return verify_and_count

    verify = counted("membership", as_if("chosen", verify_membership))
    assert outcome_p_value(PLAIN, PLAIN, count=CHOSEN_TEXTS, verify=verify) > 1e-3
    outcome_p_value(PLAIN, PLAIN, count=CHOSEN_TEXTS, verify=counted("rejection", verify_rejection))
    mean = {name: sum(found) / len(found) for name, found in lengths.items()}
    assert mean["rejection"] > 1.05 * mean["membership"], mean


def test_membership_that_reads_another_nodes_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TargetRows.probs
    monkeypatch.setattr(TargetRows, "probs", lambda self, _node: right(self, 0))
    found = outcome_p_value(PLAIN, PLAIN, count=CHOSEN_TEXTS, grow_tree=grow_chosen, verify=verify_membership)
    assert found < 1e-6
