"""A card's rounding is pretended on a processor: products of several rows have other bits than those of one row.

Results are rounded to bf16, those of several rows after a change of up to one place of bf16 that depends on their
number and on the column, as kernels for other numbers of rows sum in other orders.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from edgespec import Engine
from edgespec.model.mechanisms.mechanism import wrap_forwards

PLACE = 2.0**-8  # of bf16


@cache
def _change(num_rows: int, width: int) -> Tensor:
    if num_rows == 1:
        return torch.ones(width)
    return 1 + PLACE * (2 * torch.rand(width, generator=torch.Generator().manual_seed(num_rows)) - 1)


def rounded(product: Tensor) -> Tensor:
    """Return a product [..., n] as so many rows would have it."""
    width = product.shape[-1]
    return (product * _change(product.numel() // width, width)).bfloat16().to(product.dtype)


def _rounding(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward
    return lambda *arguments, **named: rounded(forward(*arguments, **named))


@contextmanager
def rounding_by_rows(open_engine: Callable[[], Engine]) -> Iterator[Engine]:
    """Open an engine in float32 whose target rounds so within this block."""
    with patch("edgespec.placement.load.reads_natively", lambda *_, **__: False):
        engine = open_engine()
    with engine:
        products = [module for module in engine.target_model.model.modules() if isinstance(module, nn.Linear)]
        forwards = [(module, module.__dict__.get("forward")) for module in products]
        wrap_forwards(products, _rounding)
        yield engine
        for module, forward in forwards:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
