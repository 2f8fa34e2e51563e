"""The acceptance model of a pair: moved to what was seen, and what is kept of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.grow.acceptance import NUM_CANDIDATES, AcceptanceModel, default_acceptance
from edgespec.grow.sequoia import best_shape
from edgespec.train.candidates import CandidateRecords, candidates_in
from edgespec.train.networks import FitSettings
from edgespec.tree.policies import DRAWS
from edgespec.tune import acceptance
from edgespec.tune.acceptance import MAX_SHIFT, PRIOR_PLACES, fitted, joined, reliability, shifted_to, with_measured
from edgespec.tune.samples import Samples
from tests.edgespec.train.test_acceptance import made_up_records


def records(share: float, count: int = 300) -> CandidateRecords:
    """Of nodes of which the target takes a candidate so often."""
    found = made_up_records(3, count)
    is_taken = torch.arange(count) < round(share * count)
    return {**found, "taken": torch.where(is_taken, found["taken"].clamp(max=3), NUM_CANDIDATES)}


def share_predicted(model: AcceptanceModel, found: CandidateRecords) -> float:
    return float(model.candidate_acceptance(candidates_in(found)).sum(1).mean())


def shift_of(moved: AcceptanceModel) -> float:
    """How much likelier than none a candidate became, in log odds."""
    return float(default_acceptance().none.biases[-1] - moved.none.biases[-1])


@pytest.mark.parametrize("share", [0.3, 0.45, 0.6])
def test_a_model_is_moved_so_that_one_of_the_candidates_is_taken_as_often_as_it_was(share: float) -> None:
    """Of a pair whose share can be reached."""
    found = records(share)
    base = share_predicted(default_acceptance(), found)
    model = default_acceptance().shifted(torch.tensor(share).logit().item() - torch.tensor(base).logit().item())
    moved = shifted_to(model, found)
    assert share_predicted(moved, found) == pytest.approx(share, abs=1e-3)
    assert moved.candidate is model.candidate, "which of them is likelier is not known better"


def test_a_few_places_move_a_model_by_a_part() -> None:
    base = share_predicted(default_acceptance(), records(0.5))
    found = records(0.95 * base)
    whole = shift_of(shifted_to(default_acceptance(), found))
    assert 0 < abs(whole) < MAX_SHIFT
    assert shift_of(shifted_to(default_acceptance(), found, num_places=PRIOR_PLACES)) == pytest.approx(whole / 2)
    few, more = (shift_of(shifted_to(default_acceptance(), found, num_places=count)) for count in (4, 40))
    assert abs(few) < abs(more) < abs(whole)


@pytest.mark.parametrize(("share", "shift"), [(0.0, -MAX_SHIFT), (1.0, MAX_SHIFT)])
def test_a_pair_that_is_far_off_moves_a_model_only_so_far(share: float, shift: float) -> None:
    assert shift_of(shifted_to(default_acceptance(), records(share))) == pytest.approx(shift)


def test_what_was_measured_takes_the_place_of_what_the_model_knew() -> None:
    found = with_measured(default_acceptance(), records(0.5))
    assert {(entry.draw, entry.temperature) for entry in found.measured} == {(draw, 0.6) for draw in DRAWS}
    assert sum(found.rank_acceptance(0.6, "coupled")) == pytest.approx(0.5, abs=1e-4)


def test_a_rank_that_was_never_accepted_is_not_impossible() -> None:
    rates = with_measured(default_acceptance(), records(0.0)).rank_acceptance(0.6, "coupled")
    assert best_shape(tuple(rates), size=3, depth=3, max_children=3).num_nodes == 4


def test_records_of_all_temperatures_are_joined_and_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "FIT_STEPS", 5)
    parts = [records(0.5, 200), records(0.4, 100)]
    found = joined({0.6: Samples(records=parts[:1]), 0.9: Samples(records=parts[1:])})
    assert all(found[name].shape[0] == 300 for name in found)
    assert torch.equal(found["taken"], torch.cat([part["taken"] for part in parts]))
    model = fitted(found, seed=1)
    assert model is not None
    same = fitted(found, seed=1)
    assert same is not None
    assert torch.equal(model.none.weights[0], same.none.weights[0])
    assert fitted({**found, "prompt": torch.zeros(300)}, seed=1) is None, "nothing can be held out of one prompt"
    assert FitSettings().steps > acceptance.FIT_STEPS


def predicted_as(chance: Tensor) -> AcceptanceModel:
    """A model whose networks are never asked."""

    class Known(AcceptanceModel):
        def candidate_acceptance(self, candidates: object) -> Tensor:
            return chance

    default = default_acceptance()
    return Known(candidate=default.candidate, none=default.none, measured=(), about={})


def test_reliability_compares_chances_with_what_was_taken() -> None:
    found = records(1.0, 100)
    found["taken"] = torch.arange(100) % 4  # each of the first four candidates a quarter of the times
    chances = torch.zeros(100, NUM_CANDIDATES)
    chances[:, 0], chances[:, 1] = 0.35, 0.15
    held = reliability(predicted_as(chances), found)
    assert [round(bucket.predicted, 3) for bucket in held.buckets] == [0.0, 0.15, 0.35]
    assert [round(bucket.observed, 3) for bucket in held.buckets] == [round(0.5 / 30, 3), 0.25, 0.25]
    assert held.calibration_error == pytest.approx((0.1 + 0.1 + 30 * 0.5 / 30) / 32, abs=1e-6)


def test_reliability_holds_no_share_above_one() -> None:
    """Of sums that rounding leaves a little above 1: a profile that has one could not be read again."""
    for count in range(90, 110):
        found = records(1.0, count)
        held = reliability(predicted_as(torch.full((count, NUM_CANDIDATES), 0.99)), found)
        assert len(held.buckets) == 1
        assert all(0 <= share <= 1 for share in (held.buckets[0].weight, held.buckets[0].observed))
