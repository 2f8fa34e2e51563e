"""Gemma 3n and 4: their layers differ, share keys and values, and get an input of their own beside the last layer's."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch

from offload.gguf.family import BASE_OF_WINDOWS, GEMMA, HEAD_DIM, HEAD_NORMS, KEY_HEADS, LAST_CAP, WINDOW, Family
from offload.gguf.header import GgufHeader
from offload.gguf.numbers import wrong_value
from offload.gguf.parts import named, one_of
from offload.gguf.rules import PATTERN, SEES_ALL, soft_caps, two_rotations, windows

INPUTS_OUTSIDE = {
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
INPUTS_INSIDE = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
STREAMS = {
    "altup_correct_scale": "altup.correct_output_scale", "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm", "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
SETTINGS = {
    **HEAD_DIM, **WINDOW, **LAST_CAP, **BASE_OF_WINDOWS, "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}  # fmt: skip
LENGTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")  # of a head
SPARSITY = "activation_sparsity_scale"


def layers_that_see_all(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take what layers that see all have of their own, and leave what layers with a window have."""
    pattern, shared = own[PATTERN], own.get("attention.shared_kv_layers", 0)
    if not isinstance(pattern, list) or len(pattern) != own["block_count"] or shared not in range(len(pattern)):
        return
    lengths = [own.get(part) for part in LENGTHS]
    if type(lengths[0]) is int and lengths == lengths[:1] * len(LENGTHS):
        fields["global_head_dim"] = lengths[0]
        own |= {part: own.pop(f"{part}_swa", lengths[0]) for part in LENGTHS}
    heads, widths = own.get(KEY_HEADS), own["feed_forward_length"]
    if isinstance(heads, list) and len(heads) == len(pattern):
        has_window = list(zip(heads, pattern, strict=True))
        of_windows, of_all = ({count for count, window in has_window if window is kind} for kind in (True, False))
        if len(of_windows) == len(of_all) == 1:
            (own[KEY_HEADS],), (fields["num_global_key_value_heads"],) = of_windows, of_all
    if isinstance(widths, list) and len(widths) == len(pattern):
        narrow = widths[0]
        if widths == [narrow] * (len(pattern) - shared) + [2 * narrow] * shared:
            own["feed_forward_length"], fields["use_double_wide_mlp"] = narrow, True


def values_of_keys(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Find whether layers that see all have no values but their keys: a file has values for them or not."""
    num_own = fields["num_hidden_layers"] - fields.get("num_kv_shared_layers", 0)
    seen = [
        f"blk.{layer}.attn_v.weight"
        for layer, kind in enumerate(fields.get("layer_types", [])[:num_own])
        if kind == SEES_ALL
    ]
    fields["attention_k_eq_v"] = not any(name in header.tensors for name in seen)


def kinds_that_are_shared(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise CheckpointError where layers take the keys of another one, and there is none of their kind."""
    kinds, count = fields.get("layer_types", []), fields["num_kv_shared_layers"]
    num_own = len(kinds) - count
    if num_own < 0 or not {*kinds[num_own:]} <= {*kinds[:num_own]}:
        what = f"a number of layers of kinds ({PATTERN}) that earlier layers have"
        raise wrong_value(header, "attention.shared_kv_layers", count, what)


def streams(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise CheckpointError for another number of streams than there are matrices between them and the first."""
    matrices, count = header.tensors.get("altup_proj.weight"), fields.setdefault("altup_num_inputs", 4)
    if matrices is not None and matrices.shape[0] + 1 != count:
        what = f"one more than the {matrices.shape[0]} matrices of '{matrices.name}'"
        raise wrong_value(header, "altup.num_inputs", count, what)


def a_cap(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise CheckpointError for logits that are not capped, which transformers' code has not."""
    if fields.get("final_logit_softcapping") == 0:
        raise wrong_value(header, "final_logit_softcapping", 0.0, "a fraction above 0")


def inputs_of_layers(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Find the number of tokens that have an input of each layer."""
    table = header.tensors.get("per_layer_token_embd.weight")
    if table is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]


def widths_and_sparsity(_: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take each layer's width, and the share of its inner numbers that is dropped: a file has the cut that makes it."""
    widths, cuts = own.get("feed_forward_length"), own.get(SPARSITY)
    if isinstance(widths, list) and len(widths) == own["block_count"]:
        fields["intermediate_size"] = own.pop("feed_forward_length")
    if isinstance(cuts, list) and len(cuts) == own["block_count"]:
        shares = [_share_below(cut) for cut in cuts]
        if None not in shares:
            fields["activation_sparsity_pattern"] = shares
            del own[SPARSITY]


def _share_below(cut: float) -> float | None:
    """Return the share of a normal distribution below a float32, with the fewest digits; None where there is none."""
    if cut == -math.inf:
        return 0.0
    normal, exact = torch.distributions.Normal(0.0, 1.0), NormalDist().cdf(cut)
    shares = [float(f"{exact:.{digits}g}") for digits in range(1, 10)]
    found = normal.icdf(torch.tensor(shares, dtype=torch.float32)).tolist()
    return next((share for share, value in zip(shares, found, strict=True) if value == cut), None)


def rank_of_laurel(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Find the rank of the layers' second way."""
    left = header.tensors.get("blk.0.laurel_l.weight")
    if left is not None:
        fields["laurel_rank"] = left.shape[0]


GEMMA_4 = Family(
    model_type="gemma4_text",
    outside=INPUTS_OUTSIDE,
    names={**HEAD_NORMS, **GEMMA, **INPUTS_INSIDE, "layer_output_scale": "layer_scalar"},
    bare=frozenset({"layer_output_scale"}),
    biases=frozenset(),
    settings=SETTINGS,
    needs=frozenset({*WINDOW, PATTERN, "embedding_length_per_layer_input"}),
    fixed={"rope_local_base_freq": 10000.0, "num_kv_shared_layers": 0},
    first=(layers_that_see_all,),
    scalings=("proportional",),
    rules=(windows(every=6), kinds_that_are_shared, two_rotations, soft_caps, inputs_of_layers, values_of_keys),
)
EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
GEMMAS_BY_LAYER = {
    "gemma3n": Family(
        model_type="gemma3n_text",
        outside={
            **INPUTS_OUTSIDE,
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
        names={**HEAD_NORMS, **GEMMA, **INPUTS_INSIDE, **STREAMS},
        bare=frozenset({"altup_correct_scale"}),
        biases=frozenset(),
        settings={**SETTINGS, "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs"},
        needs=frozenset(WINDOW),
        fixed={"rope_local_base_freq": 10000.0, "num_kv_shared_layers": 0},
        first=(widths_and_sparsity,),
        rules=(
            windows(every=5),
            kinds_that_are_shared,
            two_rotations,
            a_cap,
            streams,
            inputs_of_layers,
            rank_of_laurel,
        ),
    ),
    "gemma4": GEMMA_4,
    "gemma4 with experts": replace(
        GEMMA_4,
        names={
            **GEMMA_4.names,
            "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        parts={
            "ffn_gate_inp.scale": named("router.scale"),
            "ffn_gate_up_exps.weight": one_of("experts.gate_up_proj", 0, leaf=""),
            "ffn_gate_exps.weight": one_of("experts.gate_up_proj", 0, 2, leaf=""),
            "ffn_up_exps.weight": one_of("experts.gate_up_proj", 1, 2, leaf=""),
            "ffn_down_exps.weight": one_of("experts.down_proj", 0, leaf=""),
            "ffn_down_exps.scale": named("router.per_expert_scale"),
        },
        settings={**GEMMA_4.settings, **EXPERTS},
        needs=GEMMA_4.needs | set(EXPERTS),
        fixed={**GEMMA_4.fixed, "enable_moe_block": True},
    ),
}
