"""Logits change by a text's own tokens, its bias and its grammar, before temperature and truncation.

The order is that of transformers' LogitsProcessorList: bias, repetition penalty (CTRL, arXiv 1909.05858, section 4.1),
presence and frequency penalties (OpenAI's formula), then forbidden tokens: ends of a text that is too short, and those
that the grammar excludes. After a node of a tree, the text and the node's own ancestors count, and no other node.
Legend: k rows, vocab columns.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.sampling.forced import TokenMatcher, forced_tokens
from edgespec.to_device import on_device, to_device


class LogitProcessors:
    """The processors of one text, and their state after its tokens so far."""

    def __init__(
        self,
        sampling: SamplingSettings,
        *,
        ruled_out: Iterable[int],
        matcher: TokenMatcher | None,
        vocab: int,
        device: torch.device,
        stop_tokens: Iterable[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        """Begin an empty text; `ruled_out` are never drawn, `stop_tokens` not before `min_new_tokens`."""
        self._vocab, self._num_new, self._min_new_tokens = vocab, 0, min_new_tokens
        self._stops = on_device([token for token in stop_tokens if token < vocab], device)
        self._sampling, self._matcher, self._device = sampling, matcher, device
        self._bias: tuple[Tensor, Tensor] | None = None  # tokens [b], and what the logit of each gains
        self._seen: Tensor | None = None  # [vocab] bool, tokens of the prompt and the text
        self._counts: Tensor | None = None  # [vocab] long, counts of each token in the new text
        bias = {int(token): float(value) for token, value in dict(sampling.logit_bias).items()}
        bias |= {token: -torch.inf for token in ruled_out if token < vocab}
        if bias:
            values = torch.tensor([*bias.values()], dtype=torch.float64)
            self._bias = on_device([*bias], device), to_device(values, device)
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
        if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
            self._counts = torch.zeros(vocab, dtype=torch.long, device=device)

    def begin(self, prompt: Sequence[int], new: Sequence[int]) -> None:
        """Add a prompt, and the new tokens that it has already."""
        if self._seen is not None:
            self._seen[self._ids(prompt)] = True
        self.add(new)

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        if not tokens:
            return
        self._num_new += len(tokens)
        self._seen, self._counts = self._with(tokens)
        if self._matcher is not None:
            self._matcher.add(tokens)

    def __call__(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """Return the processed logits [1, vocab] of the place after the text and the tokens of a path."""
        logits = self._without_stops(self._penalised(logits, *self._with(path)), self._num_new + len(path))
        allowed = None if self._matcher is None else self._matcher.allowed(path)
        return logits if allowed is None else logits.masked_fill(~to_device(allowed, logits.device), -torch.inf)

    @property
    def has_grammar(self) -> bool:
        """Return whether a grammar or a budget says which tokens may come."""
        return self._matcher is not None

    def forced(self, most: int) -> list[tuple[int, float]]:
        """Return tokens that the text goes on with whatever the model says, at most so many, with their chances."""
        try:
            return [] if self._matcher is None else forced_tokens(self._matcher, most)
        except EdgespecError:  # verification asks as well, where an error ends its own text alone
            return []

    def permits(self, path: Sequence[int], token: int) -> bool:
        """Return whether the grammar has a token behind the text and a path."""
        allowed = self._proposed(path)
        return allowed is None or bool(allowed[token])

    def _proposed(self, path: Sequence[int]) -> Tensor | None:
        """Return what may be proposed behind a path; any token where the grammar's library has given up."""
        try:
            return None if self._matcher is None else self._matcher.allowed(path)
        except EdgespecError:
            return None

    def on_draft(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return a draft's processed logits [k, vocab] after nodes of these paths; its last columns may be missing.

        Penalties count the text alone: the target decides with each node's own.
        """
        vocab = logits.shape[1]
        logits = self._penalised(logits, self._seen, self._counts)
        lengths = [self._num_new + len(path) for path in paths]
        if min(lengths) < self._min_new_tokens:
            stopless = self._without_stops(logits, min(lengths))
            is_short = torch.tensor([length < self._min_new_tokens for length in lengths])
            logits = torch.where(to_device(is_short, logits.device)[:, None], stopless, logits)
        if self._matcher is None:
            return logits
        masks = [self._proposed(path) for path in paths]
        if all(mask is None for mask in masks):
            return logits
        every = torch.ones(vocab, dtype=torch.bool)
        allowed = torch.stack([every if mask is None else mask[:vocab] for mask in masks])
        masked = logits.masked_fill(~to_device(allowed, logits.device), -torch.inf)
        # A row whose draft has none of the tokens that may come stays as it is: it must have some distribution.
        return torch.where((masked > -torch.inf).any(-1, keepdim=True), masked, logits)

    def _without_stops(self, logits: Tensor, num_new: int) -> Tensor:
        """Return logits [k, vocab] after `num_new` new tokens, without stop tokens where these are too few."""
        if num_new >= self._min_new_tokens:
            return logits
        return logits.index_fill(1, self._stops[self._stops < logits.shape[1]], -torch.inf)

    def _with(self, tokens: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        """Return the seen tokens and the counts, with these tokens after the text."""
        seen, counts = self._seen, self._counts
        if tokens and seen is not None:
            seen = seen.index_fill(0, self._ids(tokens), True)
        if tokens and counts is not None:
            ids = self._ids(tokens)
            counts = counts.index_add(0, ids, torch.ones_like(ids))
        return seen, counts

    def _penalised(self, logits: Tensor, seen: Tensor | None, counts: Tensor | None) -> Tensor:
        """Return logits [k, vocab] with the bias and the penalties of `seen` and `counts`, [vocab] each."""
        vocab, sampling = logits.shape[1], self._sampling
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._bias is not None:
            tokens, values = self._bias
            if vocab < self._vocab:
                is_there = tokens < vocab
                tokens, values = tokens[is_there], values[is_there]
            logits = logits.index_add(1, tokens, values.to(logits.dtype).expand(len(logits), -1))
        if seen is not None:
            penalty = sampling.repetition_penalty
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(seen[:vocab], penalised, logits)
        if counts is not None:
            times = counts[:vocab].to(logits.dtype)
            penalties = times * sampling.frequency_penalty + times.clamp(max=1) * sampling.presence_penalty
            logits = logits - penalties
        return logits

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return on_device(tokens, self._device)
