"""The contract: whatever the draft proposes, texts have the target's own distribution; what has not, is caught.

Every policy with every rule that it may use, in one situation each. 500 texts let the planted faults fall below 1e-4,
which a right policy does with that probability (the seeds are fixed). Fewer texts serve where a fault shows sooner:
coupled texts must equal plain decoding's too, chosen ones are far off where they are wrong, and heads' q is tested
elsewhere. With 1,000 texts the faults fall below 1e-6. scripts/check/lossless.py runs all situations with more.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from edgespec.config import SamplingSettings
from edgespec.grow import best_first, policies
from edgespec.grow.growing import GrowthAlone
from edgespec.grow.policies import open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling import noise
from edgespec.sampling.draws import draw_without_replacement
from edgespec.tree.policies import POLICIES, Draw
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree, depths
from edgespec.verify import Verification, rejection, rules
from edgespec.verify.rejection import verify_rejection
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import Verify
from edgespec.verify.walk import verify_membership
from tests.support import lossless
from tests.support.lossless import (
    GAPS,
    SITUATIONS,
    Form,
    Situation,
    TableDrafter,
    compare,
    forms,
    is_greedy,
    law_p_value,
    total_variation,
    try_children_by_difference,
    verify_by_noise_of_another_position,
)

TEXTS = 500
TEXTS_OF = {"sampled": TEXTS, "chosen": 250, "coupled": 100}
EQUAL_TEXTS = 50  # of coupled trees, and of heads
FAULTY_TEXTS = 1_000
with tempfile.TemporaryDirectory() as _folder:
    FORMS = list(forms(Path(_folder)))
PLAIN = Situation(sampling=SamplingSettings(temperature=1.0))
DYSPEC = Form(settings=TreeSettings(policy="dyspec", size=6, depth=3))
ADAPTIVE = Form(settings=TreeSettings(policy="adaptive", size=6, depth=3))
SEQUOIA = Form(settings=TreeSettings(policy="sequoia", draw="sampled", size=6, depth=3, max_children=3))
SPECINFER = Form(settings=TreeSettings(policy="specinfer", branching=(2, 2, 1)))
CHOSEN = Form(settings=TreeSettings(policy="opt-tree", draw="chosen", size=6, depth=3))


def test_every_policy_has_a_form() -> None:
    assert {name.split(", ")[-1].split()[0] for name in FORMS} == {*POLICIES} - {"none"}


@pytest.mark.parametrize(("index", "form"), list(enumerate(FORMS)), ids=FORMS)
def test_texts_have_the_targets_distribution(index: int, form: str, tmp_path: Path) -> None:
    found = forms(tmp_path)[form]
    # Eleven is prime to the number of situations: neighbours differ in kind, and all have their turn.
    situations = list((SITUATIONS if found.head else SITUATIONS | GAPS).values())
    assert_lossless(found, situations[11 * index % len(situations)])


def assert_lossless(form: Form, situation: Situation) -> None:
    draw = open_policy(form.settings).draw
    seen = compare(form, situation, count=EQUAL_TEXTS if form.head or draw == "coupled" else TEXTS_OF[draw])
    assert seen.p_value > 1e-4
    assert seen.num_different == 0


def p_value(form: Form, situation: Situation, *, count: int) -> float:
    return compare(form, situation, count=count).p_value


@pytest.mark.parametrize("form", [DYSPEC, CHOSEN, ADAPTIVE])
def test_truncation_that_draft_and_target_do_not_share_is_lossless(form: Form) -> None:
    assert_lossless(form, SITUATIONS["temperature 0.7, top-p 0.9"])


@pytest.mark.parametrize("name", ["specinfer stop sampled", "chain stop coupled", "chain classifier sampled"])
def test_what_ends_growth_does_so_at_some_nodes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its cell would say nothing."""
    right, is_whole = policies.grow_static, set()

    def grow_static(*arguments: Any, **named: Any) -> GrowthAlone:
        tree = yield from right(*arguments, **named)
        could_reach = min(named["depth"], named["shape"].depth)
        if could_reach > 1:  # below the first layer there is something to end
            is_whole.add(int(depths(tree.parents).max()) == could_reach)
        return tree

    monkeypatch.setattr(policies, "grow_static", grow_static)
    p_value(forms(tmp_path)[name], PLAIN, count=50)
    assert is_whole == {True, False}


@pytest.mark.parametrize("form", FORMS)
def test_greedy_texts_are_the_targets_token_by_token(form: str, tmp_path: Path) -> None:
    found = forms(tmp_path)[form]
    assert is_greedy(found, count=3 if found.head else 4)


@pytest.mark.parametrize("form", [SPECINFER, SEQUOIA])
def test_a_remaining_mass_that_is_a_difference_is_caught(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, behind a draft that is sure by 20 nats, such a difference is rounding error."""
    situation = GAPS["draft gap 20"]
    assert p_value(form, situation, count=TEXTS) > 1e-4
    monkeypatch.setattr(rejection, "_try_children", try_children_by_difference)
    assert p_value(form, situation, count=TEXTS) < 1e-6


def test_pruning_sampled_children_by_a_nodes_own_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = best_first._slot_values

    def by_value(*arguments: Any) -> tuple[Tensor, Tensor]:
        _, child_values = right(*arguments)
        return child_values, child_values

    monkeypatch.setattr(best_first, "_slot_values", by_value)
    assert p_value(DYSPEC, PLAIN, count=FAULTY_TEXTS) < 1e-6


def test_verifying_with_q_before_its_truncation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection._try_children

    def untruncated(p: Tensor, q: Tensor | None, *arguments: Any) -> tuple[int | None, Tensor]:
        return right(p, None if q is None else (q + 0.1) / (q + 0.1).sum(), *arguments)

    monkeypatch.setattr(rejection, "_try_children", untruncated)
    assert p_value(DYSPEC, SITUATIONS["temperature 1.0, top-p 0.9"], count=FAULTY_TEXTS) < 1e-6


def test_drawing_the_bonus_from_p_instead_of_the_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection._try_children

    def no_residual(p: Tensor, *arguments: Any) -> tuple[int | None, Tensor]:
        return right(p, *arguments)[0], p

    monkeypatch.setattr(rejection, "_try_children", no_residual)
    assert p_value(DYSPEC, PLAIN, count=TEXTS) < 1e-6


def as_if(draw: Draw, verify: Verify) -> Verify:
    """The rule without its refusal of other draws."""
    return lambda tree, rows, generator: verify(dataclasses.replace(tree, draw=draw), rows, generator)


def test_rejection_of_chosen_children_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it is refused: q is not what chosen children were drawn from."""
    monkeypatch.setattr(lossless, "TextDraws", partial(TextDraws, keeps_draft_probs=True))
    monkeypatch.setattr(rules, "verify_membership", as_if("sampled", verify_rejection))
    assert p_value(CHOSEN, PLAIN, count=TEXTS) < 1e-6


def test_membership_of_sampled_children_is_unbiased_and_accepts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused for what it wastes: whatever the tree's tokens are, the draw had no part in them."""
    lengths: dict[str, list[int]] = {"membership": [], "rejection": []}

    def counted(name: str, verify: Verify) -> Verify:
        def verify_and_count(tree: TokenTree, rows: TargetRows, generator: Generator) -> Verification:
            acceptance = yield from verify(tree, rows, generator)
            lengths[name].append(len(acceptance.path))
            return acceptance

        return verify_and_count

    for name, verify in (("membership", as_if("chosen", verify_membership)), ("rejection", verify_rejection)):
        monkeypatch.setattr(rules, "verify_rejection", counted(name, verify))
        assert p_value(DYSPEC, PLAIN, count=TEXTS_OF["chosen"]) > 1e-4
    mean = {name: sum(found) / len(found) for name, found in lengths.items()}
    assert mean["rejection"] > 1.05 * mean["membership"], mean


def test_membership_that_reads_another_nodes_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TargetRows.probs
    monkeypatch.setattr(TargetRows, "probs", lambda self, _node: right(self, 0))
    assert p_value(CHOSEN, PLAIN, count=TEXTS) < 1e-6


def test_noise_that_is_used_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, begin = [0], TableDrafter.begin

    def count_texts(self: TableDrafter, ids: Sequence[int]) -> None:
        texts[0] += 1
        begin(self, ids)

    def same_noise(q: Tensor, count: int, _generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return draw_without_replacement(q, count, torch.Generator().manual_seed(texts[0]))

    monkeypatch.setattr(TableDrafter, "begin", count_texts)
    monkeypatch.setattr(best_first, "draw_without_replacement", same_noise)
    assert p_value(DYSPEC, PLAIN, count=FAULTY_TEXTS) < 1e-6


def test_trees_that_are_walked_by_the_noise_of_another_position_give_other_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "verify_coupled", verify_by_noise_of_another_position)
    assert compare(ADAPTIVE, PLAIN, count=TEXTS_OF["coupled"]).num_different > 0


def test_noise_that_does_not_know_its_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees and plain decoding agree, and both are wrong."""
    right = noise.exponential_noise
    monkeypatch.setattr(noise, "exponential_noise", lambda seed, key, _position, vocab: right(seed, key, 0, vocab))
    seen = compare(ADAPTIVE, PLAIN, count=TEXTS_OF["coupled"])
    assert seen.num_different == 0
    assert seen.p_value < 1e-6


def test_several_branches_of_the_target_are_lossy_and_one_is_not() -> None:
    """Sixteen outcomes: of 500 right texts the distance is 0.06, all of it chance."""
    assert total_variation(width=1, count=500) < 0.08
    assert total_variation(width=3, count=250) > 0.3


def test_rare_outcomes_are_counted_together_and_impossible_ones_are_refused() -> None:
    probs = {"often": 0.999, "rare": 0.0009, "rarer": 0.0001, "never": 0.0}
    usual = {"often": 999, "rare": 1, "rarer": 0, "never": 0}
    assert law_p_value(usual, probs) > 0.5
    assert law_p_value({**usual, "rare": 4, "rarer": 5}, probs) < 1e-5
    assert law_p_value({**usual, "often": 998, "never": 1}, probs) == 0
