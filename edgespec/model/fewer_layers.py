"""A configuration is cut down to some of its layers: for heads of one layer, and for trials on narrow copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

LAYER_COUNTS = ("num_hidden_layers", "encoder_layers", "decoder_layers")  # where a family has them


def layer_overrides(config: PretrainedConfig) -> dict[int, dict[str, Any]]:
    """Return what single layers have in place of the configuration's own values: layer -> name -> value."""
    return dict(config._heterogeneity_spec.per_layer_overrides) if config.is_heterogeneous else {}


def keep_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Leave these layers of a text part, with what is said of each of them."""
    text: Any = config
    overrides, num_layers = layer_overrides(text), text.num_hidden_layers
    num_shared = getattr(text, "num_kv_shared_layers", None) or 0
    text.per_layer_config = None
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers and name != "architectures":
            setattr(text, name, [value[layer] for layer in layers])
    for name in LAYER_COUNTS:
        if getattr(text, name, None):
            setattr(text, name, len(layers))
    if num_shared:
        text.num_kv_shared_layers = sum(layer >= num_layers - num_shared for layer in layers)
    text.per_layer_config = {
        index: overrides[layer] for index, layer in enumerate(layers) if layer in overrides
    } or None
