"""The error of a GGUF file that says something which is not understood."""

import math
from typing import Any

from offload.errors import CheckpointError
from offload.gguf.families import FAMILIES
from offload.gguf.header import GgufHeader
from offload.gguf.numbers import shortest


def not_read(header: GgufHeader, what: str) -> CheckpointError:
    """Return the error."""
    return CheckpointError(
        "E_UNSUPPORTED_ARCHITECTURE",
        f"'{header.path}' {what}, which edgespec does not read in a GGUF file.",
        f"Use the model's safetensors; of GGUF these are read: {', '.join(FAMILIES)}.",
    )


def number(header: GgufHeader, key: str, value: Any) -> int | float:
    """Return a setting's number as config.json had it; raises CheckpointError for anything else."""
    if type(value) is int:
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        raise not_read(header, f"states {header.architecture}.{key} = {value}")
    return shortest(value)
