"""Numbers of a GGUF file's settings, which are float32, as config.json had them."""

from __future__ import annotations

import struct


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is this one in float32."""
    rounded = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(number for number in rounded if is_same_float32(number, value))


def is_same_float32(one: float, other: float) -> bool:
    """Return whether two numbers are the same in float32."""
    return struct.pack("<f", one) == struct.pack("<f", other)
