"""The noise of a text: published numbers, what it depends on, and that its draws have the target's distribution."""

import gc
import weakref

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from edgespec.sampling import noise as noise_module
from edgespec.sampling.noise import MADE_AT_ONCE, TextNoise, exponential_noise, generator_at, philox, text_key
from tests.support.pretend_cuda import pretend_cuda

CPU = torch.device("cpu")
VOCAB = 1000
MOST = 2**64 - 1


def text_noise(seed: int = 1, key: int = 2, *, vocab: int = VOCAB, at: int = 0) -> TextNoise:
    found = TextNoise(seed=seed, key=key, vocab=vocab, device=CPU)
    found.start(at)
    return found


# Philox


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
        (
            (MOST, MOST),
            (MOST, MOST, MOST, MOST),
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_numbers_are_the_published_ones_of_philox(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: tuple[int, ...]
) -> None:
    """Random123's known answers for Philox 4x64-10."""
    assert tuple(philox(*key, counter, 4).tolist()) == words


def test_blocks_follow_each_other_by_the_first_word_of_the_counter() -> None:
    whole = philox(3, 4, (0, 7, 0, 0), 12)
    for block in range(3):
        np.testing.assert_array_equal(philox(3, 4, (block, 7, 0, 0), 4), whole[4 * block : 4 * block + 4])


@pytest.mark.parametrize("count", [1, 12, 40])
def test_words_of_some_tokens_are_theirs_among_those_of_all(count: int) -> None:
    """Few are made block by block, more in a row with all others."""
    vocab = 50_021
    tokens = np.sort(np.random.default_rng(count).permutation(vocab)[:count])
    tokens[-1] = vocab - 1
    words = noise_module._words(3, 4, 7, vocab)
    np.testing.assert_array_equal(noise_module._words_of(tokens, 3, 4, 7, vocab), words[tokens])


# What the noise depends on

KEYS = {"seed": 5, "key": 6, "position": 7}


@pytest.mark.parametrize("changed", KEYS)
@pytest.mark.parametrize("by", [1, 2**32, 2**62])
def test_another_seed_text_or_position_has_other_noise_at_every_token(changed: str, by: int) -> None:
    noise = exponential_noise(**KEYS, vocab=VOCAB)
    other = exponential_noise(**{**KEYS, changed: KEYS[changed] + by}, vocab=VOCAB)
    assert not np.isin(noise.numpy(), other.numpy()).any(), "not at another token either"


def test_seed_text_and_position_are_not_exchangeable() -> None:
    found = [exponential_noise(*order, VOCAB)[0].item() for order in ((1, 2, 3), (2, 1, 3), (1, 3, 2), (3, 2, 1))]
    assert len(set(found)) == 4


def test_a_million_tokens_of_a_position_have_different_noise() -> None:
    """Of uniforms of 52 bits two are equal once in 9,000 runs; of 24 bits, as float32 has them, 30,000 are."""
    noise = exponential_noise(1, 2, 3, 1_000_000)
    assert noise.dtype == torch.float64
    assert noise.unique().numel() == 1_000_000


def test_noise_reaches_as_far_as_52_bits_and_half_a_step_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a float32 uniform rounds to 1, its noise is 0 and wins against every token: that is no rare draw."""
    monkeypatch.setattr(noise_module, "philox", lambda *_: np.array([0, MOST], np.uint64))
    largest, smallest = exponential_noise(0, 0, 0, 2).tolist()
    assert largest == pytest.approx(53 * np.log(2))
    assert smallest == pytest.approx(2**-53, rel=1e-6, abs=0.0)


def test_nothing_else_decides_on_the_noise() -> None:
    """Neither what was asked for before, nor anybody's random numbers, nor how many tokens there are."""
    expected = exponential_noise(**KEYS, vocab=VOCAB)
    np.random.default_rng(1).random(5)
    torch.manual_seed(9)
    for other in (3, 7, 8):
        exponential_noise(5, 6, other, 17)
    assert torch.equal(exponential_noise(**KEYS, vocab=VOCAB), expected)
    for vocab in (1, 3, 4, 5, VOCAB - 1):
        assert torch.equal(exponential_noise(**KEYS, vocab=vocab), expected[:vocab]), "a larger one begins the same"


def test_noise_is_exponential() -> None:
    """Kolmogorov and Smirnov: false alarms 1 in 1,000."""
    assert stats.kstest(exponential_noise(1, 2, 3, 50_000).numpy(), stats.expon.cdf).pvalue > 1e-3


# Noise of a text under way


def test_below_a_root_stands_the_noise_of_the_absolute_position() -> None:
    for at, depth in ((0, 1), (10, 3), (12, 1)):
        e_to_g = text_noise(at=at).below(depth)
        torch.testing.assert_close(e_to_g, 1 / exponential_noise(1, 2, at + depth, VOCAB))
        assert e_to_g.dtype == torch.float64


def test_kept_noise_is_that_of_a_text_that_just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    right = noise_module.exponential_noise

    def remember(seed: int, key: int, position: int, vocab: int) -> Tensor:
        made.append(position)
        return right(seed, key, position, vocab)

    monkeypatch.setattr(noise_module, "exponential_noise", remember)
    noise = text_noise(at=10)
    for _ in range(2):
        for depth in (1, 2, 3):
            noise.below(depth)
    assert made == [11, 12, 13]
    noise.advance(2)
    for depth in (1, 2):
        assert torch.equal(noise.below(depth), text_noise(at=12).below(depth))
    assert made.count(13) == 2, "once by each text: what a tree has looked at is kept for the next"
    assert made.count(14) == 2


def test_what_lies_behind_the_root_is_forgotten() -> None:
    noise = text_noise(at=10)
    behind, ahead = (weakref.ref(noise.below(depth)) for depth in (2, 3))
    noise.advance(2)
    gc.collect()
    assert behind() is None
    assert ahead() is not None
    noise.start(5)
    assert torch.equal(noise.below(7), text_noise(at=0).below(12)), "a text that goes back sees the same again"


@pytest.mark.parametrize("vocab", [1, MADE_AT_ONCE, 2 * MADE_AT_ONCE + 5])
def test_beside_a_card_other_threads_make_the_noise_of_every_step_but_the_first(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the root that verification reaches, also where all of a tree is accepted."""
    in_line: list[int] = []
    right = noise_module.exponential_noise

    def remember(seed: int, key: int, position: int, vocab: int) -> Tensor:
        in_line.append(position)
        return right(seed, key, position, vocab)

    with pretend_cuda():
        noise, position, depth = text_noise(vocab=vocab, at=10), 10, 3
        noise._device = torch.device("cuda", 0)
        for gained in (1, depth + 1, 2, depth + 1):
            found = {position + below: noise.below(below).cpu() for below in range(1, depth + 1)}
            noise.make_ahead()
            found |= {position + below: noise.below(below).cpu() for below in range(1, depth + 2)}  # verification
            for at, e_to_g in found.items():
                assert torch.equal(e_to_g, 1 / right(1, 2, at, vocab))
            noise.advance(gained)
            position += gained
            monkeypatch.setattr(noise_module, "exponential_noise", remember)
    assert not in_line


def test_on_a_cpu_noise_is_made_in_line() -> None:
    noise = text_noise()
    noise.below(1)
    noise.make_ahead()
    assert not noise._coming


# Draws


def drawn(p: Tensor, over: str, count: int) -> list[int]:
    if over == "positions":
        noise = text_noise(vocab=p.shape[0])
        return [noise.draw(p, depth) for depth in range(1, count + 1)]
    return [text_noise(**{over: number}, vocab=p.shape[0], at=3).draw(p, 1) for number in range(count)]


@pytest.mark.parametrize("over", ["seed", "key", "positions"])
@pytest.mark.parametrize(
    "p",
    [[0.4, 0.3, 0.15, 0.1, 0.05], [0.0, 0.7, 0.0, 0.2, 0.1], [3.0, 1.0, 0.0, 0.5, 0.01]],
    ids=["plain", "zeros", "unnormalised"],
)
def test_tokens_have_the_targets_distribution_over_seeds_texts_and_positions(p: list[float], over: str) -> None:
    """12,000 draws: chi-square, at most 4 degrees of freedom, false alarms 1 in 1,000."""
    probs = torch.tensor(p)
    tokens = torch.tensor(drawn(probs, over, 12_000))
    observed, expected = tokens.bincount(minlength=5).double(), 12_000 * probs.double() / probs.double().sum()
    assert not observed[probs == 0].any(), "a token of no probability"
    assert stats.chisquare(observed[probs > 0], expected[probs > 0], sum_check=False).pvalue > 1e-3


@pytest.mark.parametrize("over", ["seed", "key", "positions"])
def test_neighbouring_draws_have_nothing_to_do_with_each_other(over: str) -> None:
    """12,000 pairs of 3 tokens: chi-square, 8 degrees of freedom, false alarms 1 in 1,000."""
    p = torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.tensor(drawn(p, over, 12_001))
    observed = (3 * tokens[:-1] + tokens[1:]).bincount(minlength=9)
    assert stats.chisquare(observed, 12_000 * torch.outer(p, p).flatten().double(), sum_check=False).pvalue > 1e-3


def test_a_draw_is_the_argmax_of_log_p_and_gumbel_noise() -> None:
    for position in range(200):
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(position))
        gumbel = -exponential_noise(1, 2, position + 1, VOCAB).log()
        expected = int((logits.double() + gumbel).argmax())
        assert text_noise(at=position).draw(logits.double().softmax(-1), 1) == expected


def test_of_few_tokens_that_may_come_the_same_one_is_drawn_as_among_the_noise_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[int]()
    exponential = noise_module._exponential
    monkeypatch.setattr(noise_module, "_exponential", lambda words: (made.append(len(words)), exponential(words))[1])
    vocab, random = 50_021, torch.Generator().manual_seed(0)
    for position in range(40):
        p = torch.zeros(vocab)
        likely = torch.randperm(vocab, generator=random)[: 1 + 29 * position]
        p[likely] = torch.rand(likely.shape, generator=random) ** 4
        expected = int((p.double() * text_noise(vocab=vocab, at=position).below(1)).argmax())
        made.clear()
        assert text_noise(vocab=vocab, at=position).draw(p, 1) == expected
        assert made == [int((p > 0).sum())]


@pytest.mark.parametrize("token", [0, 17, VOCAB - 1])
def test_a_billionth_more_decides_between_tokens_that_tie(token: int) -> None:
    p = 1 / text_noise().below(1)
    p[token] *= 1 + 1e-9
    assert text_noise().draw(p, 1) == token


def test_a_certain_token_is_drawn_whatever_the_noise() -> None:
    assert set(drawn(torch.nn.functional.one_hot(torch.tensor(4), 9).float(), "seed", 50)) == {4}


# Generators and keys


def state_of(seed: int = 1, key: int = 2, position: int = 3) -> tuple[int, ...]:
    return tuple(torch.randint(2**62, (4,), generator=generator_at(seed, key, position, CPU)).tolist())


def test_a_generator_is_that_of_its_seed_text_and_position() -> None:
    others = [state_of(seed=2), state_of(key=3), state_of(position=4), state_of(seed=2**63 - 1, key=MOST)]
    assert len({state_of(), *others}) == 5
    assert state_of() == state_of()


def test_a_generator_starts_from_no_word_that_decides_on_a_token() -> None:
    generator = generator_at(1, 2, 3, CPU)
    assert generator.initial_seed() not in {int(word) >> 1 for word in philox(1, 2, (0, 3, 0, 0), VOCAB)}


def test_a_texts_key_is_its_names() -> None:
    names = ["", "0", "1", "0:1", "1:0", "ä", "a" * 1000]
    keys = [text_key(name) for name in names]
    assert len(set(keys)) == len(names)
    assert all(0 <= key <= MOST for key in keys)
    assert text_key("0:1") == 0x4C76E498099627F2, "on every machine: runs are repeated elsewhere"
