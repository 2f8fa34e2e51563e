"""The bytes that one pass of a model moves and what it computes, from its skeleton and its placement alone."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from edgespec.draft.own_parts import lent_layers
from edgespec.model.layer_kinds import chosen_experts
from edgespec.model.mechanisms.known import attention_layers, key_shape
from edgespec.model.mechanisms.windows import layer_reaches
from edgespec.model.own_pass_model import UNCACHED
from edgespec.model.row_chunks import rows_at_once
from edgespec.model.supported import understanding
from edgespec.pair.tree_support import tree_support
from edgespec.placement.cache_memory import cache_bytes
from edgespec.placement.expert_load import dense_part, expert_modules, kept_experts, mixture_sizes, packed_modules
from edgespec.placement.memory import resident_bytes
from edgespec.placement.plain_memory import cache_sizes
from edgespec.placement.traffic import between_bytes
from edgespec.placement.weights import Weights
from offload.layer_store import LayerRecord
from offload.packed_weight import PackedModule
from offload.placement import OUTSIDE_INDEX, Placement
from offload.text_part import passings
from offload.unpacked_once import added_bytes, packed_outside, unpacked_modules
from profiles.roofline import ModelLoad, PackedLoad


def with_locked(load: ModelLoad, locked_bytes: float) -> ModelLoad:
    """Return the load where no more than so many bytes of layers, or of experts, can be locked."""
    staged_bytes = max(0, load.ram_bytes - int(min(locked_bytes, load.ram_bytes)))
    experts = load.experts
    if experts is not None:
        in_ram = experts.num_layers * (experts.ram_kept - experts.device_kept) * experts.expert_bytes
        experts = replace(experts, are_staged=not experts.is_on_host and in_ram > locked_bytes)
    return replace(load, staged_bytes=staged_bytes, experts=experts)


def model_load(
    weights: Weights, placement: Placement | None, *, keys: int, num_texts: int, device: torch.device
) -> ModelLoad:
    """Return one model's load for texts of this many `keys`; without a placement all of it is resident, as drafts are.

    Rows read only the experts that they need; where whole layers stream, a pass reaches all experts.
    """
    sizes = mixture_sizes(weights, device)
    if placement is not None and not placement.is_resident and placement.experts is None:
        sizes = None
    load = layers_load(weights, placement, keys=keys, num_texts=num_texts, device=device, are_whole=sizes is None)
    if sizes is None:
        return load
    experts = replace(sizes.experts, in_layers=device.type == "cuda")
    if placement is None:
        return replace(load, resident_bytes=sum(sizes.dense_bytes), experts=experts)
    resident_bytes = sum(sizes.dense_bytes[layer] for layer in placement.resident_layers)
    ram_bytes = sum(sizes.dense_bytes[layer] for layer in placement.pinned_layers)
    return replace(
        load,
        resident_bytes=resident_bytes,
        ram_bytes=ram_bytes,
        disk_bytes=sum(sizes.dense_bytes) - resident_bytes - ram_bytes,
        experts=kept_experts(sizes.experts, placement.experts) if placement.experts else experts,
    )


def layers_load(
    weights: Weights, placement: Placement | None, *, keys: int, num_texts: int, device: torch.device, are_whole: bool
) -> ModelLoad:
    """Return the load of whole layers, or of their dense rest; bytes are those of whole layers."""
    skeleton, dtype = weights.skeleton, weights.dtype
    config = skeleton.model.config.get_text_config(decoder=True)
    resident = placement.resident_layers if placement else frozenset(range(len(skeleton.records)))
    disk_bytes = placement.disk_bytes if placement else 0
    left_out = () if are_whole else expert_modules(weights)
    records = [dense_part(record, left_out) for record in skeleton.records]
    outside = packed_outside(skeleton)
    packed = [module for module in packed_modules(skeleton, left_out, of_experts=False) if module not in outside]
    at_load = [record for record in skeleton.records if placement and record.index in placement.unpacked]
    done = {module for record in at_load for module in unpacked_modules(skeleton, record, device)}
    unpacked = [module for module in packed if module in done or module.kernel(dtype, device) is None]
    unpacked_bytes = dtype.itemsize * sum(module.num_weights for module in unpacked if module not in done)
    if device.type == "cpu":  # converted as they come; resident ones were converted when they were loaded
        unpacked_bytes += sum(record.copied.flat_bytes for record in records if record.index not in resident)
    times = passings(skeleton.model)
    with understanding(config):
        row_flops = _row_flops(records, unpacked, config, keys=keys, times=times)
        row_flops *= keys if config.model_type in UNCACHED else 1  # or less: BLT's patches are fewer than its bytes
    vocab, hidden = skeleton.model.get_output_embeddings().weight.shape
    once = ModelLoad(
        num_layers=len(skeleton.records),
        resident_bytes=sum(resident_bytes(skeleton.records[layer], device=device) for layer in resident)
        + sum(
            added_bytes(skeleton, [record], device, in_slow_layouts=placement is None or record.index in placement.slow)
            for record in at_load
        ),
        ram_bytes=placement.streamed_bytes - disk_bytes if placement else 0,
        disk_bytes=disk_bytes,
        unpacked_bytes=unpacked_bytes,
        between_bytes=sum(between_bytes(module, dtype, device) for module in unpacked),
        cache_bytes=num_texts * _text_bytes(weights, keys=keys),
        waiting_bytes=placement.moved_keys_bytes(num_texts * keys) if placement else 0,
        row_flops=row_flops,
        head_bytes=vocab * hidden * dtype.itemsize,
        head_row_flops=2.0 * vocab * hidden,
        head_rows=rows_at_once(vocab),
        multiplied=_multiplied([module for module in packed if module not in done], dtype, device),
    )
    load = once if times == 1 else _repeated(once, times)
    if placement is None or OUTSIDE_INDEX in placement.unpacked:
        return load
    heads = unpacked_modules(skeleton, skeleton.outside, device)
    heads_bytes = dtype.itemsize * sum(module.num_weights for module in heads)
    return replace(load, unpacked_bytes=load.unpacked_bytes + heads_bytes)


def moved_bytes(weights: Weights, placement: Placement) -> int:
    """Return the bytes that a pass reads or copies."""
    return round(passings(weights.skeleton.model) * placement.streamed_bytes) + placement.keys_bytes


def _repeated(once: ModelLoad, times: float) -> ModelLoad:
    """Return the load of layers that a pass runs so often: those that stream come again each time.

    All layers count alike: those that stay and those that stream are spread evenly over the stacks.
    """
    by_layer = ("num_layers", "resident_bytes", "ram_bytes", "disk_bytes", "unpacked_bytes", "between_bytes")
    numbers = {name: round(times * getattr(once, name)) for name in by_layer}
    of_packed = ("num_weights", "num_bytes", "unpacked_bytes")
    packed = [
        replace(each, **{name: round(times * getattr(each, name)) for name in of_packed}) for each in once.multiplied
    ]
    return replace(once, **numbers, multiplied=tuple(packed))


def _text_bytes(weights: Weights, *, keys: int) -> int:
    """Return the bytes that a pass reads of a text of so many rows: keys and values, or a cache of the family's own."""
    model = weights.skeleton.model
    if weights.model.is_language_model and tree_support(weights.model).has_own_passes:
        fixed_bytes, row_bytes = cache_sizes(model, weights.dtype)
        return fixed_bytes + keys * row_bytes
    config = model.config.get_text_config(decoder=True)
    if not lent_layers(model):
        return cache_bytes(config, rows=keys, dtype=weights.dtype)
    # Of its target's, each of an assistant's layers reads those that it sees
    shapes = [key_shape(config, layer) for layer in range(config.num_hidden_layers)]
    rows = [min(keys, window.size or keys) for window in layer_reaches(config)]
    read = [count * of.heads * (of.key_width + of.value_width) for count, of in zip(rows, shapes, strict=True)]
    return sum(read) * weights.dtype.itemsize


def _multiplied(packed: Sequence[PackedModule], dtype: torch.dtype, device: torch.device) -> tuple[PackedLoad, ...]:
    """Return the load of packed weights that kernels multiply, by format and by the rows that a kernel takes."""
    found: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for module in packed:
        kernel = module.kernel(dtype, device)
        if kernel is not None:
            (_, weight), *_ = module.weights
            sums = found[weight.packing.name, kernel.max_rows]
            sums[0] += module.num_weights
            sums[1] += weight.num_bytes
    return tuple(
        PackedLoad(
            packed_format=name,
            num_weights=num_weights,
            num_bytes=num_bytes,
            unpacked_bytes=num_weights * dtype.itemsize,
            max_rows=max_rows,
        )
        for (name, max_rows), (num_weights, num_bytes) in found.items()
    )


def _row_flops(
    records: Sequence[LayerRecord],
    unpacked: Sequence[PackedModule],
    config: PretrainedConfig,
    *,
    keys: int,
    times: float,
) -> float:
    """Return the FLOP of one row: 2 a weight that the row meets, so many `times`, and attention over `keys` rows.

    Of experts, the row meets those chosen. Packed weights count where they are `unpacked`.
    """
    packed = [weight.shape for module in unpacked for _, weight in module.weights]
    plain = [
        tensor.shape
        for record in records
        for name, tensor in record.tensors.items()
        if "_packed." not in name and len(tensor.shape) > 1
    ]
    num_experts, chosen = chosen_experts(config)
    num_weights = sum(
        math.prod(shape) * (chosen if len(shape) == 3 and shape[0] == num_experts else 1.0)
        for shape in (*plain, *packed)
    )
    layers = config.per_layer_config
    widths = [  # of all heads of a layer together
        int(of.num_attention_heads) * int(getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads)
        for of in (layers[layer] for layer in attention_layers(config))
        if getattr(of, "num_attention_heads", None)  # a family that is decoded plainly may have none
    ]
    return 2.0 * times * num_weights + 4.0 * keys * sum(widths)
