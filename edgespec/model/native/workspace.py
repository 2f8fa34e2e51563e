"""The memory that passes in one call hold besides, in bytes: what a pass takes, and what a plan counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.model.layer_kinds import chosen_experts, kinds_of, num_chosen
from edgespec.model.length_rotation import rotations_of
from edgespec.model.mechanisms.known import key_shape
from edgespec.model.mechanisms.recurrent import KEYLESS
from edgespec.model.native.records import ROW
from edgespec.model.native.shape import DecoderShape, DeltaShape, Gate, Mixture, RouterScores
from edgespec.model.supported import understanding
from offload.native.code import LANES

MOST_ROWS = 80  # of a text in order; more are read as a prompt's
MOST_TOGETHER = 256  # rows of a call: what surrounds them takes memory
FIRST_POSITIONS = 1024  # whose rotations are made at once
FLOAT_BYTES = 4
QUERY_GROWTH = "llama_4_scaling_beta"  # of queries behind the original length, as in Ministral 3


def workspace_sizes(
    shapes: Sequence[DecoderShape], num_rows: int, num_keys: int, max_path: int, num_threads: int
) -> dict[str, int]:
    """Return the bytes of each field of a pass that is memory of its own."""
    row_bytes = {"rows": ROW.num_bytes, "paths": 8 * max_path}
    sizes: dict[str, int] = {}
    for shape in shapes:
        of_rows = {name: num_rows * size for name, size in _row_bytes(shape).items()}
        of_mixture = {} if shape.mixture is None else _of_mixture(shape, shape.mixture, num_rows)
        for name, size in (of_rows | of_mixture).items():
            sizes[name] = max(size, sizes.get(name, 0))
    sizes |= {name: num_rows * size for name, size in row_bytes.items()}
    return sizes | {"scratch": num_threads * scratch_bytes(shapes, num_keys)}


def _row_bytes(shape: DecoderShape) -> dict[str, int]:
    """Return the bytes that a row of a layer takes."""
    names = list(shape.projections)
    if shape.mixture is None:
        names += ["gate", *(name for name in ("up",) if "gate" not in shape.fused)]
    sizes = {name: FLOAT_BYTES * shape.width(name) for name in names}
    sizes |= dict.fromkeys(("residual", "output"), FLOAT_BYTES * shape.hidden)
    if shape.has_gates:
        sizes["gates"] = FLOAT_BYTES * shape.heads * shape.head_dim
    if shape.delta is not None:
        sizes["convolved"] = FLOAT_BYTES * shape.delta.channels
        sizes |= dict.fromkeys(("decays", "rates"), FLOAT_BYTES * shape.delta.padded_heads)
    sizes["rounded"] = shape.row_bytes(max(shape.columns, shape.mixed_columns))
    if shape.mixture is None:
        sizes["active"] = shape.row_bytes(shape.intermediate)
    return sizes


def _of_mixture(shape: DecoderShape, mixture: Mixture, num_rows: int) -> dict[str, int]:
    """Return the bytes that a mixture takes: each row stands with each of its experts."""
    by_expert = {
        "gate": 2 * FLOAT_BYTES * shape.intermediate, "active": mixture.row_bytes(shape.intermediate),
        "gathered": mixture.row_bytes(shape.hidden), "of_experts": FLOAT_BYTES * shape.hidden,
        "chosen": 8, "shares": 4, "slots": 8, "origins": 8, "owners": 8,
    }  # fmt: skip
    sizes = {name: num_rows * mixture.each * size for name, size in by_expert.items()}
    of_rows = {"normed": FLOAT_BYTES * shape.hidden, "logits": FLOAT_BYTES * mixture.logits}
    if mixture.routing.keeps_scores:
        of_rows["scores"] = of_rows["logits"]
    if mixture.shared:
        of_rows |= {
            "shared_gate": FLOAT_BYTES * shape.width("shared_gate"),
            "shared_active": shape.row_bytes(mixture.shared),
            "shared_output": FLOAT_BYTES * shape.hidden,
        }
        if "shared_gate" not in shape.fused:
            of_rows["shared_up"] = FLOAT_BYTES * mixture.shared
        if mixture.has_shared_gate:
            of_rows["shared_shares"] = FLOAT_BYTES
    return sizes | {name: num_rows * size for name, size in of_rows.items()} | {"experts": mixture.list_bytes}


def scratch_bytes(shapes: Sequence[DecoderShape], num_keys: int) -> int:
    """Return the bytes of a thread: floats of a row, or scores."""
    return max(
        max(
            FLOAT_BYTES * shape.columns,
            FLOAT_BYTES * shape.group * (num_keys + ROW.num_bytes)
            if shape.delta is None
            else shape.delta.scratch_bytes(num_keys),
        )
        for shape in shapes
    )


def with_room(num_bytes: int) -> int:
    """Return what is allocated for so many bytes: the next pass may need a few more."""
    return num_bytes + num_bytes // 4


def num_rotated(num_positions: int) -> int:
    """Return of how many positions rotations are made, where so many are needed."""
    return max(FIRST_POSITIONS, 2 * num_positions)


def planned_bytes(config: PretrainedConfig, *, num_rows: int, num_keys: int, max_path: int, num_threads: int) -> int:
    """Return what passes of a decoder hold at most; its products may take rows of float32. Others' hold nothing."""
    shapes = _planned_shapes(config)
    if not shapes:
        return 0
    sizes = workspace_sizes(shapes, min(num_rows, MOST_TOGETHER), num_keys, max_path, num_threads)
    rotated = round(shapes[0].head_dim * float(_rotation(config).get("partial_rotary_factor") or 1))
    is_partly = not all(getattr(config, "no_rope_layers", None) or [True])
    num_tables = (1 + bool(rotations_of(config))) * (len(set(kinds_of(config)) - KEYLESS) + is_partly)
    columns = rotated + (LANES if QUERY_GROWTH in _rotation(config) else 0)
    rotations = num_tables * num_rotated(num_keys) * columns * FLOAT_BYTES
    return sum(map(with_room, sizes.values())) + rotations


def _rotation(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of a decoder's only rotation; nothing where kinds of layers have their own."""
    return getattr(config, "rope_parameters", None) or {}


def _planned_shapes(config: PretrainedConfig) -> list[DecoderShape]:
    """Return the sizes of a decoder's layers as its configuration states them; none where it states no such ones."""
    try:
        with understanding(config):
            num_experts, _ = chosen_experts(config)
            of_experts = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
            sizes = (config.hidden_size, config.intermediate_size, of_experts, config.num_attention_heads)
            keys = key_shape(config, 0)
    except EdgespecError:  # of a state, of layers that differ, or under other names
        return []
    if not all(isinstance(size, int) for size in sizes):
        return []
    dense = DecoderShape(
        hidden=config.hidden_size, intermediate=config.intermediate_size, heads=config.num_attention_heads,
        key_heads=keys.heads, head_dim=keys.key_width, rotated=keys.key_width, eps=0.0, scale=0.0, softcap=0.0,
        activation="", has_sinks=False, has_head_norms=False, has_norms_after=False, is_bf16=False,
        rounds=False,
    )  # fmt: skip
    delta = _planned_delta(config)
    of_mixers = [dense] if delta is None else [replace(dense, has_gates=True), replace(dense, heads=0, delta=delta)]
    if not num_experts:
        return of_mixers
    shared = getattr(config, "shared_expert_intermediate_size", None)
    if shared is None:
        shared = of_experts * (getattr(config, "n_shared_experts", None) or 0)
    mixture = Mixture(
        experts=num_experts, each=num_chosen(config), routing=RouterScores(is_sigmoid=True), rounds=False, gate=Gate(),
        has_biases=False, has_router_bias=False, is_router_bf16=False, shared=shared, has_shared_gate=shared > 0,
    )  # fmt: skip
    kinds = getattr(config, "mlp_layer_types", None) or ()
    has_dense = getattr(config, "first_k_dense_replace", 0) or getattr(config, "mlp_only_layers", None)
    of_mixture = [replace(shape, intermediate=of_experts, mixture=mixture) for shape in of_mixers]
    return [*of_mixers, *of_mixture] if has_dense or "dense" in kinds else of_mixture


def _planned_delta(config: PretrainedConfig) -> DeltaShape | None:
    """Return the sizes of gated delta rules, where layers have one."""
    if "linear_attention" not in kinds_of(config) or not getattr(config, "linear_num_key_heads", None):
        return None
    return DeltaShape(
        key_heads=config.linear_num_key_heads, heads=config.linear_num_value_heads,
        key_width=config.linear_key_head_dim, value_width=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim, in_groups=False, is_weight_bf16=False, is_wide=False, eps=0.0,
    )  # fmt: skip
