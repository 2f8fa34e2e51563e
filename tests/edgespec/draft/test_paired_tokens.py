"""A reading is better where more is accepted, by enough, and where chance does not explain it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.draft.paired_tokens import Shared, agrees_more, chance_of


def shared(of_tokens: Tensor) -> Shared:
    """As much accepted as the distributions are alike."""
    return Shared(accepted=of_tokens, affinity=of_tokens)


def test_tokens_decide_in_pairs_whatever_their_share() -> None:
    """Of two readings with the same shares, 20 % and 26 %, one is surely better and the other is not.

    Signed ranks, all alike: 12 of 12 tokens by chance in 1 of 3,700 times, 17 of 22 in 1 of 190.
    """
    tokens = torch.arange(200)
    stated, more = (tokens < 40).double(), (tokens < 52).double()
    assert agrees_more(shared(more), shared(stated))
    assert not agrees_more(shared(stated), shared(more))
    assert not agrees_more(shared(stated), shared(stated))
    other = ((tokens >= 5) & (tokens < 57)).double()  # 17 tokens more and 5 fewer: as many as before
    assert other.sum() == more.sum()
    assert not agrees_more(shared(other), shared(stated))


def test_what_is_sure_and_does_not_pay_changes_nothing() -> None:
    stated = torch.full((200,), 0.5, dtype=torch.float64)
    assert agrees_more(shared(stated + 0.011), shared(stated))
    assert not agrees_more(shared(stated + 0.009), shared(stated))
    assert not agrees_more(shared(stated + 1e-7), shared(stated))  # rounding


def test_the_more_alike_distributions_are_not_better_where_less_is_accepted() -> None:
    ours = Shared(accepted=torch.full((200,), 0.4), affinity=torch.full((200,), 0.9))
    theirs = Shared(accepted=torch.full((200,), 0.5), affinity=torch.full((200,), 0.8))
    assert not agrees_more(ours, theirs)
    assert not agrees_more(theirs, ours)


@pytest.mark.parametrize("seed", range(4))
def test_chance_is_that_of_every_way_to_sign_the_differences(seed: int) -> None:
    """Against an enumeration of all 2^14 signs, of differences that are mostly positive, some of them alike."""
    found = torch.randn(14, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = (found.abs() * torch.where(torch.arange(14) < 11, 1, -1) * 8).round() / 8
    found = found[found != 0]
    magnitudes = found.abs()
    ranks = torch.tensor(
        [float((magnitudes < one).sum()) + (float((magnitudes == one).sum()) + 1) / 2 for one in magnitudes]
    )
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * len(found))
    reached = float((ranks * found.sign()).sum())
    scores = signs @ ranks
    exact = float((scores > reached + 1e-6).float().mean() + 0.5 * ((scores - reached).abs() <= 1e-6).float().mean())
    assert chance_of(found) == pytest.approx(exact, abs=0.01)


def test_readings_that_are_alike_are_rarely_told_apart() -> None:
    """Of 4,000 pairs that differ by chance at most 12 seem better: 4 are expected, and more in 1 of 3,600 times."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, 254, generator=generator, dtype=torch.float64) * 0.2
    chances = torch.tensor([chance_of(differences) for differences in noise])
    assert int((chances < 0.001).sum()) <= 12
    assert 0.08 < float((chances < 0.1).double().mean()) < 0.12
