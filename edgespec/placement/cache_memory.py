"""The memory of what layers keep of texts, in bytes: keys and values by a configuration alone, states by layers."""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.model.mechanisms.known import read_by, row_numbers
from edgespec.model.mechanisms.state_cache import StateSizes
from edgespec.model.supported import understanding
from edgespec.tree.settings import TreeSettings
from offload.allocated import allocated_bytes
from offload.text_part import decoder_layers


def cache_bytes(config: PretrainedConfig, *, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of `rows` rows in all layers that have some of their own."""
    return sum(_row_numbers(config)) * rows * dtype.itemsize


def placed_cache_bytes(
    config: PretrainedConfig, *, rows: int, num_texts: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return what a device's memory gives for the keys and values of so many texts, of `rows` rows in all."""
    if device.type != "cuda":
        return cache_bytes(config, rows=rows, dtype=dtype)
    text_bytes = -(-rows // num_texts) * dtype.itemsize
    return num_texts * sum(allocated_bytes(numbers * text_bytes) for numbers in _row_numbers(config))


def _row_numbers(config: PretrainedConfig) -> list[int]:
    with understanding(config):
        return row_numbers(config)


@torch.no_grad()
def state_sizes(model: PreTrainedModel, dtype: torch.dtype, *, keeps_row_bits: bool = False) -> StateSizes:
    """Return what all layers of a model, which need have no weights, take beside keys and values.

    With `keeps_row_bits` known memories are computed in float64.
    """
    config = model.config.get_text_config(decoder=True)
    mixers = [module for module in decoder_layers(model)[1].modules() if hasattr(module, "layer_idx")]
    total, num_inputs = StateSizes(), getattr(config, "hidden_size", 0)
    with understanding(model.config):
        records = read_by(config)
        for mixer in mixers:
            of_mixer = StateSizes()
            for record in records:
                of_mixer += record.sizes(mixer, dtype, num_inputs=num_inputs, keeps_row_bits=keeps_row_bits)
            total = total.with_layer(of_mixer)
    return total


def cache_rows(context_tokens: int, tree: TreeSettings) -> tuple[int, int]:
    """Return the rows of the target's and of the draft's cache: the text, and the rows of a tree after it.

    The draft's cache is larger, because the draft expands nodes that the finished tree may drop again.
    """
    return context_tokens + tree.num_nodes + 1, context_tokens + tree.num_drafted
