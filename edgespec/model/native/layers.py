"""What a decoder's layers are made of, found by their parts: none is known by its family's name.

A layer is known whose attention and MLP have the parts below and no others, each behind a norm by the root of the mean
square. Whether its forward does with them what the text of a pass does, a trial shows (`passes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers import PretrainedConfig

from edgespec.model.native.records import PRODUCTS
from edgespec.model.native.shape import DecoderShape, Gate, Mixture
from offload.native.rounded_rows import COLUMNS
from offload.native.weights import NativeWeight, dense_weight, native_weight, of_experts

LINEAR = dict(zip(PRODUCTS, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), strict=True))
OF_ATTENTION, OF_MLP = PRODUCTS[:4], PRODUCTS[4:]
# The field of a layer's record for each norm, where there are two of them, and where there are four
BEFORE = {"input_layernorm": "before_attention", "post_attention_layernorm": "before_mlp"}
AROUND = {
    "input_layernorm": "before_attention", "post_attention_layernorm": "after_attention",
    "pre_feedforward_layernorm": "before_mlp", "post_feedforward_layernorm": "after_mlp",
}  # fmt: skip
OF_EXPERTS = {"gate": "gate_up_proj", "down": "down_proj"}
SAMPLE_ROWS, NEAR = 3, 0.02  # of a router's: shares in bf16
HEAD_NORMS = {"q_norm": "query_norm", "k_norm": "key_norm"}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": lambda rows: gelu(rows, approximate="tanh")}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """The numbers of one layer."""

    weights: dict[str, NativeWeight]  # by product
    biases: dict[str, Tensor]  # float32, by product
    # By its field of a layer's record: what a norm multiplies by, sinks, and a router's weight; float32 but for that
    parts: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDecoder:
    """The numbers of all layers, and the shape that they have in common."""

    shape: DecoderShape
    layers: Sequence[NativeLayer]
    last_norm: Tensor


def native_decoder(
    decoder: nn.Module, layers: Sequence[nn.Module], config: PretrainedConfig, *, dtype: torch.dtype, rotated: int
) -> NativeDecoder | None:
    """Return a decoder's numbers; None where a layer has other parts, or its weights lie in another way."""
    last = _Norm.of(getattr(decoder, "norm", None))
    if last is None or dtype not in {torch.bfloat16, torch.float32}:
        return None
    found: list[NativeLayer] = []
    shapes: set[DecoderShape] = set()
    for layer in layers:
        known = _layer(layer, config, is_bf16=dtype == torch.bfloat16, rotated=rotated, eps=last.eps)
        if known is None:
            return None
        found.append(known[0])
        shapes.add(known[1])
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    return NativeDecoder(shape=shape, layers=found, last_norm=last.factor) if shape.fits else None


def _layer(
    layer: nn.Module, config: PretrainedConfig, *, is_bf16: bool, rotated: int, eps: float
) -> tuple[NativeLayer, DecoderShape] | None:
    parts, attention, mlp = _parts(layer), layer._modules.get("self_attn"), layer._modules.get("mlp")
    fields = next((fields for fields in (BEFORE, AROUND) if parts == {*fields, "self_attn", "mlp"}), None)
    is_scaled = getattr(layer, "scale", 1.0) != 1  # as a block drafter's first layer may be
    if fields is None or attention is None or mlp is None or is_scaled:
        return None
    head_norms = _parts(attention) - {LINEAR[name] for name in OF_ATTENTION} - {"sinks"}
    sinks = attention._parameters.get("sinks")
    of_mlp = _mixture(mlp, is_bf16=is_bf16) if "experts" in _parts(mlp) else _dense_mlp(mlp)
    if head_norms not in (set(), set(HEAD_NORMS)) or of_mlp is None:
        return None
    linear = {name: attention._modules[LINEAR[name]] for name in OF_ATTENTION} | of_mlp.linear
    norms = {field: _Norm.of(layer._modules[name]) for name, field in fields.items()}
    norms |= {HEAD_NORMS[name]: _Norm.of(attention._modules[name]) for name in head_norms}
    weights = {name: native_weight(module) for name, module in linear.items() if module is not None} | of_mlp.experts
    known = {field: norm for field, norm in norms.items() if norm is not None and norm.eps == eps}
    multiplied = {name: weight for name, weight in weights.items() if weight is not None}
    if len(known) < len(norms) or len(multiplied) < len(linear) + len(of_mlp.experts) or of_mlp.activation is None:
        return None
    found = {name: _bias(module) for name, module in linear.items() if module is not None}
    biases = {name: bias for name, bias in found.items() if bias is not None}
    heads = int(config.num_attention_heads)
    head_dim = multiplied["query"].rows // heads
    shape = DecoderShape(
        hidden=multiplied["query"].columns,
        intermediate=multiplied["down"].columns,
        heads=heads,
        key_heads=multiplied["key"].rows // head_dim,
        head_dim=head_dim,
        rotated=rotated,
        eps=eps,
        scale=float(getattr(attention, "scaling", head_dim**-0.5)),
        softcap=float(getattr(attention, "attn_logit_softcapping", None) or 0.0),
        activation=of_mlp.activation,
        has_sinks=sinks is not None,
        has_head_norms=bool(head_norms),
        has_norms_after=fields is AROUND,
        biases=frozenset(biases),
        is_bf16=is_bf16,
        rounds=multiplied["query"].takes_rounded,
        mixture=of_mlp.mixture,
    )
    if len({weight.takes_rounded for name, weight in multiplied.items() if name not in of_mlp.experts}) > 1:
        return None
    held = {field: norm.factor for field, norm in known.items()} | of_mlp.parts
    if sinks is not None:
        held["sinks"] = sinks.detach().float().contiguous()
    return NativeLayer(weights=multiplied, biases=biases | of_mlp.biases, parts=held), shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mlp:
    """What an MLP multiplies rows by: linear layers, or experts."""

    activation: str | None
    linear: dict[str, nn.Module | None] = field(default_factory=dict)  # by product
    experts: dict[str, NativeWeight | None] = field(default_factory=dict)  # of all experts, by product
    mixture: Mixture | None = None
    biases: dict[str, Tensor] = field(default_factory=dict)  # of all experts [experts, columns], by product
    parts: dict[str, Tensor] = field(default_factory=dict)  # of a router, by field of a layer's record


def _dense_mlp(mlp: nn.Module) -> _Mlp | None:
    if _parts(mlp) != {LINEAR[name] for name in OF_MLP}:
        return None
    linear = {name: mlp._modules[LINEAR[name]] for name in OF_MLP}
    return _Mlp(activation=_activation(getattr(mlp, "act_fn", None)), linear=linear)


@torch.no_grad()
def _mixture(mlp: nn.Module, *, is_bf16: bool) -> _Mlp | None:
    """Return a mixture whose router takes the largest of a softmax, which a sample shows; None of any other."""
    experts, others = mlp._modules["experts"], _parts(mlp) - {"experts"}
    router = mlp._modules.get(others.pop()) if len(others) == 1 else None
    if experts is None or router is None or _parts(router) not in ({"weight"}, {"weight", "bias"}):
        return None
    gate = _gate(experts)
    if gate is None or getattr(experts, "has_post_expert_norm", False):
        return None
    weight, bias = router._parameters["weight"], router._parameters.get("bias")
    if weight is None or weight.dtype != (torch.bfloat16 if is_bf16 else torch.float32):
        return None
    sample = torch.linspace(-1, 1, SAMPLE_ROWS * weight.shape[1]).sin().view(SAMPLE_ROWS, -1).to(weight.dtype)
    _, shares, chosen = router(sample)  # [n, k]
    expected = nn.functional.linear(sample, weight, bias).float().softmax(-1).gather(-1, chosen)
    renormalises = bool((shares.float().sum(-1) - 1).abs().max() < NEAR)
    if renormalises:
        expected = expected / expected.sum(-1, keepdim=True)
    products = {name: _of_experts(experts, attribute) for name, attribute in OF_EXPERTS.items()}
    kinds = {None if product is None else product.takes_rounded for product in products.values()}
    if not torch.allclose(shares.float(), expected, atol=NEAR) or None in kinds or len(kinds) > 1:
        return None
    found = {name: experts._parameters.get(f"{attribute}_bias") for name, attribute in OF_EXPERTS.items()}
    biases = {name: bias.detach().float().contiguous() for name, bias in found.items() if bias is not None}
    if products["gate"] is not None and products["gate"].in_halves:
        gate = replace(gate, in_pairs=False)
        biases |= {name: torch.cat((of[:, ::2], of[:, 1::2]), -1) for name, of in biases.items() if name == "gate"}
    return _Mlp(
        activation="",
        experts=products,
        mixture=Mixture(
            experts=weight.shape[0],
            each=chosen.shape[-1],
            renormalises=renormalises,
            rounds=True in kinds,
            gate=gate,
            has_biases=len(biases) == len(OF_EXPERTS),
            has_router_bias=bias is not None,
        ),
        biases=biases,
        parts={"router": weight.detach().contiguous()}
        | ({} if bias is None else {"router_bias": bias.detach().float().contiguous()}),
    )


def _gate(experts: Any) -> Gate | None:
    """Return what experts make of gates and ups, by their values on a sample."""
    if not getattr(experts, "has_gate", False):
        return None
    sample = 9 * torch.linspace(-9, 9, SAMPLE_ROWS * 2 * COLUMNS).sin().view(SAMPLE_ROWS, -1)
    found = experts._apply_gate(sample)
    gate, up = sample.chunk(2, -1)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(found, function(gate) * up, atol=NEAR):
            return Gate(activation=name)
    limit, slope = (float(getattr(experts, name, 0.0)) for name in ("limit", "alpha"))
    gate, up = sample[:, ::2].clamp(max=limit), sample[:, 1::2].clamp(-limit, limit)
    is_of_pairs = torch.allclose(found, (up + 1) * gate * torch.sigmoid(gate * slope), atol=NEAR)
    return Gate(in_pairs=True, slope=slope, limit=limit) if is_of_pairs else None


def _of_experts(experts: Any, attribute: str) -> NativeWeight | None:
    of_packed, weights = vars(experts).get("native"), experts._parameters.get(attribute)
    if of_packed is not None:
        found: NativeWeight | None = of_packed(attribute)
        return found
    if weights is None:
        return None
    rows = weights.detach().mT.contiguous() if experts.is_transposed else weights.detach()
    return of_experts([dense_weight(weight) for weight in rows])


def _parts(module: nn.Module) -> set[str]:
    """Return the names of what has parameters in a module."""
    inside = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    return inside | {name for name, parameter in module._parameters.items() if parameter is not None}


def _bias(linear: nn.Module) -> Tensor | None:
    bias = linear._parameters.get("bias")
    return None if bias is None else bias.detach().float().contiguous()


def _activation(function: Any) -> str | None:
    """Return the name of an activation, which is known by its values."""
    sample = torch.linspace(-4, 4, 33)
    found = None if function is None else function(sample)
    return next(
        (name for name, own in ACTIVATIONS.items() if found is not None and torch.allclose(own(sample), found)), None
    )


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
        sample = torch.linspace(-1, 3, weight.shape[0])
        rows = sample * torch.rsqrt(sample.square().mean() + eps)
        with torch.no_grad():
            found = module(sample.to(weight.dtype)[None])[0].float()
        for factor in (weight.detach().float(), 1 + weight.detach().float()):
            if torch.allclose(rows * factor, found, rtol=0.03, atol=0.01 * float(found.abs().max())):
                return _Norm(factor.contiguous(), eps)
        return None
