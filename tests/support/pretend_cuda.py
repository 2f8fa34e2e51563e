"""A CUDA device that is only pretended, so that a machine without one finds tensors that are on the wrong device.

Its tensors say that they are on `cuda:0`, or on another card, and hold a tensor of the CPU by which every operation is
computed. What CUDA refuses is refused: operands on two devices, but for numbers without dimensions in pointwise
operations; indices on the device into a tensor on the host; a generator of the other device; sharing memory with numpy.
So is what would make a context on another card: no card is named, or memory is locked, while another is the current
one. Indices on the host into a tensor of the device are refused too: CUDA takes them, and the host waits while they are
copied. The places of other copies for which the host would wait are in `waited_for`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from edgespec.machine.device import CudaGraphs
from offload.formats.bitsandbytes_4bit import bitsandbytes_functional
from offload.formats.four_bits_kernel import works_on
from offload.layouts import gguf_on_card
from offload.layouts.int4 import rows_that_are_few
from offload.layouts.int4_tiles import _places_on
from tests.support import pretend_int4
from tests.support.simulated_device import SimulatedDevice

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
ATEN = torch.ops.aten
CROSSING = {ATEN.copy_.default, ATEN._to_copy.default}
FILLING = {ATEN.masked_fill.Tensor, ATEN.masked_fill_.Tensor, ATEN.index_fill.int_Tensor, ATEN.index_fill_.int_Tensor}
READING = ("tolist", "item", "__int__", "__float__", "__index__", "__bool__", "__format__", "__repr__")
READS = {getattr(Tensor, name) for name in READING}
SHARES = {Tensor.numpy, Tensor.__array__}


# The card that is pretended, and the number of the current one
there = SimpleNamespace(card=CUDA, current=0, capability=(8, 9))
waited_for: list[str] = []  # places in the code whose copies from the host were from memory that is not locked


class MixedDevicesError(RuntimeError):
    """Raised where CUDA would refuse the devices of an operation's operands."""


class PretendTensor(Tensor):
    """A tensor that says it is on `CUDA`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendTensor:
        found = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=HOST,  # as torch's own code sees it: it would ask for a driver that is not there
        )  # fmt: skip
        found.inner = inner
        return found

    device = property(lambda _self: there.card)
    is_cuda = property(lambda _self: True)
    is_cpu = property(lambda _self: False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Do what torch's own code would do by the host's rules; leave the rest to `__torch_dispatch__`."""
        kwargs = kwargs or {}
        if func in SHARES:
            raise MixedDevicesError("memory of a device is no array: it has to be moved to the host first")
        if func is Tensor.cpu:
            return args[0].inner.clone()
        if func is Tensor.new_tensor:
            _wait()
            return PretendTensor(func(_inner(args[0]), *args[1:], **kwargs))
        if func in READS:
            return func(_inner(args[0]), *args[1:], **kwargs)
        if func is Tensor.__getitem__:
            _refuse_mixed(func, args)
            return PretendTensor(args[0].inner[_inner(args[1])])
        if func is Tensor.__setitem__:
            into, at, value = args
            is_copy = not _tensors(at)
            _refuse_mixed(func, (into, at) if is_copy or getattr(value, "ndim", 0) == 0 else args)
            _inner(into)[_inner(at)] = _inner(value)
            return None
        if func is scaled_dot_product_attention:
            _refuse_mixed(func, (args, kwargs))
            return PretendTensor(func(*_inner(args), **_inner(kwargs)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Compute an operation by the tensors that are held, if CUDA would."""
        kwargs = dict(kwargs or {})
        _refuse_mixed(func, (args, kwargs))
        _refuse_kernel(func, args)
        if func is ATEN.copy_.default and isinstance(args[0], PretendTensor) and _would_wait(args[1], args[2:]):
            _wait()
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = HOST
        found = KERNELS.get(func, func)(*_inner(args), **_inner(kwargs))
        if func._schema.is_mutable:  # in place, or into `out`
            return kwargs.get("out", args[0]) if func._schema.returns else None
        # A conversion names the host where torch's own code asks for it: `to` is ours.
        is_on_host = device is not None and device.type == "cpu" and func is not ATEN._to_copy.default
        return found if is_on_host else _pretend(found)


class PretendGenerator(torch.Generator):
    """A generator of the device's."""

    device = CUDA


class OnPretendCuda(TorchFunctionMode):
    """Lets what makes or moves a tensor know the pretended device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            _refuse_other_card(torch.device("cuda"))
            locked = args[0].clone()
            locked.is_locked = True
            return locked
        if func in {Tensor.to, Tensor.cuda, Tensor.type_as}:
            return _moved(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            _refuse_other_card(torch.device(device))
            _refuse_generator(func, kwargs, CUDA)
            if func in {torch.tensor, torch.as_tensor}:
                _wait()
            return _pretend(func(*args, **{**kwargs, "device": "cpu"}))
        if kwargs.get("generator") is not None:
            on_device = any(isinstance(leaf, PretendTensor) for leaf in _tensors((args, kwargs)))
            _refuse_generator(func, kwargs, CUDA if on_device else HOST)
        return func(*args, **kwargs)


class PretendCudaDevice(SimulatedDevice):
    """The device as the loaders know it, which does its work at once."""

    max_locked_bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        super().__init__(is_eager=True, max_locked_bytes=self.max_locked_bytes)
        _refuse_other_card(device)
        self.torch_device = device

    def empty(self, num_bytes: int) -> Tensor:
        return PretendTensor(super().empty(num_bytes))


class PretendGraphs(CudaGraphs):
    """Passes that are recorded are repeated."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(HOST)


@contextlib.contextmanager
def pretend_cuda(card: int = 0, *, capability: tuple[int, int] = (8, 9)) -> Iterator[None]:
    """Let `cuda` be there, for what this thread does: cards up to this number, which is the one that is pretended."""
    generator = torch.Generator

    def make(device: Any = "cpu") -> torch.Generator:
        return PretendGenerator() if torch.device(device).type == "cuda" else generator()

    with (
        OnPretendCuda(),
        patch("torch.Generator", make),
        patch("torch.__future__.get_overwrite_module_params_on_conversion", lambda: True),
        patch.object(there, "card", torch.device("cuda", card)),
        patch.object(there, "current", 0),
        patch.object(there, "capability", capability),
        patch("torch.cuda.device_count", lambda: card + 1),
        patch("torch.cuda.current_device", lambda: there.current),
        patch("torch.cuda.set_device", lambda device: setattr(there, "current", getattr(device, "index", device))),
        patch("torch.cuda.get_device_capability", lambda _device: capability),
        patch("offload.streamed_model.CudaDevice", PretendCudaDevice),
        patch("offload.experts.on_demand.CudaDevice", PretendCudaDevice),
        patch("torch.cuda.get_device_properties", lambda _device: SimpleNamespace(total_memory=8 << 30, name="a card")),
        patch("torch.cuda.set_per_process_memory_fraction"),
        patch("edgespec.model.cuda_graphs.CudaGraphs", PretendGraphs),
        patch.dict("offload.layouts.int4.TIMED_SHAPES", cuda=(64, 128)),
    ):
        _forget_kernels()
        yield
    _forget_kernels()


def _forget_kernels() -> None:
    """Let what was found of a card be found again: before, there was another, or none."""
    for found in (works_on, _places_on, rows_that_are_few, gguf_on_card._few_rows, gguf_on_card._say_unpacked):
        found.cache_clear()


def _moved(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what `to` gives: on the device memory of its own, whatever the host does with its own later."""
    tensor, *rest = args
    given = [*rest, *kwargs.values()]
    devices = [
        one.device if isinstance(one, Tensor) else torch.device(one)
        for one in given
        if isinstance(one, (str, torch.device, Tensor))
    ]
    target = torch.device("cuda") if func is Tensor.cuda else devices[0] if devices else tensor.device
    if target.type == "cuda":
        _refuse_other_card(target)
    is_there = isinstance(tensor, PretendTensor)
    if target.type != "cuda" and not is_there:
        return func(tensor, *rest, **kwargs)
    if not is_there and _would_wait(tensor, (kwargs.get("non_blocking", False),)):
        _wait()
    dtypes = [one.dtype if isinstance(one, Tensor) else one for one in given if isinstance(one, (torch.dtype, Tensor))]
    inner = tensor.inner if is_there else tensor.clone()
    found = inner.to(dtypes[0] if dtypes else inner.dtype, copy=kwargs.get("copy", False))
    if target.type != "cuda":
        return found if target.type == "meta" or found is not inner else found.clone()
    return tensor if is_there and found is inner else PretendTensor(found)


def _would_wait(source: Tensor, non_blocking: Sequence[Any]) -> bool:
    """Return whether the host would wait for a copy to the device."""
    on_host = not isinstance(source, PretendTensor) and source.device.type != "meta"
    return on_host and not (any(non_blocking) and getattr(source, "is_locked", False))


def _wait() -> None:
    """Note the place in the code; what a test's device copies by itself is nobody's."""
    rooms = ("/edgespec/", "/offload/", "/simulated_device.py")
    ours = [frame for frame in traceback.extract_stack() if any(room in frame.filename for room in rooms)]
    if ours and "/tests/" not in ours[-1].filename:
        waited_for.append(f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].line}")


def _refuse_mixed(func: Any, operands: Any) -> None:
    """Raise MixedDevicesError where CUDA would not take these operands."""
    if func in CROSSING:
        return
    tensors = _tensors(operands)
    on_device = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    may_be_numbers = func in FILLING or torch.Tag.pointwise in getattr(func, "tags", ())
    others = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, PretendTensor)
        and not (may_be_numbers and tensor.ndim == 0 and tensor is not tensors[0])
    ]
    if on_device and others:
        shapes = [(tuple(tensor.shape), str(tensor.device)) for tensor in tensors]
        raise MixedDevicesError(f"{func} of tensors on two devices: {shapes}")


def _refuse_other_card(device: torch.device) -> None:
    """Raise MixedDevicesError where this, or the current card, is not the card that is pretended."""
    if there.card.index != there.current or device.index not in (None, there.card.index):
        raise MixedDevicesError(f"{device} is used beside {there.card}, and cuda:{there.current} is the current card")


def _refuse_kernel(func: Any, args: Any) -> None:
    """Raise NotImplementedError where a card before Ampere has no kernel."""
    if func not in ATTENTION or there.capability >= (8, 0):
        return
    if func is ATEN._scaled_dot_product_flash_attention.default or args[0].dtype == torch.bfloat16:
        raise NotImplementedError(f"{func} of {args[0].dtype}: no kernel found to launch")


def _refuse_generator(func: Any, kwargs: dict[str, Any], device: torch.device) -> None:
    if kwargs.get("generator") is not None and kwargs["generator"].device.type != device.type:
        raise MixedDevicesError(f"{func} on {device} with a generator of {kwargs['generator'].device}")


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Return what CUDA's kernels give: the attended rows, and the logarithms of their weights' sums."""
    bias = rest[0] if rest and isinstance(rest[0], Tensor) else None
    mask = None if bias is None else bias[0, :1].expand(1, 1, -1, -1)
    found = ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return (*found, *(torch.empty(0) for _ in range(2)))  # states of random numbers


def _attended_by_flash(*arguments: Any, **named: Any) -> tuple[Any, ...]:
    states = [torch.empty(0) for _ in range(2)]
    return (*_attended(*arguments, **named)[:2], *states, 0, 0, *states, torch.empty(0))


def _histogram(numbers: Tensor, *bins: Any) -> Tensor:
    """Return how many numbers fall in each bin, in their own type, which the host has for floats alone."""
    return torch.histc(numbers.float(), *bins).to(numbers.dtype)


def _unpacked(*arguments: Any) -> None:
    *given, out = arguments
    out.copy_(torch.ops.bitsandbytes.dequantize_4bit.default(*given))


# Imported later, it would look for the device; and what it makes once and keeps would be the pretended device's.
bitsandbytes_functional().quantize_blockwise(torch.zeros(256))
ATTENTION = {ATEN._scaled_dot_product_flash_attention.default, ATEN._scaled_dot_product_efficient_attention.default}
KERNELS = {  # that the host lacks
    torch.ops.bitsandbytes.dequantize_4bit.out: _unpacked,
    ATEN._scaled_dot_product_flash_attention.default: _attended_by_flash,
    ATEN._scaled_dot_product_efficient_attention.default: _attended,
    ATEN.histc.default: _histogram,
    ATEN._convert_weight_to_int4pack.default: pretend_int4.in_tiles,
    ATEN._weight_int4pack_mm.default: pretend_int4.product,
}


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _inner(tree: Any) -> Any:
    if isinstance(tree, PretendTensor):
        return tree.inner
    if isinstance(tree, dict):
        return {name: _inner(part) for name, part in tree.items()}
    return type(tree)(map(_inner, tree)) if type(tree) in {list, tuple} else tree


def _pretend(tree: Any) -> Any:
    return tree_map_only(Tensor, PretendTensor, tree)
