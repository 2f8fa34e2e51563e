"""What a decoder's layers are made of, found by their parts: none is known by its family's name.

A layer is known whose attention and MLP have the parts below and no others, each behind a norm by the root of the mean
square. Whether its forward does with them what the text of a pass does, a trial shows (`passes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.native.delta_layer import delta_mixer
from edgespec.model.native.mlp import dense_mlp, linear_of, mixture_of, part_names
from edgespec.model.native.shape import FUSED, DecoderShape, TakenFeature
from offload.native.weights import NativeWeight, native_weight

OF_ATTENTION = ("query", "key", "value", "output")
FUSED_WITH = {names[0]: names[1] for names in FUSED.values()}
# The field of a layer's record for each norm, where there are two of them, and where there are four
BEFORE = {"input_layernorm": "before_attention", "post_attention_layernorm": "before_mlp"}
AROUND = {
    "input_layernorm": "before_attention", "post_attention_layernorm": "after_attention",
    "pre_feedforward_layernorm": "before_mlp", "post_feedforward_layernorm": "after_mlp",
}  # fmt: skip
MOST_KINDS = 3  # of layers: each has a text of its own
OF_HEAD = {  # a head's first layer, which takes a feature
    "input_layernorm": "before_attention", "hidden_norm": "of_feature", "post_attention_layernorm": "before_mlp",
}  # fmt: skip
HEAD_NORMS = {"q_norm": "query_norm", "k_norm": "key_norm"}
NEAR = 0.03  # of a number that a norm makes: two roundings of bf16 are less


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """The numbers of one layer."""

    kind: int  # of the decoder's shapes
    weights: dict[str, NativeWeight]  # by product
    biases: dict[str, Tensor]  # float32, by product
    # By its field of a layer's record: what a norm multiplies by, sinks, and a router's weight; float32 but for that
    parts: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDecoder:
    """The numbers of all layers, and the shapes that these have."""

    shapes: tuple[DecoderShape, ...]  # the first layer's first
    layers: Sequence[NativeLayer]
    last_norm: Tensor | None


def native_decoder(
    decoder: nn.Module, layers: Sequence[nn.Module], config: PretrainedConfig, *, dtype: torch.dtype, rotated: int,
    factor_columns: int,
) -> NativeDecoder | None:  # fmt: skip
    """Return a decoder's numbers; None where a layer has other parts, or its weights lie in another way."""
    norm = getattr(decoder, "norm", None)
    is_none = isinstance(norm, nn.Identity)  # of a head whose outputs are normed where they are read
    last = _Norm.of(layers[0]._modules.get("input_layernorm") if is_none else norm)
    if last is None or dtype not in {torch.bfloat16, torch.float32}:
        return None
    found: list[NativeLayer] = []
    shapes: dict[DecoderShape, int] = {}
    for layer in layers:
        known = _layer(layer, config, is_bf16=dtype == torch.bfloat16, rotated=rotated, eps=last.eps)
        if known is None or not known[1].fits:
            return None
        shape = replace(known[1], has_last_norm=not is_none, factor_columns=factor_columns)
        found.append(replace(known[0], kind=shapes.setdefault(shape, len(shapes))))
    # What one layer hands to the next
    in_common = {(shape.hidden, shape.rounds) for shape in shapes}
    of_keys = {(shape.key_heads, shape.head_dim) for shape in shapes if shape.delta is None}
    takes_later = any(shape.feature is not None for shape in list(shapes)[1:])
    if len(in_common) != 1 or len(of_keys) > 1 or len(shapes) > MOST_KINDS or takes_later:
        return None
    return NativeDecoder(shapes=tuple(shapes), layers=found, last_norm=None if is_none else last.factor)


def _layer(
    layer: nn.Module, config: PretrainedConfig, *, is_bf16: bool, rotated: int, eps: float
) -> tuple[NativeLayer, DecoderShape] | None:
    parts = part_names(layer)
    name = "self_attn" if "self_attn" in parts else "linear_attn"
    fields = next((fields for fields in (BEFORE, AROUND, OF_HEAD) if parts == {*fields, name, "mlp"}), None)
    is_scaled = getattr(layer, "scale", 1.0) != 1  # as a block drafter's first layer may be
    if fields is None or is_scaled:
        return None
    mixer, mlp = layer.get_submodule(name), layer.get_submodule("mlp")
    if name == "self_attn":
        delta, of_mixer = None, linear_of(mixer, OF_ATTENTION)
    else:
        delta = delta_mixer(mixer, torch.bfloat16 if is_bf16 else torch.float32)
        of_mixer = None if delta is None else delta.linear
    of_mlp = mixture_of(mlp) if "experts" in part_names(mlp) else dense_mlp(mlp)
    if of_mixer is None or of_mlp is None:
        return None
    others = {part for part in part_names(mixer) if delta is None and mixer._modules.get(part) not in of_mixer.values()}
    head_norms = others - {"sinks"}
    if head_norms not in (set(), set(HEAD_NORMS)):
        return None
    linear = of_mixer | of_mlp.linear
    norms = {field: _Norm.of(layer._modules[part]) for part, field in fields.items()}
    norms |= {HEAD_NORMS[part]: _Norm.of(mixer._modules[part]) for part in head_norms}
    weights = {product: native_weight(module) for product, module in linear.items()} | of_mlp.experts
    known = {field: norm for field, norm in norms.items() if norm is not None and norm.eps == eps}
    multiplied = {product: weight for product, weight in weights.items() if weight is not None}
    if len(known) < len(norms) or len(multiplied) < len(weights) or of_mlp.activation is None:
        return None
    if len({multiplied[product].takes_rounded for product in linear}) > 1:
        return None
    feature = None
    if fields is OF_HEAD:
        if not isinstance(getattr(layer, "norm_before_residual", None), bool):
            return None
        feature = TakenFeature(is_first=bool(layer.has_feature_first), is_normed=bool(layer.norm_before_residual))
    fused = frozenset(product for product, other in FUSED_WITH.items() if product in linear and other not in linear)
    shape = DecoderShape(
        hidden=multiplied["output"].rows,
        intermediate=multiplied["down"].columns,
        eps=eps,
        activation=of_mlp.activation,
        has_sinks="sinks" in others,
        has_head_norms=bool(head_norms),
        has_norms_after=fields is AROUND,
        is_bf16=is_bf16,
        rounds=multiplied["output"].takes_rounded,
        fused=fused,
        mixture=of_mlp.mixture,
        feature=feature,
        delta=None if delta is None else delta.shape,
        **(_no_heads() if delta is not None else _heads(mixer, multiplied, config, rotated=rotated)),
    )
    sizes = {product: (multiplied[product].rows, multiplied[product].columns) for product in shape.projections}
    if sizes != {product: (shape.width(product), shape.columns) for product in shape.projections}:
        return None
    biases = _biases_of(linear, shape)
    held = {field: norm.factor for field, norm in known.items()} | of_mlp.parts | ({} if delta is None else delta.parts)
    if shape.has_sinks:
        held["sinks"] = mixer.get_parameter("sinks").detach().float().contiguous()
    found = NativeLayer(kind=0, weights=multiplied, biases=biases | of_mlp.biases, parts=held)
    return found, replace(shape, biases=frozenset(biases))


def _heads(
    attention: nn.Module, multiplied: Mapping[str, NativeWeight], config: PretrainedConfig, *, rotated: int
) -> dict[str, Any]:
    """Return the fields of a shape that are of attention's heads."""
    heads, query = int(config.num_attention_heads), multiplied["query"]
    head_dim = multiplied["output"].columns // heads
    of_heads = heads * head_dim
    has_gates = "key" in multiplied and query.rows == 2 * of_heads
    of_keys = 2 * multiplied["key"].rows if "key" in multiplied else query.rows - of_heads
    return {
        "heads": heads,
        "key_heads": of_keys // (2 * head_dim),
        "head_dim": head_dim,
        "rotated": rotated,
        "scale": float(getattr(attention, "scaling", head_dim**-0.5)),
        "softcap": float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        "has_gates": has_gates,
    }


def _no_heads() -> dict[str, Any]:
    return {"heads": 0, "key_heads": 0, "head_dim": 0, "rotated": 0, "scale": 0.0, "softcap": 0.0}


def _biases_of(linear: Mapping[str, nn.Module], shape: DecoderShape) -> dict[str, Tensor]:
    """Return what products add, float32, each the own one of those that are fused."""
    found: dict[str, Tensor] = {}
    for name, module in linear.items():
        bias = module._parameters.get("bias")
        if bias is not None:
            names = FUSED[name] if name in shape.fused else (name,)
            sizes = [shape.part_width(one) for one in names] if len(names) > 1 else [len(bias)]
            found |= dict(zip(names, bias.detach().float().split(sizes), strict=True))
    return {name: bias.contiguous() for name, bias in found.items()}


@dataclass(frozen=True, slots=True)
class _Norm:
    """What a norm by the root of the mean square multiplies by."""

    factor: Tensor
    eps: float

    @staticmethod
    def of(module: nn.Module | None) -> _Norm | None:
        """Return the norm of a module: in some families its weight counts from one."""
        weight = None if module is None else module._parameters.get("weight")
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if module is None or weight is None or not isinstance(eps, float) or weight.is_meta:
            return None
        sample = torch.linspace(-1, 3, weight.shape[0]).to(weight.dtype)
        rows = sample.float() * torch.rsqrt(sample.float().square().mean() + eps)
        with torch.no_grad():
            found = module(sample[None])[0].float()
        factors = [start + weight.detach().float() for start in (0, 1)]
        # A column's own share: the trained weights of one norm lie between hundredths and hundreds
        errors = [((rows * factor - found) / (rows * (1 + factor.abs()))).abs() for factor in factors]
        factor, error = min(zip(factors, errors, strict=True), key=lambda pair: float(pair[1].nanmean()))
        return _Norm(factor.contiguous(), eps) if float(error.nan_to_num().max()) < NEAR else None
