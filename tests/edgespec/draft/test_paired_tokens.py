"""A reading is better where more is accepted, by enough, and where chance does not explain it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgespec.draft.paired_tokens import Shared, _chance_of_mean, agrees_more, chance_of, surely_agrees_more


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


def gains(mean: float, *, count: int = 1024, seed: int = 0) -> tuple[Shared, Shared]:
    """Two readings of tokens whose gains vary, as those of drafts do, by a tenth of a token."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.1
    stated = torch.full((count,), 0.5, dtype=torch.float64)
    return shared(stated + noise + mean), shared(stated)


def test_a_healthy_draft_raises_no_alarm_and_a_loss_of_003_is_seen() -> None:
    """Of 300 drafts each: those whose texts favour another reading a little, and those that are read wrongly."""

    def caught(mean: float) -> int:
        return sum(surely_agrees_more(*gains(mean, seed=seed), num_tried=5) for seed in range(300))

    assert [caught(mean) for mean in (-0.005, 0.0, 0.005)] == [0, 0, 0]
    assert caught(0.03) > 290
    assert caught(0.05) == 300


def test_a_gain_that_could_be_the_texts_own_is_no_reading() -> None:
    """0.0125 of a token in 256, as a healthy head has gained in a reading that is worse elsewhere."""
    ours, theirs = gains(0.0125, count=256)
    ours = Shared(
        accepted=ours.accepted - (ours.accepted - theirs.accepted).mean() + 0.0125, affinity=ours.affinity + 1
    )
    assert agrees_more(ours, theirs)
    assert not surely_agrees_more(ours, theirs, num_tried=5)


def test_the_chance_of_a_mean_is_students() -> None:
    """Of the tables: t(29) at one in twenty is 1.699; t(1) is 6.314, where the normal tail claims less than that."""
    many = torch.tensor([-1.0, 1.0]).double().repeat(15)
    assert _chance_of_mean(many + 1.699 * float(many.std()) / 30**0.5) == pytest.approx(0.05, rel=0.02)
    assert _chance_of_mean(torch.tensor([5.314, 7.314]).double()) > 0.05
    assert _chance_of_mean(torch.tensor([5.0]).double()) == 1.0
