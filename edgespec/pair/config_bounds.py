"""What a config.json may ask for: sizes that no model has are refused before anything of them is made.

The bounds are ten times what published models have, or more. transformers makes lists by layers, and modules of all
sorts, as soon as it reads a configuration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.validation import shown

# Names of fields, whole -> the most of it; the first that fits counts
BOUNDS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), most)
    for pattern, most in (
        (r"(?!max_|first_).*_layers|n_layers?|depth", 2_000),
        (r".*_heads|n_heads?", 4_096),
        (r"(num|n|moe_num)_.*experts", 1 << 18),
        (r".*vocab_size.*|n_vocab", 1 << 28),
        (r".*(_size|_dim|_rank)|d_model|d_inner|n_embd|n_inner|dim", 1 << 24),
        (r".*positions?(_embeddings)?|n_ctx|seq_length", 1 << 27),
        ("factor", 1 << 20),  # of a scaled rotation
    )
)
NEEDED = {"num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "n_layer", "n_embd", "n_head"}
INFINITE = {"time_step_limit"}  # of Mamba 2, where nothing limits its steps
_FIX = "Download the file again."


def check_bounds(fields: Mapping[str, Any], path: Path) -> None:
    """Raise EdgespecError for a size in a config.json, or in a part of it, that no model has, and for no number."""
    for name, value in _numbers(fields):
        most = next((most for pattern, most in BOUNDS if pattern.fullmatch(name)), None)
        least = 1 if name in NEEDED else -1
        is_sound = abs(value) <= sys.float_info.max or name in INFINITE if most is None else least <= value <= most
        if not is_sound or (name in NEEDED and isinstance(value, bool)):
            wrong = "no finite number" if most is None else f"not in [{least}, {most}]"
            raise EdgespecError("E_CONFIG_INVALID", f"'{path}' has {name} {shown(value)}, which is {wrong}.", _FIX)


def check_layers(config: PretrainedConfig, num_tensors: int, folder: Path) -> None:
    """Raise EdgespecError for more layers than the checkpoint has tensors: each takes one at least."""
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None) or 0
    if num_layers > num_tensors:
        what = f"'{folder / 'config.json'}' asks for {num_layers} layers, and the checkpoint has {num_tensors} tensors."
        raise EdgespecError("E_CONFIG_INVALID", what, "Use the config.json that belongs to these weights.")


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield all numbers with the names that they, or lists of them, have."""
    parts: list[tuple[str, Any]] = [("", fields)]
    while parts:  # and no recursion: how deep parts lie is the file's to say
        name, part = parts.pop()
        if isinstance(part, int | float):
            yield name, part
        elif isinstance(part, dict):
            parts += [(str(key), value) for key, value in part.items()]
        elif isinstance(part, list):
            parts += [(name, value) for value in part]
