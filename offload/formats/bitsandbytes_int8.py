"""bitsandbytes' int8: rows of whole numbers, with one scale a row (LLM.int8(), section 2, weights only)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.formats.published import weights_at_once
from offload.formats.storage import WEIGHTS_AT_ONCE, PartShapes, Quantizer, StoredParameter, content_of, rows_at_once

LARGEST = 127  # of the whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsandbytesInt8(Quantizer):
    """The format, which is the same for every weight: it has no settings."""

    name: str = "int8"

    def detect(self, weight: StoredParameter) -> BitsandbytesInt8 | None:
        """Find the format by its scales; it is refused where the rows were reordered for a kernel."""
        if not weight.stored.keys() >= set(self.stored_names(weight.name).values()):
            return None
        order = weight.stored.get(f"{weight.name.rpartition('.')[0]}.weight_format")
        if order is not None and any(content_of(order[0])):
            raise weight.cannot_be_used("its rows are not stored as rows")
        return self

    def part_shapes(self, shape: tuple[int, ...]) -> PartShapes:
        """Return the weight's own shape, and that of one scale a row."""
        return {"packed": (shape, torch.int8), "scale": ((math.prod(shape[:-1]),), torch.float32)}

    def stored_names(self, parameter: str) -> dict[str, str]:
        """Return the names that bitsandbytes gives the parts."""
        module, _, attribute = parameter.rpartition(".")
        return {"packed": parameter, "scale": f"{module}.SCB" if attribute == "weight" else f"{parameter}.SCB"}

    def of_share(self, shape: tuple[int, ...], num_shares: int) -> BitsandbytesInt8:
        """Return the same: each row is packed by itself."""
        return self

    def pack(self, weight: Tensor) -> tuple[BitsandbytesInt8, dict[str, Tensor]]:
        """Scale each row to [-127, 127] by its largest magnitude."""
        rows = weight.reshape(-1, weight.shape[-1])
        packed, scale = torch.empty_like(rows, dtype=torch.int8), rows.new_empty(rows.shape[0], dtype=torch.float32)
        num_rows = rows_at_once(WEIGHTS_AT_ONCE, rows.shape[1])
        for first in range(0, rows.shape[0], num_rows):
            share = rows[first : first + num_rows].float()
            largest = share.abs().amax(dim=1)
            scale[first : first + num_rows] = largest
            steps = LARGEST / largest.clamp_min(torch.finfo(torch.float32).tiny)
            packed[first : first + num_rows] = (share * steps[:, None]).round_().to(torch.int8)
        return self, {"packed": packed.view(weight.shape), "scale": scale}

    def unpack(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Unpack some rows at a time: in float32, rounded once.

        The kernel that bitsandbytes has for this needs several passes.
        """
        columns = out.shape[-1]
        num_rows = rows_at_once(weights_at_once(out.device), columns)
        whole = (out.view(-1, columns), parts["packed"].view(-1, columns), (parts["scale"] / LARGEST)[:, None])
        for place, packed, scale in zip(*(part.split(num_rows) for part in whole), strict=True):
            torch.mul(packed, scale, out=place)
        return out


INT8 = BitsandbytesInt8()
