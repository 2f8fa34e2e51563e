"""The memory that passes in one call hold besides, in bytes: what a pass takes, and what a plan counts."""

from __future__ import annotations

from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.model.layer_kinds import chosen_experts, kinds_of, num_chosen
from edgespec.model.mechanisms.known import key_shape
from edgespec.model.native.records import ROW
from edgespec.model.native.shape import DecoderShape, Gate, Mixture
from edgespec.model.supported import understanding

MOST_ROWS = 80  # of a text in order; more are read as a prompt's
MOST_TOGETHER = 256  # rows of a call: what surrounds them takes memory
FIRST_POSITIONS = 1024  # whose rotations are made at once
FLOAT_BYTES = 4


def workspace_sizes(
    shape: DecoderShape, num_rows: int, num_keys: int, max_path: int, num_threads: int
) -> dict[str, int]:
    """Return the bytes of each field of a pass that is memory of its own."""
    heads, key_heads = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    row_bytes = {
        "residual": FLOAT_BYTES * shape.hidden, "output": FLOAT_BYTES * shape.hidden,
        "query": FLOAT_BYTES * heads, "key": FLOAT_BYTES * key_heads, "value": FLOAT_BYTES * key_heads,
        "rounded": shape.row_bytes(max(shape.hidden, heads)), "rows": ROW.num_bytes, "paths": 8 * max_path,
    }  # fmt: skip
    if shape.mixture is None:
        row_bytes |= dict.fromkeys(("gate", "up"), FLOAT_BYTES * shape.intermediate)
        row_bytes["active"] = shape.row_bytes(shape.intermediate)
    sizes = {name: num_rows * size for name, size in row_bytes.items()}
    sizes["scratch"] = num_threads * scratch_bytes(shape, num_keys)
    return sizes if shape.mixture is None else sizes | _of_mixture(shape, shape.mixture, num_rows)


def _of_mixture(shape: DecoderShape, mixture: Mixture, num_rows: int) -> dict[str, int]:
    """Return the bytes that a mixture takes: each row stands with each of its experts."""
    by_expert = {
        "gate": 2 * FLOAT_BYTES * shape.intermediate, "active": mixture.row_bytes(shape.intermediate),
        "gathered": mixture.row_bytes(shape.hidden), "of_experts": FLOAT_BYTES * shape.hidden,
        "chosen": 8, "shares": 4, "slots": 8, "origins": 8, "owners": 8,
    }  # fmt: skip
    sizes = {name: num_rows * mixture.each * size for name, size in by_expert.items()}
    of_rows = {"normed": FLOAT_BYTES * shape.hidden, "logits": FLOAT_BYTES * mixture.logits}
    return sizes | {name: num_rows * size for name, size in of_rows.items()} | {"experts": mixture.list_bytes}


def scratch_bytes(shape: DecoderShape, num_keys: int) -> int:
    """Return the bytes of a thread: floats of a row, or scores."""
    return FLOAT_BYTES * max(shape.hidden, shape.group * (num_keys + ROW.num_bytes))


def with_room(num_bytes: int) -> int:
    """Return what is allocated for so many bytes: the next pass may need a few more."""
    return num_bytes + num_bytes // 4


def num_rotated(num_positions: int) -> int:
    """Return of how many positions rotations are made, where so many are needed."""
    return max(FIRST_POSITIONS, 2 * num_positions)


def planned_bytes(config: PretrainedConfig, *, num_rows: int, num_keys: int, max_path: int, num_threads: int) -> int:
    """Return what passes of a decoder hold at most; its products may take rows of float32. Others' hold nothing."""
    shape = _planned_shape(config)
    if shape is None:
        return 0
    sizes = workspace_sizes(shape, min(num_rows, MOST_TOGETHER), num_keys, max_path, num_threads)
    rotations = len(set(kinds_of(config))) * num_rotated(num_keys) * shape.head_dim * FLOAT_BYTES
    return sum(map(with_room, sizes.values())) + rotations


def _planned_shape(config: PretrainedConfig) -> DecoderShape | None:
    """Return the sizes of a decoder's layers as its configuration states them; None where it states no such ones."""
    try:
        with understanding(config):
            num_experts, _ = chosen_experts(config)
            wide = getattr(config, "moe_intermediate_size", None) if num_experts else None
            wide = wide or config.intermediate_size
            sizes = (config.hidden_size, wide, config.num_attention_heads)
            keys = key_shape(config, 0)
    except EdgespecError:  # of a state, of layers that differ, or under other names
        return None
    if not all(isinstance(size, int) for size in sizes):
        return None
    mixture = None
    if num_experts:
        mixture = Mixture(
            experts=num_experts, each=num_chosen(config), renormalises=False, rounds=False, gate=Gate(),
            has_biases=False, has_router_bias=False,
        )  # fmt: skip
    return DecoderShape(
        hidden=config.hidden_size, intermediate=wide, heads=config.num_attention_heads, key_heads=keys.heads,
        head_dim=keys.key_width, rotated=keys.key_width, eps=0.0, scale=0.0, softcap=0.0, activation="",
        has_sinks=False, has_head_norms=False, has_norms_after=False, biases=frozenset(), is_bf16=False, rounds=False,
        mixture=mixture,
    )  # fmt: skip
