"""What an MLP multiplies rows by, found by its parts: linear layers, or the experts of a mixture and its router."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, silu

from edgespec.model.native.records import OF_SHARED, PRODUCTS
from edgespec.model.native.shape import FUSED, Gate, Mixture, RouterScores
from offload.native.rounded_rows import COLUMNS
from offload.native.weights import NativeWeight, dense_weight, of_experts

LINEAR = dict(zip(PRODUCTS, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), strict=True))
OF_MLP = PRODUCTS[4:]
FUSED_LINEAR = {"query": "qkv_proj", "gate": "gate_up_proj"}
OF_EXPERTS = {"gate": "gate_up_proj", "down": "down_proj"}
SHARED, SHARED_GATE = {"shared_expert", "shared_experts", "shared_mlp"}, "shared_expert_gate"
EXPERTS_DIMENSIONS = 3  # of weights that are not packed
FAR, ROUNDING = 40.0, 1e-4  # numbers that activations are tried on, beyond limits that families set; of gates' results
SAMPLE_ROWS, NEAR = 128, 0.02  # of a router's: shares in bf16
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": lambda rows: gelu(rows, approximate="tanh")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """What an MLP multiplies rows by: linear layers, or experts."""

    activation: str | None  # of linear layers
    linear: dict[str, nn.Module] = field(default_factory=dict)  # by product
    experts: dict[str, NativeWeight | None] = field(default_factory=dict)  # of all experts, by product
    mixture: Mixture | None = None
    biases: dict[str, Tensor] = field(default_factory=dict)  # of all experts [experts, columns], by product
    parts: dict[str, Tensor] = field(default_factory=dict)  # of a router, by field of a layer's record


def part_names(module: nn.Module) -> set[str]:
    """Return the names of what has parameters in a module."""
    inside = {name for name, child in module.named_children() if next(child.parameters(), None) is not None}
    return inside | {name for name, parameter in module._parameters.items() if parameter is not None}


def linear_of(module: nn.Module, products: Sequence[str]) -> dict[str, nn.Module] | None:
    """Return a module's linear layers by product, some perhaps in one with the next; None where one lacks."""
    found: dict[str, nn.Module] = {}
    rest = list(products)
    while rest:
        name = rest.pop(0)
        own, fused = (module._modules.get(names.get(name, "")) for names in (LINEAR, FUSED_LINEAR))
        if own is None and fused is not None:
            rest = [one for one in rest if one not in FUSED[name]]
        elif own is None:
            return None
        found[name] = own or fused  # type: ignore[assignment]
    return found


def dense_mlp(mlp: nn.Module) -> Mlp | None:
    """Return an MLP of linear layers; None of other parts."""
    found = linear_of(mlp, OF_MLP)
    if found is None or any(mlp._modules[name] not in found.values() for name in part_names(mlp)):
        return None
    function = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    return Mlp(activation=_activation(function), linear=found)


@torch.no_grad()
def mixture_of(mlp: nn.Module) -> Mlp | None:
    """Return a mixture whose router takes the largest of its scores, which a sample shows; None of any other."""
    experts, others = mlp._modules["experts"], part_names(mlp) - {"experts"}
    names = [name for name in others if name not in (*SHARED, SHARED_GATE)]
    router = mlp._modules.get(names[0]) if len(names) == 1 else None
    gate = None if experts is None else _gate(experts)
    if experts is None or gate is None or router is None or getattr(experts, "has_post_expert_norm", False):
        return None
    found, shared = _routing(router), _shared(mlp, others)
    if found is None or shared is None:
        return None
    routing, each, parts = found
    products = {name: _of_experts(experts, attribute) for name, attribute in OF_EXPERTS.items()}
    kinds = {None if product is None else product.takes_rounded for product in products.values()}
    if None in kinds or len(kinds) > 1:
        return None
    of_biases = {name: experts._parameters.get(f"{attribute}_bias") for name, attribute in OF_EXPERTS.items()}
    biases = {name: bias.detach().float().contiguous() for name, bias in of_biases.items() if bias is not None}
    if products["gate"] is not None and products["gate"].in_halves:
        gate = replace(gate, in_pairs=False)
        biases |= {name: torch.cat((of[:, ::2], of[:, 1::2]), -1) for name, of in biases.items() if name == "gate"}
    num_experts = len(parts["router"])
    mixture = Mixture(
        experts=num_experts,
        each=each,
        routing=routing,
        rounds=True in kinds,
        gate=gate,
        has_biases=len(biases) == len(OF_EXPERTS),
        has_router_bias="router_bias" in parts,
        is_router_bf16=parts["router"].dtype == torch.bfloat16,
        shared=_width(shared.linear),
        has_shared_gate=SHARED_GATE in others,
    )
    if mixture.has_shared_gate:
        weight = getattr(mlp, SHARED_GATE)._parameters.get("weight")
        if weight is None or weight.dtype != parts["router"].dtype or weight.shape[0] != 1 or mixture.has_router_bias:
            return None
        parts["router"] = torch.cat((parts["router"], weight.detach()))
    if "correction" in parts:
        parts["correction"] = pad(parts["correction"], (0, mixture.logits - num_experts))
    return Mlp(
        activation=shared.activation,
        linear=shared.linear,
        experts=products,
        mixture=mixture,
        biases=biases,
        parts=parts,
    )


def _shared(mlp: nn.Module, others: set[str]) -> Mlp | None:
    """Return the expert that all rows go through, under its own products' names; without products where none is."""
    names = others & SHARED
    if not names:
        return Mlp(activation="")
    found = dense_mlp(getattr(mlp, names.pop()))
    if found is None or found.linear["down"]._parameters.get("bias") is not None:
        return None
    own = dict(zip(OF_MLP, OF_SHARED, strict=True))
    return replace(found, linear={own[name]: module for name, module in found.linear.items()})


def _width(shared: Mapping[str, nn.Module]) -> int:
    down = shared.get("shared_down")
    return 0 if down is None else int(down.in_features)  # type: ignore[arg-type]


def _routing(router: nn.Module) -> tuple[RouterScores, int, dict[str, Tensor]] | None:
    """Return how a router chooses, how many experts a row has, and its weights; None where a sample says otherwise."""
    weight, bias = router._parameters.get("weight"), router._parameters.get("bias")
    if weight is None or weight.dtype not in {torch.bfloat16, torch.float32} or _limits_groups(router):
        return None
    corrections = [own for name, own in _numbers(router) if name not in ("weight", "bias")]
    if len(corrections) > 1 or any(own.numel() != weight.shape[0] for own in corrections):
        return None
    sample = _sample(weight.shape[1]).to(weight.dtype)
    _, shares, chosen = router(sample)  # [n, k]
    parts = {"router": weight.detach().contiguous()}
    logits = linear(sample, weight, bias).float()
    if bias is not None:
        parts["router_bias"] = bias.detach().float().contiguous()
    correction = torch.zeros(weight.shape[0])
    if corrections:
        parts["correction"] = correction = corrections[0].detach().float().flatten()
    least_error, known = NEAR, None
    for routing in _ways(router, has_correction=bool(corrections)):
        scores = logits.sigmoid() if routing.is_sigmoid else logits.softmax(-1)
        by = scores + correction
        expected = scores.gather(-1, chosen)
        if routing.renormalises:
            expected = expected / expected.sum(-1, keepdim=True)
        least = by.topk(chosen.shape[-1]).values[:, -1:]
        is_of_largest = bool((by.gather(-1, chosen) >= least - NEAR * by.std()).all())
        error = float((shares.float() - routing.scale * expected).abs().max())
        if is_of_largest and error < least_error:  # of many experts, several ways give alike shares
            least_error, known = error, routing
    return None if known is None else (known, chosen.shape[-1], parts)


@functools.cache
def _sample(columns: int) -> Tensor:
    """Return rows of several lengths, in which no expert is alike to another."""
    rows = torch.randn(SAMPLE_ROWS, columns, generator=torch.Generator().manual_seed(0))
    return rows * torch.logspace(-1, 0.5, SAMPLE_ROWS)[:, None]


def _limits_groups(router: nn.Module) -> bool:
    """Return whether a row's experts are of some groups alone, which a sample need not show."""
    num_groups = getattr(router, "num_group", None) or 1
    return num_groups > (getattr(router, "topk_group", None) or num_groups)


def _numbers(router: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from router.named_parameters()
    yield from router.named_buffers()


def _ways(router: nn.Module, *, has_correction: bool) -> Iterator[RouterScores]:
    for is_sigmoid in (False, True):
        for renormalises in (True, False):
            for scale in {1.0, float(getattr(router, "routed_scaling_factor", 1.0))}:
                yield RouterScores(
                    is_sigmoid=is_sigmoid, has_correction=has_correction, renormalises=renormalises, scale=scale
                )


def _gate(experts: Any) -> Gate | None:
    """Return what experts make of gates and ups, by their values on a sample."""
    if not getattr(experts, "has_gate", False):
        return None
    sample = FAR * torch.linspace(-9, 9, 3 * 2 * COLUMNS).sin().pow(3).view(3, -1)
    found = experts._apply_gate(sample)
    gate, up = sample.chunk(2, -1)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(found, function(gate) * up, atol=ROUNDING):
            return Gate(activation=name)
    limit, slope = (float(getattr(experts, name, 0.0)) for name in ("limit", "alpha"))
    gate, up = sample[:, ::2].clamp(max=limit), sample[:, 1::2].clamp(-limit, limit)
    is_of_pairs = torch.allclose(found, (up + 1) * gate * torch.sigmoid(gate * slope), atol=ROUNDING)
    return Gate(in_pairs=True, slope=slope, limit=limit) if is_of_pairs else None


def _of_experts(experts: Any, attribute: str) -> NativeWeight | None:
    of_packed, weights = vars(experts).get("native"), experts._parameters.get(attribute)
    found: NativeWeight | None = None if of_packed is None else of_packed(attribute)
    if found is not None or weights is None or weights.ndim != EXPERTS_DIMENSIONS:
        return found
    if of_packed is not None and experts.is_transposed:  # turned weights would take memory that no plan counts
        return None
    rows = weights.detach().mT.contiguous() if experts.is_transposed else weights.detach()
    return of_experts([dense_weight(weight) for weight in rows])


def _activation(function: Any) -> str | None:
    """Return the name of an activation, which is known by its values."""
    sample = FAR * torch.linspace(-1, 1, 321)
    found = None if function is None else function(sample)
    return next(
        (name for name, own in ACTIVATIONS.items() if found is not None and torch.allclose(own(sample), found)), None
    )
