"""Check that a text is the target's own.

The text is compared with plain decoding's, and read again with teacher forcing: at each place the target's token is
the argmax of logits + temperature * g, where g is the text's own noise. Two readings of one text round differently,
and the better of two nearly equal tokens can change: such near ties differ from real differences by the gap
between the two tokens. Legend: n tokens of the text, vocab columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.decode.sequence import TextSettings, processors_of
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import next_rows
from edgespec.model.row_chunks import row_chunks
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.text_cache import AdapterUse
from edgespec.sampling.cut_margins import RULED_OUT, cut_margins
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import TextNoise

READ_ROWS = 256  # of a text at once
# Of the row's largest logit: a safe bound on the difference of two ways to compute it
NEAR_TIES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A token of a text that differs from the token expected there."""

    index: int  # in the new text
    token: int
    expected: int
    gap: float  # how far logits must move for `token` to be the target's, in the text's own context
    allowed: float  # a smaller gap is a near tie

    @property
    def is_near_tie(self) -> bool:
        """Return whether rounding explains the difference."""
        return self.gap <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the check found about one text."""

    temperature: float  # that the text was drawn at
    num_tokens: int
    from_plain: Difference | None  # the first place where the text leaves plain decoding's
    from_target: tuple[Difference, ...]  # places where the target, read again, has another token

    @property
    def is_lossless(self) -> bool:
        """Return whether the text is equal to the target's own, near ties aside."""
        found = [*self.from_target, *([self.from_plain] if self.from_plain else [])]
        return all(difference.is_near_tie for difference in found)


def judge(
    model: CausalModel,
    prompt: Sequence[int] | SeenPrompt,
    text: Sequence[int],
    plain: Sequence[int],
    settings: TextSettings,
    noise: TextNoise,
    *,
    dtype: torch.dtype,
) -> Verdict:
    """Compare a text with plain decoding's, and each of its tokens with the target's own in its context.

    The texts are of equal length, unless one of them ended in a stop token. `noise` is the text's own, on the CPU; it
    counts above temperature 0.
    """
    own_logits, sampling = logits_of(model, prompt, text, settings.adapters), settings.sampling
    prompt = prompt.ids if isinstance(prompt, SeenPrompt) else prompt
    logits = _processed(own_logits, prompt, text, settings)
    share = NEAR_TIES.get(dtype, NEAR_TIES[torch.float32])

    def targets_own(index: int) -> int:
        noise.start(len(prompt) + index - 1)
        if sampling.temperature == 0:
            return int(logits[index].argmax())
        return noise.draw(to_probs(logits[index][None], sampling)[0], 1)

    def difference(index: int, expected: int) -> Difference:
        noise.start(len(prompt) + index - 1)
        scores, margins = logits[index].double(), cut_margins(logits[index].double(), sampling)
        if sampling.temperature > 0:
            scores = scores + sampling.temperature * noise.below(1).log()
        # The token is the target's if it is not cut off, and if the expected one falls below it or is cut off.
        token = text[index]
        gap = torch.maximum(-margins[token], torch.minimum(scores[expected] - scores[token], margins[expected]))
        allowed = share * float(own_logits[index].abs().max())
        return Difference(index=index, token=token, expected=expected, gap=max(0.0, float(gap)), allowed=allowed)

    own = [targets_own(index) for index in range(len(text))]
    pairs = zip(text, plain, strict=False)
    first = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None and len(text) != len(plain):
        raise AssertionError(f"equal texts of {len(text)} and {len(plain)} tokens")
    return Verdict(
        temperature=sampling.temperature,
        num_tokens=len(text),
        from_plain=None if first is None else difference(first, plain[first]),
        from_target=tuple(difference(index, own[index]) for index in range(len(text)) if own[index] != text[index]),
    )


def _processed(logits: Tensor, prompt: Sequence[int], text: Sequence[int], settings: TextSettings) -> Tensor:
    """Return what the text's own processors make of the logits [n, vocab] of its tokens, all of them finite."""
    processors = processors_of(settings, logits.shape[1], logits.device)
    if processors is None:
        return logits
    processors.begin(prompt, ())
    rows = [processors(row[None], text[:index]) for index, row in enumerate(logits)]
    return torch.cat(rows).clamp(min=RULED_OUT)


@torch.no_grad()
def logits_of(
    model: CausalModel, prompt: Sequence[int] | SeenPrompt, text: Sequence[int], adapters: AdapterUse | None = None
) -> Tensor:
    """Return the float32 logits [n, vocab] that each token of the text was to be chosen by, on the CPU."""
    seen = prompt if isinstance(prompt, SeenPrompt) else None
    of_prompt = prompt.ids if isinstance(prompt, SeenPrompt) else prompt
    ids = torch.tensor([*of_prompt, *text[:-1]], device=model.device)
    cache = model.new_text(adapters)
    rows = [model.read_text(cache, ids[: len(of_prompt)], seen)[None]]
    for piece in ids[len(of_prompt) :].split(1 if model.is_plain else READ_ROWS):
        (hidden,) = model.read([next_rows(cache, piece, seen=seen)])
        cache.commit_next(piece.tolist())
        chunks = row_chunks(len(piece), model.vocab)
        rows += [model.logits(part, runs=[(cache.adapters, len(part))]) for part in map(hidden.__getitem__, chunks)]
    return torch.cat([row.float().cpu() for row in rows])
