"""A format that no module of ours knows: weights as whole steps, stored under a name that is not the parameter's."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.storage import Quantizer, StoredParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSteps(Quantizer):
    name: str = "steps"
    methods: tuple[str, ...] = ("whole-steps",)

    def detect(self, weight: StoredParameter) -> "WholeSteps | None":
        return self if f"{weight.name}.steps" in weight.stored else None

    def part_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"steps": (shape, torch.int32), "size": ((1,), torch.float32)}

    def stored_names(self, parameter: str) -> dict[str, str]:
        return {"steps": f"{parameter}.steps", "size": f"{parameter}.step_size"}

    def states(self, parameter: str, shape: tuple[int, ...]) -> dict[str, bytes]:
        return {f"{parameter}.made_by": b"a test"}

    def packs(self, shape: tuple[int, ...]) -> bool:
        return True

    def pack(self, weight: Tensor) -> tuple["WholeSteps", dict[str, Tensor]]:
        size = weight.abs().max().float().view(1) / 4
        return self, {"steps": (weight / size).round().int(), "size": size}

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        return out.copy_(parts["steps"] * parts["size"])
