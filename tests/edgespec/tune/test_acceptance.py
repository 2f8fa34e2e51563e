"""The acceptance model of a pair: moved to what was seen, and what is kept of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.grow.acceptance import KINDS, AcceptanceModel, default_acceptance, network_features
from edgespec.grow.sequoia import best_shape
from edgespec.train.records import DRAWS, Records
from edgespec.tune.acceptance import MAX_SHIFT, PRIOR_PLACES, reliability, shifted_to, with_measured
from edgespec.tune.samples import Samples
from profiles.tuner import TreeSample


def records(draw: str, acceptance: Tensor, weight: Tensor) -> Records:
    """Slots of one draw, of all kinds of q."""
    count = acceptance.shape[0]
    generator = torch.Generator().manual_seed(3)
    q = torch.rand(count, generator=generator)
    return {
        "acceptance": acceptance,
        "weight": weight,
        "rank": torch.arange(count) % 4,
        "depth": 1 + torch.arange(count) % 5,
        "q": q * 0.9,
        "mass_left": q,
        "entropy": 3 * torch.rand(count, generator=generator),
        "top_q": torch.rand(count, generator=generator),
        "temperature": torch.full((count,), 0.8),
        "draw": torch.full((count,), DRAWS.index(draw)),  # type: ignore[arg-type]
    }


def mean_prediction(model: AcceptanceModel, kind: str, found: Records) -> float:
    network = getattr(model, kind)
    columns = {name: column.double() for name, column in found.items()}
    predicted = network(network_features(network.inputs, columns))
    return float((predicted * columns["weight"]).sum() / columns["weight"].sum())


@pytest.mark.parametrize("mean", [0.3, 0.45, 0.6])
@pytest.mark.parametrize(("draw", "kinds"), [("sampled", ["slot", "sampled"]), ("top_k", ["chosen"])])
def test_a_model_is_moved_so_that_its_mean_is_the_pairs(draw: str, kinds: list[str], mean: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(300, generator=generator)
    acceptance = torch.rand(300, generator=generator)
    acceptance *= mean * weight.sum() / (acceptance * weight).sum()
    found = records(draw, acceptance, weight)
    model = default_acceptance()
    moved = shifted_to(model, found)
    for kind in KINDS:
        if kind in kinds:
            assert mean_prediction(moved, kind, found) == pytest.approx(mean, abs=1e-3)
        else:
            assert getattr(moved, kind) is getattr(model, kind), "nothing is known of it"


def test_a_few_places_move_a_model_by_a_part() -> None:
    found = records("top_k", torch.full((50,), 0.3), torch.ones(50))
    model = default_acceptance()

    def shift(num_places: int | None) -> float:
        moved = shifted_to(model, found, num_places=num_places)
        return float(moved.chosen.biases[-1] - model.chosen.biases[-1])

    assert shift(PRIOR_PLACES) == pytest.approx(shift(None) / 2)
    assert abs(shift(4)) < abs(shift(40)) < abs(shift(None))


def test_slots_that_are_never_tried_move_nothing() -> None:
    half = torch.arange(300) < 150
    acceptance = torch.where(half, 0.4, 1.0)
    with_some = shifted_to(default_acceptance(), records("top_k", acceptance, half.float()))
    among = {name: column[half] for name, column in records("top_k", acceptance, half.float()).items()}
    assert mean_prediction(with_some, "chosen", among) == pytest.approx(0.4, abs=1e-3)


@pytest.mark.parametrize(("acceptance", "shift"), [(0.0, -MAX_SHIFT), (1.0, MAX_SHIFT)])
def test_a_pair_that_is_far_off_moves_a_model_only_so_far(acceptance: float, shift: float) -> None:
    model = default_acceptance()
    moved = shifted_to(model, records("top_k", torch.full((50,), acceptance), torch.ones(50)))
    assert float(moved.chosen.biases[-1] - model.chosen.biases[-1]) == pytest.approx(shift)


def test_what_was_measured_of_a_draw_that_fell_behind_stays() -> None:
    """Another policy may go on with that draw: it needs the rates."""
    model = default_acceptance()
    tree = TreeSample.from_nodes(scores=[0.6], values=[0.6], depths=[1], parents=[-1])

    def seen(draw: str, name: str) -> Samples:
        found = Samples(records=[records(draw, torch.full((9,), 0.5), torch.ones(9))])
        for part in found.records:
            part |= {"parent_value": torch.ones(9), "none_before": torch.ones(9)}
        found.trees["adaptive", name].append(tree)
        return found

    both = with_measured(model, {0.8: seen("top_k", "chosen")})
    both = with_measured(both, {0.8: seen("sampled", "sampled")})
    assert {(found.draw, found.temperature) for found in both.measured} == {(draw, 0.8) for draw in DRAWS}
    assert both.expected_tokens(0.8, "top_k") == pytest.approx(1.6)
    newer = with_measured(both, {0.8: seen("top_k", "chosen")})
    assert len(newer.measured) == 2


def test_a_rank_that_was_never_accepted_is_not_impossible() -> None:
    found = Samples(records=[records("top_k", torch.zeros(9), torch.ones(9))])
    found.records[0] |= {"parent_value": torch.ones(9), "none_before": torch.ones(9)}
    found.trees["adaptive", "chosen"].append(
        TreeSample.from_nodes(scores=[0.6], values=[0.0], depths=[1], parents=[-1])
    )
    rates = with_measured(default_acceptance(), {0.8: found}).rank_acceptance(0.8, "top_k")
    assert best_shape(tuple(rates), size=3, depth=3, max_children=3).num_nodes == 4


def test_reliability_holds_no_share_above_one() -> None:
    """Of sums that rounding leaves a little above 1: a profile that has one could not be read again."""
    for seed in range(20):
        weight = torch.rand(997, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found = records("top_k", torch.ones(997), weight)
        same = {"q": 0.99, "mass_left": 1.0, "rank": 0, "depth": 1, "top_q": 0.99, "entropy": 0.1}
        found |= {name: torch.full((997,), value) for name, value in same.items()}
        (kind,) = reliability(default_acceptance(), found)
        assert len(kind.buckets) == 1
        assert all(0 <= share <= 1 for share in (kind.buckets[0].weight, kind.buckets[0].observed))
