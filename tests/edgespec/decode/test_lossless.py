"""The contract: whatever the draft proposes, texts have the target's own distribution.

Every policy with every rule that it may use, in one situation each. Of 500 texts a right policy's fall below 1e-4 with
that probability (the seeds are fixed), and faults do. Fewer texts serve where a fault shows sooner: coupled texts must
equal plain decoding's too, chosen ones are far off where they are wrong, and heads' q is tested elsewhere.
scripts/check/lossless.py runs all situations with more, and plants faults.
"""

import tempfile
from pathlib import Path

import pytest

from edgespec.grow.policies import open_policy
from edgespec.tree.policies import POLICIES
from edgespec.tree.settings import TreeSettings
from tests.support.lossless import (
    GAPS,
    SITUATIONS,
    Form,
    Situation,
    compare,
    forms,
    is_greedy,
    total_variation,
)

TEXTS = 500
TEXTS_OF = {"sampled": TEXTS, "chosen": 250, "coupled": 100}
EQUAL_TEXTS = 50  # of coupled trees, and of heads
with tempfile.TemporaryDirectory() as _folder:
    FORMS = list(forms(Path(_folder)))
DYSPEC = Form(settings=TreeSettings(policy="dyspec", size=6, depth=3))
ADAPTIVE = Form(settings=TreeSettings(policy="adaptive", size=6, depth=3))
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


@pytest.mark.parametrize("form", [DYSPEC, CHOSEN, ADAPTIVE])
def test_truncation_that_draft_and_target_do_not_share_is_lossless(form: Form) -> None:
    assert_lossless(form, SITUATIONS["temperature 0.7, top-p 0.9"])


@pytest.mark.parametrize("form", FORMS)
def test_greedy_texts_are_the_targets_token_by_token(form: str, tmp_path: Path) -> None:
    found = forms(tmp_path)[form]
    assert is_greedy(found, count=3 if found.head else 4)


def test_several_branches_of_the_target_are_lossy_and_one_is_not() -> None:
    """Sixteen outcomes: of 500 right texts the distance is 0.06, all of it chance."""
    assert total_variation(width=1, count=500) < 0.08
    assert total_variation(width=3, count=250) > 0.3
