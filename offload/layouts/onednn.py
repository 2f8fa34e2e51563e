"""Linear layers on a CPU whose weights are not packed in few bits: oneDNN multiplies them.

torch's own product goes by MKL in float32 and by a kernel of its own for one bf16 row. oneDNN takes half the time for
the rows of a tree, and less where a resident weight lies in the order of its kernel. Of two rows or more, each gets the
same bits whatever the others are. Rows of zeros are added to them: to a single one, and so that few numbers of rows
occur, because oneDNN makes and keeps code for each, 0.5 MiB and more.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from offload.pages import gather_in_large_pages

MOST_ROWS = 16  # that kernel's order of a weight is for; others are multiplied by it as well


@functools.lru_cache
def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies rows of this dtype here: it is tried, for torch does not document the operator.

    Builds without MKL, which are those of other processors, use it of their own.
    """
    if dtype not in {torch.float32, torch.bfloat16} or not torch.backends.mkl.is_available():
        return False
    weight = torch.eye(32, dtype=dtype)
    try:
        return torch.equal(_product(weight, [in_kernel_order(weight)], None), weight)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def many_rows_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return what many rows of a dtype are multiplied in fastest with weights that are unpacked for them.

    A processor that oneDNN knows no bf16 for takes five times as long in it as in float32.
    """
    lacks_bf16 = device.type == "cpu" and has_onednn(torch.float32) and not has_onednn(torch.bfloat16)
    return torch.float32 if lacks_bf16 and dtype == torch.bfloat16 else dtype


def in_kernel_order(weight: Tensor) -> Tensor:
    """Return a copy of a weight [out, in] in the order that oneDNN reads it in."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, MOST_ROWS)
    gather_in_large_pages(torch.ops.mkldnn.data_ptr(found), weight.nbytes)
    return found


def hook_linear_layers(model: nn.Module, dtype: torch.dtype, undo: ExitStack) -> None:
    """Let the model's linear layers multiply by oneDNN, and routers that have a matrix, until `undo` is closed.

    Layers that compute in another way already are left alone.
    """
    for module in model.modules():
        names: Any = vars(module)
        kind: Any = type(module)
        if "forward" in names:
            continue
        if kind is nn.Linear:
            names["forward"] = _forward(module, dtype)
        elif own := _multiplying(kind):
            names["forward"] = types.MethodType(own, module)
        else:
            continue
        undo.callback(delattr, module, "forward")


def layer_product(weight: Tensor, *, is_resident: bool) -> Callable[[Tensor], Tensor]:
    """Return the product of a model's layer that has this weight [out, in], as such layers compute it here."""
    module: Any = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    if weight.device.type == "cpu" and has_onednn(weight.dtype):
        if is_resident:
            module.kernel_order = [in_kernel_order(weight)]
        hook_linear_layers(module, weight.dtype, ExitStack())
    return lambda rows: module(rows.to(weight.dtype))


def takes_kernel_order(model: nn.Module, name: str) -> bool:
    """Return whether the parameter `name` is the weight of a linear layer that is only ever called.

    Mamba's layers, for one, read the weight of a child.
    """
    path, _, attribute = name.rpartition(".")
    parent, _, child = path.rpartition(".")
    if attribute != "weight" or type(model.get_submodule(path)) is not nn.Linear or is_read_whole(model, path):
        return False
    owner: Any = type(model.get_submodule(parent))
    return f".{child}.weight" not in _source(owner)


def is_read_whole(model: nn.Module, path: str) -> bool:
    """Return whether latent attention reads the weight of a linear layer: that which expands its latents."""
    parent, _, child = path.rpartition(".")
    return child == "kv_b_proj" and hasattr(model.get_submodule(parent), "expand_kv")


def is_multiplied_by_hand(model: nn.Module, name: str) -> bool:
    """Return whether the parameter `name` is a linear layer's weight that its owner multiplies itself, as Mamba's does.

    A weight that is unpacked for a call of its layer is not there then.
    """
    path, _, attribute = name.rpartition(".")
    parent, _, child = path.rpartition(".")
    owner: Any = type(model.get_submodule(parent))
    return attribute == "weight" and f".{child}.weight @" in _source(owner)


@functools.lru_cache
def _source(kind: Any) -> str:
    return inspect.getsource(kind)


def padded_rows(num_rows: int, *, is_ordered: bool = False) -> int:
    """Return the number of rows that so many are multiplied as: one of few.

    By a weight in the kernel's order, four rows take less time than two: a fifth less, as measured.
    """
    least = next((few for few in ((4,) if is_ordered else (2, 4)) if num_rows <= few), None)
    step = next((step for step, most in ((8, 64), (32, 256)) if num_rows <= most), 64)
    return least or -(-num_rows // step) * step


def in_few_sizes(rows: Tensor) -> Tensor:
    """Return rows [n, i], and rows of zeros after them where torch multiplies them by oneDNN's code for each n.

    One row gets another: torch has a product of its own for it, which has other bits.
    """
    num_rows = rows.shape[0]
    if rows.device.type != "cpu" or rows.dtype == torch.float32 or not num_rows:
        return rows
    return nn.functional.pad(rows, (0, 0, 0, padded_rows(num_rows) - num_rows))


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [..., i] times a weight [r, i] of their dtype: by oneDNN where it multiplies them."""
    if rows.device.type != "cpu" or rows.requires_grad or not has_onednn(rows.dtype):
        return nn.functional.linear(rows, weight, bias)
    return _padded_product(rows, [weight], bias)


@functools.lru_cache
def _multiplying(kind: Any) -> Callable[..., Any] | None:
    """Return the forward of modules that call torch's `linear` themselves with oneDNN's; None for others.

    So do routers and hyper-connections: torch gives one row other bits than several, and other experts are chosen.
    """
    forward: Any = kind.forward
    code, values = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or "linear" not in code.co_names or not {"F", "nn"} & set(code.co_names):
        return None
    functional = types.SimpleNamespace(**{**vars(nn.functional), "linear": multiply})
    named = {"F": functional, "nn": types.SimpleNamespace(**{**vars(nn), "functional": functional})}
    names = {**values, **{name: value for name, value in named.items() if name in values}}
    found = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _forward(module: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def forward(rows: Tensor) -> Tensor:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        assert weight is not None
        if rows.dtype != dtype or weight.dtype != dtype or rows.requires_grad:
            return nn.functional.linear(rows, weight, bias)
        ordered = vars(module).get("kernel_order")
        if ordered is None:
            return _padded_product(rows, [weight], bias)
        return _padded_product(rows, ordered, bias, is_ordered=True)

    return forward


def _padded_product(rows: Tensor, parts: Sequence[Tensor], bias: Tensor | None, *, is_ordered: bool = False) -> Tensor:
    num_rows = rows.numel() // rows.shape[-1]
    num_padded = padded_rows(num_rows, is_ordered=is_ordered)
    if num_padded == num_rows:
        return _product(rows, parts, bias)
    padded = nn.functional.pad(rows.reshape(num_rows, rows.shape[-1]), (0, 0, 0, num_padded - num_rows))
    product = _product(padded, parts, bias)[:num_rows]
    return product.view(*rows.shape[:-1], product.shape[-1])


def _product(rows: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Return rows [..., i] times a weight [r, i], some of whose rows are in each part."""
    if len(parts) == 1:
        return _product_of_part(rows, parts[0], bias)
    product = rows.new_empty(*rows.shape[:-1], sum(part.shape[0] for part in parts))
    start = 0
    for part in parts:
        end = start + part.shape[0]
        product[..., start:end] = _product_of_part(rows, part, None if bias is None else bias[start:end])
        start = end
    return product


def _product_of_part(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found
