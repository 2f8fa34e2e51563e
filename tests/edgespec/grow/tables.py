"""Two models that are tables: random logits of every text, and a draft that is more or less like its target."""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgespec.config import DraftSampling, SamplingSettings
from edgespec.decode.sequence import Sequence, TextSettings
from edgespec.decode.start import start_sequence
from edgespec.grow.policies import open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.text_cache import shared_length
from edgespec.sampling.distribution import to_draft_probs
from edgespec.sampling.noise import TextNoise
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree

CPU = torch.device("cpu")
VOCAB = 12
SHARPNESS = 2.0
LogitsOf = Callable[[tuple[int, ...]], Tensor]  # a text -> [vocab]


@functools.lru_cache(maxsize=100_000)
def table_logits(seed: int, text: tuple[int, ...]) -> Tensor:
    """Return the logits [vocab] of a text, in float64: so exact that there are no ties."""
    generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**31)
    return SHARPNESS * torch.randn(VOCAB, generator=generator, dtype=torch.float64)


def target_logits(seed: int) -> LogitsOf:
    return lambda text: table_logits(seed, text)


def draft_logits(seed: int, *, likeness: float = 0.8) -> LogitsOf:
    """Logits that have so much in common with those of the target of that seed."""
    return lambda text: likeness * table_logits(seed, text) + (1 - likeness) * table_logits(seed + 1, text)


class TableTarget:
    """A target that looks its logits up, in passes that texts of other tables may share."""

    device, vocab = CPU, VOCAB

    def __init__(self, logits_of: LogitsOf, *, kept: abc.Sequence[int] = ()) -> None:
        """Begin on rows that are `kept` of a text."""
        self.logits_of = logits_of
        self.text = list(kept)  # that has rows: the root excepted
        self.unread: list[int] = []
        self.num_kept = 0
        self.looked_at: TokenTree | None = None

    @property
    def num_unread(self) -> int:
        return len(self.unread)

    def begin(self, ids: abc.Sequence[int], *, needs_logits: bool = True, prompt_tokens: int | None = None) -> None:
        self.num_kept = shared_length(self.text, ids[:-1] if needs_logits else ids)
        self.text, self.unread = list(ids[: self.num_kept]), list(ids[self.num_kept :])

    def text_rows(self, count: int) -> Tensor:
        ends = range(1, min(count, self.num_unread) + 1)
        return torch.stack([self.logits_of((*self.text, *self.unread[:end])) for end in ends])

    def took_in(self, count: int) -> None:
        self.text += self.unread[:count]
        del self.unread[:count]

    def tree_rows(self, tree: TokenTree) -> Tensor:
        assert not self.unread, "trees grow below a text that has been read"
        self.looked_at = tree
        texts: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            texts.append((*(texts[parent] if parent >= 0 else self.text), token))
        return torch.stack([self.logits_of(text) for text in texts])

    def read(self, parts: abc.Sequence[Tensor]) -> list[Tensor]:
        """Logits stand for hidden states, and were looked up where rows were asked for."""
        return list(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def read_anew(self) -> None:
        """Do nothing: a table knows no positions."""

    def max_depth(self, most: int) -> int:
        """Return `most`."""
        return most

    def uncommit_last(self) -> None:
        self.text.pop()

    def commit(self, path: tuple[int, ...]) -> None:
        assert self.looked_at is not None
        self.text += self.looked_at.tokens[[0, *path]].tolist()


class TableDrafter:
    """A draft that looks its logits up."""

    def __init__(self, logits_of: LogitsOf, sampling: DraftSampling) -> None:
        self.logits_of, self.sampling = logits_of, sampling
        self.process: Any = None
        self.text: list[int] = []
        self.paths: list[tuple[int, ...]] = []

    def begin(self, ids: abc.Sequence[int]) -> None:
        self.text, self.paths = list(ids), []

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        new = [
            (*(self.paths[parent] if parent >= 0 else ()), token)
            for token, parent in zip(tokens.tolist(), parent_rows.tolist(), strict=True)
        ]
        self.paths += new
        logits = torch.stack([self.logits_of((*self.text, *path)) for path in new])
        if self.process is not None:
            logits = self.process(logits, is_root=len(self.paths) == 1)
        return to_draft_probs(logits, self.sampling)

    def rewind(self) -> None:
        self.paths = []

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        for row, length in zip(path_rows, range(2, len(path_tokens) + 2), strict=True):
            assert row < 0 or self.paths[row] == (root, *path_tokens)[:length], "rows are those of the path"
        self.text += [root, *path_tokens]
        self.paths = []


def session_of(
    tree: TreeSettings,
    sampling: SamplingSettings,
    *,
    target: LogitsOf,
    draft: LogitsOf,
    max_new_tokens: int,
    seed: int = 0,
    key: int = 0,
    text: dict[str, Any] | None = None,
    **options: Any,
) -> Sequence:
    """Return a session of tables, whose noise is that of the seed and the key; `text` are other settings of it."""
    settings = TextSettings(sampling=sampling, max_new_tokens=max_new_tokens, **(text or {}))
    return start_sequence(
        TableTarget(target),  # type: ignore[arg-type]
        TableDrafter(draft, tree.draft_sampling(sampling)),
        open_policy(tree),
        settings,
        TextDraws(
            sampling=sampling,
            device=CPU,
            generator=torch.Generator().manual_seed(seed),
            noise=TextNoise(seed=seed, key=key, vocab=VOCAB, device=CPU),
        ),
        **options,
    )
