"""A prompt with pictures, as its family's processor made it of words and pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # a help text has no time for it


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureOfPrompt:
    """A picture of a prompt."""

    sha256: str  # of its pixels
    digest: str  # of these, the processor's settings, and what the processor wrote for it
    num_rows: int  # of the prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PicturePrompt:
    """Token ids, and what the model's own forward takes beside them."""

    ids: list[int]  # the model's own, with a placeholder for each row of a picture
    inputs: Mapping[str, Tensor]  # what the processor returned beside ids: pixels, grids, types of rows
    image_rows: Sequence[tuple[int, int, str]]  # runs of placeholders [first, end), and the digest of their picture
    pictures: Sequence[PictureOfPrompt] = ()  # in their order; none: they are known together alone

    @property
    def num_image_tokens(self) -> int:
        """The number of the rows that stand for pictures."""
        return sum(end - first for first, end, _ in self.image_rows)

    @property
    def input_bytes(self) -> int:
        """The bytes of pixels, and of what else the model's forward takes."""
        return sum(value.nbytes for value in self.inputs.values())
