"""Stored weights that no part of the model reads: of another architecture, or of layers beyond the last."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from transformers import PreTrainedModel


def surplus_weights(model: PreTrainedModel, stored: Iterable[str], read: Collection[str]) -> tuple[str, ...]:
    """Return the stored weights that are not `read`, but for those that the family itself leaves out.

    What lies beside weights is none: scales, masks and frequencies.
    """
    left_out = [*(model._keys_to_ignore_on_load_unexpected or ()), *_further_layers(model)]
    modules = dict(model.named_modules())
    found = []
    for name in stored:
        owner, _, leaf = name.rpartition(".")
        is_mask = owner in modules and not hasattr(modules[owner], "weight")  # GPT-2 has a buffer that it calls bias
        if leaf not in {"weight", "bias"} or name in read or is_mask:
            continue
        if not any(re.search(pattern, name) for pattern in left_out):
            found.append(name)
    return tuple(found)


def _further_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of layers behind the last that predict further tokens, as patterns."""
    config = model.config.get_text_config(decoder=True)
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return [rf"\blayers\.{first + index}\." for index in range(count)]
