"""The bytes that one pass of a model moves and what it computes, from its skeleton and its placement alone."""

from __future__ import annotations

import math

import torch
from transformers import PretrainedConfig

from edgespec.model.layer_kinds import attention_layers
from edgespec.model.row_chunks import rows_at_once
from edgespec.model.supported import understanding
from edgespec.placement.memory import cache_bytes, resident_bytes
from edgespec.placement.weights import Weights, chosen_experts
from offload.placement import Placement
from offload.skeleton import Skeleton
from profiles.roofline import ModelLoad


def model_load(
    weights: Weights, placement: Placement | None, *, keys: int, num_texts: int, device: torch.device
) -> ModelLoad:
    """Return one model's load for texts of so many `keys`; without a placement all of it is resident.

    A pass is assumed to reach every expert.
    """
    skeleton, dtype = weights.skeleton, weights.dtype
    config = skeleton.model.config.get_text_config(decoder=True)
    num_resident = placement.num_resident if placement else len(skeleton.records)
    disk_bytes = placement.disk_bytes if placement else 0
    unpacked_bytes = dtype.itemsize * sum(math.prod(shape) for shape in _packed_shapes(skeleton))
    if device.type == "cpu":  # converted as they come; resident ones were converted when they were loaded
        unpacked_bytes += sum(record.copied.flat_bytes for record in skeleton.records[num_resident:])
    with understanding(config):
        row_flops = _row_flops(skeleton, config, keys=keys)
    vocab, hidden = skeleton.model.get_output_embeddings().weight.shape
    return ModelLoad(
        num_layers=len(skeleton.records),
        resident_bytes=sum(resident_bytes(record, device=device) for record in skeleton.records[:num_resident]),
        ram_bytes=placement.streamed_bytes - disk_bytes if placement else 0,
        disk_bytes=disk_bytes,
        unpacked_bytes=unpacked_bytes,
        cache_bytes=num_texts * cache_bytes(config, rows=keys, dtype=dtype),
        row_flops=row_flops,
        head_bytes=vocab * hidden * dtype.itemsize,
        head_row_flops=2.0 * vocab * hidden,
        head_rows=rows_at_once(vocab),
    )


def _packed_shapes(skeleton: Skeleton) -> list[tuple[int, ...]]:
    return [weight.shape for module in skeleton.packed for _, weight in module.weights]


def _row_flops(skeleton: Skeleton, config: PretrainedConfig, *, keys: int) -> float:
    """Return the FLOP of one row: 2 a weight that the row meets, and attention over `keys` rows.

    Of experts, the row meets those chosen.
    """
    plain = [
        tensor.shape
        for record in skeleton.records
        for name, tensor in record.tensors.items()
        if "_packed." not in name and len(tensor.shape) > 1
    ]
    num_experts, chosen = chosen_experts(config)
    num_weights = sum(
        math.prod(shape) * (chosen if len(shape) == 3 and shape[0] == num_experts else 1.0)
        for shape in (*plain, *_packed_shapes(skeleton))
    )
    layers = config.per_layer_config
    widths = [  # of all heads of a layer together
        int(of.num_attention_heads) * int(getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads)
        for of in (layers[layer] for layer in attention_layers(config))
    ]
    return 2.0 * num_weights + 4.0 * keys * sum(widths)
