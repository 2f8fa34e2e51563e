"""Check that a greedy text is the target's own.

The text is compared with plain decoding's, and read again with teacher forcing. Two readings of one text round
differently, and the better of two nearly equal tokens can change: such near ties are told apart from real
differences by the gap between the two tokens' logits. Legend: n tokens of the text, vocab columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.errors import offload_errors
from edgespec.model.causal_model import CausalModel
from edgespec.model.row_chunks import row_chunks
from edgespec.tree.settings import TreeSettings

Decode = Callable[[TreeSettings], Sequence[int]]  # a prompt's greedy text, with these trees

READ_ROWS = 256  # of a text at once
# Of the row's largest logit: what two ways of computing it may differ by, with room to spare.
NEAR_TIES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A token of a text that differs from the token expected there."""

    index: int  # in the new text
    token: int
    expected: int
    gap: float  # between the logits of the two, in the text's own context
    allowed: float  # a smaller gap is a near tie

    @property
    def is_near_tie(self) -> bool:
        """Return whether rounding explains the difference."""
        return self.gap <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the check found about one text."""

    num_tokens: int
    from_plain: Difference | None  # the first place where the text leaves plain decoding's
    from_argmax: tuple[Difference, ...]  # places where another token has the largest logit

    @property
    def is_lossless(self) -> bool:
        """Return whether the text is equal to the target's own, near ties aside."""
        found = [*self.from_argmax, *([self.from_plain] if self.from_plain else [])]
        return all(difference.is_near_tie for difference in found)


def compare(
    model: CausalModel, prompt: Sequence[int], decode: Decode, tree: TreeSettings, *, dtype: torch.dtype
) -> Verdict:
    """Decode a prompt through these trees and plainly, and judge the text."""
    text, plain = decode(tree), decode(tree.plain())
    return judge(model, prompt, text, plain, dtype=dtype)


def judge(
    model: CausalModel, prompt: Sequence[int], text: Sequence[int], plain: Sequence[int], *, dtype: torch.dtype
) -> Verdict:
    """Compare a greedy text with plain decoding's, and each of its tokens with the argmax in its context.

    The texts are of equal length, unless one of them ended in a stop token. Uses the model's cache.
    """
    logits = logits_of(model, prompt, text)
    best = logits.argmax(-1).tolist()  # [n]: once a text, at its end
    share = NEAR_TIES.get(dtype, NEAR_TIES[torch.float32])

    def difference(index: int, expected: int) -> Difference:
        row = logits[index]
        return Difference(
            index=index,
            token=text[index],
            expected=expected,
            gap=float(row[expected] - row[text[index]]),
            allowed=share * float(row.abs().max()),
        )

    pairs = zip(text, plain, strict=False)
    first = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None and len(text) != len(plain):
        raise AssertionError(f"equal texts of {len(text)} and {len(plain)} tokens")
    return Verdict(
        num_tokens=len(text),
        from_plain=None if first is None else difference(first, plain[first]),
        from_argmax=tuple(difference(index, best[index]) for index in range(len(text)) if best[index] != text[index]),
    )


@torch.no_grad()
def logits_of(model: CausalModel, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """Return the float32 logits [n, vocab] that each token of the text was to be chosen by, on the CPU."""
    ids = torch.tensor([*prompt, *text[:-1]], device=model.device)
    before = len(prompt)
    with offload_errors():
        model.reset(len(ids))
        rows = [model.prefill(ids[:before])[None]]
        for start in range(before, len(ids), READ_ROWS):
            piece = ids[start : start + READ_ROWS]
            positions = torch.arange(start, start + len(piece), device=model.device)
            visible = torch.ones(len(piece), len(piece), dtype=torch.bool, device=model.device).tril()
            hidden = model.look(piece, positions, visible)
            rows += [model.logits(hidden[chunk]) for chunk in row_chunks(len(piece), model.vocab)]
    return torch.cat([row.float().cpu() for row in rows])
