"""Weights in even steps, unpacked: by one kernel where a card has it, else by torch's operations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload.formats.four_bits_kernel import unpack_words, works_on
from offload.formats.storage import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsInWords:
    """What reads the steps of weights whose numbers lie in 32-bit words."""

    bits: int
    read_words: Callable[[Mapping[str, Tensor]], Steps]  # parts [n, ...] -> steps whose numbers are still words
    numbers_in: Callable[[Tensor], Tensor]  # words -> uint8 [n, r, i]
    scales: torch.dtype | None = None  # as in `EvenSteps`
    is_middle: bool = False

    def read(self, parts: Mapping[str, Tensor]) -> Steps:
        """Return the steps with their numbers."""
        steps = self.read_words(parts)
        return replace(steps, numbers=self.numbers_in(steps.numbers))

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        """Write weights whose zeros are whole to [n, r, i]."""
        if has_kernel(out.device, out.dtype):
            unpack_words(self.read_words(parts), out, bits=self.bits)
        else:
            unpack_steps(self.read(parts), out)


def unpack_steps(steps: Steps, out: Tensor) -> None:
    """Write weights whose zeros are whole to [n, r, i] by torch's operations."""
    zeros, scale, is_on_cpu = steps.zeros, steps.scale, out.device.type == "cpu"
    if is_on_cpu:  # which would convert them again and again
        zeros, scale = zeros.float(), scale.float()
    if steps.groups is None:
        out, zeros, scale = out.view(*scale.shape, -1), zeros[..., None], scale[..., None]
    else:
        group = steps.groups[:, None].expand(out.shape)
        zeros, scale = zeros.gather(-1, group), scale.gather(-1, group)
    numbers = steps.numbers.view(out.shape)
    if is_on_cpu:
        torch.mul(numbers.float().sub_(zeros), scale, out=out)
        return
    # Held by the smallest type that does, which is less to move.
    held = torch.int8 if zeros.dtype == torch.int8 else torch.bfloat16
    differences = torch.sub(numbers, zeros, out=out.new_empty(out.shape, dtype=held))
    # A sum in float32 is exact where products of such types are not; less than nothing keeps the sign of a zero.
    torch.addcmul(torch.full((1, 1, 1), -0.0, device=out.device), differences, scale, out=out)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one kernel unpacks such weights to a dtype on a device."""
    return works_on(device, dtype, _is_equal)


def _is_equal(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel unpacks every number, by groups out of order, as torch's operations do."""
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(1, 4, 64) & 15
    words = (numbers.view(1, 4, 8, 8).int() << torch.arange(0, 32, 4, device=device).int()).sum(-1, dtype=torch.int32)
    zeros = torch.tensor([0, 7, 8, 15], dtype=torch.int8, device=device).repeat(4).view(1, 4, 4)
    scale = torch.tensor([2.0**-20, 0.3, -1.1, 1000.0], dtype=torch.float16, device=device).repeat(4).view(1, 4, 4)
    groups = torch.arange(64, device=device).remainder(4).view(1, 64)
    steps = Steps(numbers=words, zeros=zeros, scale=scale, groups=groups)
    found, expected = (torch.empty(1, 4, 64, dtype=dtype, device=device) for _ in range(2))
    unpack_words(steps, found, bits=4)
    unpack_steps(replace(steps, numbers=numbers), expected)
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
