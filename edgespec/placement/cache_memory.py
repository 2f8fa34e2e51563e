"""The memory of what layers keep of texts, in bytes: keys and values by a configuration alone, states by layers."""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.model.causal_model import is_text_by_text
from edgespec.model.mechanisms.keys_values import STEP_ROWS, rows_held
from edgespec.model.mechanisms.known import layer_numbers, read_by, row_numbers
from edgespec.model.mechanisms.state_cache import StateSizes
from edgespec.model.mechanisms.waiting_keys import NUM_PLACES, place_bytes
from edgespec.model.mechanisms.windows import AttentionWindow, key_sources, layer_windows
from edgespec.model.supported import understanding
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeSettings
from offload.allocated import allocated_bytes
from offload.placement import LayerKeys, Placement
from offload.text_part import decoder_layers, passings

PAGE_BYTES = 4096


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


def held_rows(run_config: RunConfig, tail_rows: int, step_rows: int = STEP_ROWS) -> int:
    """Return the rows of all texts' caches, with so many more for each text's tree."""
    return rows_held(run_config.all_tokens, step_rows) + run_config.num_texts * rows_held(tail_rows, step_rows)


def row_sizes(config: PretrainedConfig, dtype: torch.dtype) -> list[list[int]]:
    """Return the bytes of a row's keys, and of its values, in each layer; none where it keeps none of its own."""
    with understanding(config):
        numbers = layer_numbers(config)
    return [[of * dtype.itemsize for of in numbers.get(layer, ())] for layer in range(config.num_hidden_layers)]


def may_wait(model: PreTrainedModel) -> bool:
    """Return whether a layer's keys and values are read by that layer alone, and once in a pass."""
    config = model.config.get_text_config(decoder=True)
    sources = key_sources(config)
    return passings(model) == 1 and all(sources[layer] == layer for layer in range(config.num_hidden_layers))


def waiting_windows(model: PreTrainedModel) -> dict[int, AttentionWindow]:
    """Return the windows by layer before which no row is brought to a card: none where a family masks by itself."""
    config = model.config.get_text_config(decoder=True)
    with understanding(config):
        return {} if is_text_by_text(model, config) else layer_windows(config)


def layer_keys(model: PreTrainedModel, tree: TreeSettings, run_config: RunConfig) -> LayerKeys:
    """Return what each layer's keys and values take where they stay on a card, and where they wait in RAM."""
    config, num_texts = model.config.get_text_config(decoder=True), run_config.num_texts
    tree_rows = cache_rows(0, tree)[0]
    windows = waiting_windows(model)
    text_rows = -(-held_rows(run_config, tree_rows) // num_texts)
    sizes = row_sizes(config, run_config.dtype)
    bytes_of = [[of * text_rows for of in of_layer] for of_layer in sizes]
    row_bytes = [sum(of_layer) for of_layer in sizes]
    one_place = place_bytes(run_config.context_tokens + tree_rows, max(row_bytes))
    return LayerKeys(
        device_bytes=[num_texts * sum(map(allocated_bytes, of_layer)) for of_layer in bytes_of],
        host_bytes=[num_texts * sum(-(-of // PAGE_BYTES) * PAGE_BYTES for of in of_layer) for of_layer in bytes_of],
        row_bytes=row_bytes,
        rows=run_config.all_tokens,
        window_rows=[
            num_texts * size if (size := windows[layer].size if layer in windows else None) else run_config.all_tokens
            for layer in range(len(sizes))
        ],
        new_rows=num_texts * tree_rows,
        buffer_bytes=allocated_bytes(NUM_PLACES * one_place),
    )


MEMORY_SHARE = 32  # of the device's memory, one part may keep rows, however small the model
_ROWS = ("keys and values", "its own cache", "recurrent states")
_WEIGHTS = ("weights", "resident layers", "embeddings, norms, head")


def most_kept_bytes(placement: Placement, *, num_texts: int) -> int:
    """Return the bytes: those of one text of full length, of the weights, or a share of the memory, what is most.

    So a small model that is planned for long texts does not fill a large memory with what was said. Where weights are
    streamed, reading anew is dear, and all that is planned may keep rows.
    """
    rows_bytes = _sum(placement, _ROWS)
    if not placement.is_resident:
        return rows_bytes
    most_bytes = max(rows_bytes // num_texts, _sum(placement, _WEIGHTS), placement.device_budget_bytes // MEMORY_SHARE)
    return min(rows_bytes, most_bytes)


def _sum(placement: Placement, ends: tuple[str, ...]) -> int:
    uses = (*placement.device_bytes.items(), *placement.host_bytes.items())  # keys and values may wait in RAM
    return sum(num_bytes for use, num_bytes in uses if use.endswith(ends))
