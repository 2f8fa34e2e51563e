"""Numbers of a GGUF file's settings, which are float32, as config.json had them; the error of a wrong one."""

import struct
from typing import Any

from offload.errors import CheckpointError
from offload.gguf.header import GgufHeader

MAX_SHOWN = 80  # characters of a value


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is this one in float32."""
    rounded = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(number for number in rounded if is_same_float32(number, value))


def is_same_float32(one: float, other: float) -> bool:
    """Return whether two numbers are the same in float32."""
    return struct.pack("<f", one) == struct.pack("<f", other)


def wrong_value(header: GgufHeader, key: str, value: Any, needed: str) -> CheckpointError:
    """Return the error of a setting that has another value than what is `needed`, in words."""
    return CheckpointError(
        "E_CONFIG_INVALID",
        f"'{header.path}' states {header.architecture}.{key} = {str(value)[:MAX_SHOWN]}, which is not {needed}.",
        "Download the file again, or use the model's safetensors.",
    )
