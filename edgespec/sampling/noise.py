"""The noise that decides a text's tokens: one vector a position, shared by the target and the draft.

The token at position t is argmax(log p + g_t), with standard Gumbel noise g_t: an exact draw from p (the Gumbel-max
identity). The noise depends on the seed, on the text's key, on the absolute position and on the token's id, and on
nothing else. So the text does not depend on the way or the order in which its positions are reached.

Source of the coupling: Daliri et al. 2024 (arXiv 2408.07978), where target and draft draw with the same noise.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from edgespec.copies import to_device

DEFAULT_NAME = "0"  # of a text: the name of a file's first row
# The two kinds of numbers that are drawn at a position, independent of each other
_TOKENS, _GENERATORS = 0, 1
_COUNTERS = 1 << 256  # of Philox 4x64


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
    words = philox(seed, key, (0, position, _TOKENS, 0), vocab) >> np.uint64(12)
    # 52 bits and a half: never 0 or 1. A uniform of float32 would cut the noise off at 17.
    uniform = torch.from_numpy(words.view(np.int64)).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def generator_at(seed: int, key: int, position: int, device: torch.device) -> torch.Generator:
    """Return a generator for draws without shared noise, in a text that continues at this position."""
    (word,) = philox(seed, key, (0, position, _GENERATORS, 0), 1).tolist()
    return torch.Generator(device).manual_seed(word >> 1)


class TextNoise:
    """The noise of one text, as e^g: argmax(log p + g) is the argmax of p * e^g, where p may be 0.

    Vectors are made on the host, so that every device sees the same, and kept while trees may meet their position.
    """

    def __init__(self, *, seed: int, key: int, vocab: int, device: torch.device) -> None:
        """Make the noise of the text `key` at `seed`; the root is at position 0."""
        self._seed, self._key, self._vocab, self._device = seed, key, vocab, device
        self._position = 0
        self._kept: dict[int, Tensor] = {}  # by position

    def start(self, position: int) -> None:
        """Go to the absolute position of a root: the text's last token."""
        self._position = position
        self._kept = {at: noise for at, noise in self._kept.items() if at > position}

    def advance(self, count: int) -> None:
        """Move the root on by `count` tokens."""
        self.start(self._position + count)

    def below(self, depth: int) -> Tensor:
        """Return e^g [vocab], float64, of the token `depth` positions after the root."""
        at = self._position + depth
        if at not in self._kept:
            noise = exponential_noise(self._seed, self._key, at, self._vocab).reciprocal_()
            self._kept[at] = to_device(noise, self._device)
        return self._kept[at]

    def draw(self, p: Tensor, depth: int) -> int:
        """Return the token of p [vocab], which need not be normalised, `depth` positions after the root.

        In float64: the largest noise decides, and float32 would round the tail's away.
        """
        return int((p.double() * self.below(depth)).argmax().item())
