"""The noise that decides a text's tokens: one vector a position, shared by the target and the draft.

The token at position t is argmax(log p + g_t), with standard Gumbel noise g_t: an exact draw from p (the Gumbel-max
identity). The noise depends on the seed, on the text's key, on the absolute position and on the token's id, and on
nothing else. So the text does not depend on the way or the order in which its positions are reached.

Source of the coupling: Daliri et al. 2024 (arXiv 2408.07978), where target and draft draw with the same noise.
"""

import functools
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from edgespec.to_device import to_device

DEFAULT_NAME = "0"  # of a text: the name of a file's first row
# The two kinds of numbers that are drawn at a position, independent of each other
_TOKENS, _GENERATORS = 0, 1
_COUNTERS = 1 << 256  # of Philox 4x64
MOST_MAKERS = 4  # threads that make noise ahead
MADE_AT_ONCE = 1 << 14  # numbers; torch would start threads of its own for more
NUMBER_BYTES = 8
LIKELY_SHARE = 8  # of a vocabulary one in so many tokens may be drawn: for fewer the noise of these alone is made
BLOCK_WORDS = 2500  # in a row take the time of a block that is made alone


def text_key(name: str) -> int:
    """Return the key, in [0, 2^64), of the text of that name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def philox(seed: int, key: int, counter: tuple[int, int, int, int], count: int) -> np.ndarray:
    """Return `count` words [count] uint64 of Philox 4x64-10, from the block of this counter on.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    first = sum(word << (64 * place) for place, word in enumerate(counter))
    before = (first - 1) % _COUNTERS  # numpy counts up before it makes a block
    words = [(before >> (64 * place)) & 0xFFFF_FFFF_FFFF_FFFF for place in range(4)]
    bits = np.random.Philox(key=np.array([seed, key], np.uint64), counter=np.array(words, np.uint64))
    return bits.random_raw(count)


def exponential_noise(seed: int, key: int, position: int, vocab: int) -> Tensor:
    """Return standard exponential noise [vocab] float64 of a position: e^-g of its Gumbel noise g."""
    return _exponential(_words(seed, key, position, vocab))


def _words(seed: int, key: int, position: int, vocab: int) -> np.ndarray:
    """Return the word [vocab] of each token at a position."""
    return philox(seed, key, (0, position, _TOKENS, 0), vocab)


def _words_of(tokens: np.ndarray, seed: int, key: int, position: int, vocab: int) -> np.ndarray:
    """Return the words [k] of some tokens [k] at a position."""
    if BLOCK_WORDS * tokens.shape[0] > vocab:
        found: np.ndarray = _words(seed, key, position, vocab)[tokens]
        return found
    blocks = (philox(seed, key, (token // 4, position, _TOKENS, 0), 4)[token % 4] for token in tokens.tolist())
    return np.fromiter(blocks, np.uint64, tokens.shape[0])


def _exponential(words: np.ndarray) -> Tensor:
    # 52 bits and a half: never 0 or 1. A uniform of float32 would cut the noise off at 17.
    uniform = torch.from_numpy((words >> np.uint64(12)).view(np.int64)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def generator_at(seed: int, key: int, position: int, device: torch.device) -> torch.Generator:
    """Return a generator for draws without shared noise, in a text that continues at this position."""
    (word,) = philox(seed, key, (0, position, _GENERATORS, 0), 1).tolist()
    return torch.Generator(device).manual_seed(word >> 1)


def noise_bytes(vocab: int, depth: int) -> int:
    """Return the bytes of a text's noise on its device, while its trees have at most so many layers."""
    return NUMBER_BYTES * vocab * (depth + 1)


class TextNoise:
    """The noise of one text, as e^g: argmax(log p + g) is the argmax of p * e^g, where p may be 0.

    Vectors are made on the host, so that every device sees the same, and kept while trees may meet their position.
    """

    def __init__(self, *, seed: int, key: int, vocab: int, device: torch.device) -> None:
        """Make the noise of the text `key` at `seed`; the root is at position 0."""
        self._seed, self._key, self._vocab, self._device = seed, key, vocab, device
        self._position = 0
        self._kept: dict[int, Tensor] = {}  # by position
        self._coming: dict[int, Future[Tensor]] = {}  # by position, on the host
        self._most_depth = 0  # that the text's trees have reached

    def start(self, position: int) -> None:
        """Go to the absolute position of a root: the text's last token."""
        self._position = position
        self._kept = {at: noise for at, noise in self._kept.items() if at > position}
        self._coming = {at: noise for at, noise in self._coming.items() if at > position}

    def advance(self, count: int) -> None:
        """Move the root on by `count` tokens."""
        self.start(self._position + count)

    def below(self, depth: int) -> Tensor:
        """Return e^g [vocab], float64, of the token `depth` positions after the root."""
        at = self._position + depth
        self._most_depth = max(self._most_depth, depth)
        if at not in self._kept:
            coming = self._coming.pop(at, None)
            noise = _e_to_g(self._seed, self._key, at, self._vocab) if coming is None else coming.result()
            self._kept[at] = to_device(noise, self._device)
        return self._kept[at]

    def make_ahead(self) -> None:
        """Let other threads make what this verification and the next tree need, wherever the next root is.

        Only beside another device: a CPU has no time to spare while it computes a pass.
        """
        if self._device.type == "cpu":
            return
        for at in range(self._position + 1, self._position + 2 * self._most_depth):
            if at not in self._kept and at not in self._coming:
                self._coming[at] = _makers().submit(_made_in_parts, self._seed, self._key, at, self._vocab)

    def draw(self, p: Tensor, depth: int) -> int:
        """Return the token of p [vocab], which need not be normalised, `depth` positions after the root.

        In float64: the largest noise decides, and float32 would round the tail's away.
        """
        at = self._position + depth
        if self._device.type == "cpu" and at not in self._kept:  # no tree has met the position
            probs = p.detach().numpy()
            likely = np.flatnonzero(probs > 0)  # a tenth of the time that it takes to find numbers that are not 0
            if LIKELY_SHARE * likely.shape[0] <= self._vocab:
                words = _words_of(likely, self._seed, self._key, at, self._vocab)
                e_to_g = _exponential(words).reciprocal_().numpy()
                return int(likely[(probs[likely] * e_to_g).argmax()])
        return int((p.double() * self.below(depth)).argmax().item())


def _e_to_g(seed: int, key: int, position: int, vocab: int) -> Tensor:
    return exponential_noise(seed, key, position, vocab).reciprocal_()


def _made_in_parts(seed: int, key: int, position: int, vocab: int) -> Tensor:
    """Return the same, made by this thread alone."""
    words = _words(seed, key, position, vocab)
    e_to_g = torch.empty(vocab, dtype=torch.float64)
    for start in range(0, vocab, MADE_AT_ONCE):
        end = min(start + MADE_AT_ONCE, vocab)
        torch.reciprocal(_exponential(words[start:end]), out=e_to_g[start:end])
    return e_to_g


@functools.cache
def _makers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_MAKERS, os.cpu_count() or 1), thread_name_prefix="edgespec-noise")
