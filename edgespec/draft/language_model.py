"""A small language model of the target's vocabulary as drafter, wholly resident.

Expanded nodes keep their keys and values in the drafter's cache: one forward a tree layer, in which each node sees the
committed text and its own ancestors. After verification the rows of the accepted path stay. A path may end in a node
that was never expanded; such tokens are pending, and are read before the next root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgespec.config import DraftSampling
from edgespec.draft import Path, ProcessDraft
from edgespec.draft.distributions import Distributions, LazyDistributions, rows_made_at_once, whole
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows, next_rows
from edgespec.model.row_chunks import row_chunks
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.seen_rows import SeenRows
from edgespec.model.text_cache import TextCache, num_in_place
from edgespec.sampling.distribution import to_draft_probs
from edgespec.to_device import on_device

FIRST_ROWS = 64  # of a tree for which memory is allocated first


class LanguageModelDrafter:
    """Drafts a text with a causal language model.

    Its `sampling` decides how children are drawn, and may change between trees.
    """

    max_depth: int | None = None  # most layers of a tree below its root; None: any number
    heads_join = True  # whether the head may turn several texts' rows into logits at once

    def __init__(
        self,
        model: CausalModel,
        *,
        vocab: int,
        sampling: DraftSampling,
        cache: TextCache | None = None,
    ) -> None:
        """Begin a text, with the rows of its beginning that `cache` has."""
        self.model = model
        self.cache = model.new_text() if cache is None else cache
        self.sampling = sampling
        self.seen: SeenPrompt | None = None  # the text's prompt with pictures, as far as the draft reads it
        self.sees = False  # whether it reads the rows of pictures, or words alone
        self.process: ProcessDraft | None = None
        self._vocab = vocab  # the target's: padded embedding tables may differ in length
        self._num_embeddings = model.num_embeddings
        self._pending: list[int] = []  # of the text: tokens without rows yet
        self._num_unread = 0  # of these, tokens from before the last commit
        self._num_rows = 0
        self._paths: list[Path] = []  # of the rows, where logits are processed
        self._hidden: list[Tensor] = []  # [k, h], one entry an expansion of this tree
        self._visible = torch.zeros(FIRST_ROWS, FIRST_ROWS, dtype=torch.bool, device=model.device)  # [row, row]
        self._positions = torch.zeros(FIRST_ROWS, dtype=torch.long, device=model.device)  # [row]

    def begin(self, ids: Sequence[int]) -> None:
        """Start a text; it is read when its first root is expanded."""
        self.rewind()
        if self.seen is not None:
            ids = self.seen.keyed(ids) if self.sees else self.seen.words(ids)
        kept = self.cache.keep_prefix(self._known_ids(ids))
        self._pending = list(ids[kept:])
        self._num_unread = len(self._pending)

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Return q [k, vocab] after nodes of tokens [k] below parent_rows [k].

        The first call is the root's.
        """
        (q,) = expand_batched([(self, tokens, parent_rows)])
        if isinstance(q, EdgespecError):
            raise q
        return whole(q)

    def rows_of(self, tokens: Tensor, parent_rows: Tensor) -> PassRows:
        """Return the rows of an expansion for a pass; call `took_in` after it."""
        self.took_paths(tokens, parent_rows)
        if self._num_rows == 0:
            return self._root_rows(tokens)
        start, end = self._num_rows, self._num_rows + tokens.shape[0]
        if end > self._positions.shape[0]:
            self._grow(end)
        self._visible[start:end, :start] = self._visible[parent_rows, :start]
        self._visible[start:end, start:end] = torch.eye(end - start, dtype=torch.bool, device=tokens.device)
        self._positions[start:end] = self._positions[parent_rows] + 1
        seen = self.seen if self.sees else None
        return PassRows(
            cache=self.cache,
            ids=self._known(tokens),
            positions=self._positions[:end],
            visible=self._visible[start:end, :end],
            previous=self._features_of(parent_rows),
            seen=None if seen is None else seen.rows_behind(self._positions[start:end]),
        )

    def took_paths(self, tokens: Tensor, parent_rows: Tensor) -> None:
        """Note the paths of nodes of tokens [k] below parent_rows [k], which become rows, where they count."""
        if self._num_rows == 0:
            self._paths = [()]
        elif self.process is not None:  # one wait for the device
            pairs = torch.stack([parent_rows, tokens], 1).tolist()
            self._paths += [(*self._paths[parent], token) for parent, token in pairs]

    def text_rows(self, count: int) -> PassRows:
        """Return the rows of the text's next `count` pending tokens, for a pass; call `took_text` after it."""
        self.cache.truncate()
        return self._rows_before(on_device(self._pending[:count], self.model.device))

    def took_text(self, count: int) -> None:
        """Take the next `count` pending tokens, whose rows a pass has read."""
        self.cache.commit_next(self._known_ids(self._pending[:count]))
        del self._pending[:count]
        self._num_unread = max(0, self._num_unread - count)

    def took_in(self, hidden: Tensor) -> Tensor:
        """Take the last hidden states of an expansion's rows, and return those of its nodes: [k, h]."""
        if self._num_rows == 0:
            hidden = hidden[-1:]
            self.cache.commit_next(self._known_ids(self._pending))
            self._pending = []
            self._visible[0, 0] = True
            self._positions[0] = len(self.cache.ids)
        self._num_rows += hidden.shape[0]
        self._hidden.append(hidden)
        return hidden

    def hidden(self, rows: Tensor) -> Tensor:
        """Return last hidden states [k, h] of this tree's rows [k], expanded since the last commit."""
        self._hidden = [torch.cat(self._hidden)]
        return self._hidden[0][rows]

    @property
    def num_rows(self) -> int:
        """The number of rows computed for this tree."""
        return self._num_rows

    @property
    def num_read(self) -> int:
        """The number of the text's tokens that have rows."""
        return len(self.cache.ids)

    @property
    def part_rows(self) -> int:
        """The number of a text's tokens at whose multiples it may be read in parts."""
        return self.model.part_rows

    @property
    def num_pending(self) -> int:
        """The number of the text's tokens that the next expansion reads before the root."""
        return len(self._pending)

    @property
    def num_unread(self) -> int:
        """The number of those that are older than the last commit: of a prompt, or of steps without a tree."""
        return self._num_unread

    def rewind(self) -> None:
        """Drop the tree that was grown since the last commit, to grow another from the same text."""
        self._num_rows = 0
        self._hidden = []

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        """Keep the rows of the root and of the path; tokens without a row become pending."""
        rows, tokens = [0, *path_rows], [root, *path_tokens]
        num_cached = 0
        if self._num_rows:  # without them what lies after the text is dropped when the next root is read
            num_cached = self._num_lasting(rows)
            lasting = rows[:num_cached]
            kept = on_device(lasting, self.model.device) + len(self.cache.ids)
            self.cache.commit(kept, self._known_ids(tokens[:num_cached]), num_in_place=num_in_place(lasting))
        self._num_unread = len(self._pending)
        self._pending += tokens[num_cached:]
        self.rewind()

    def _root_rows(self, root: Tensor) -> PassRows:
        """Return the rows of the pending tokens and of the root [1]."""
        self.cache.truncate()
        return self._rows_before(torch.cat([on_device(self._pending, root.device), root]))

    def _rows_before(self, ids: Tensor) -> PassRows:
        """Return the rows of the next ids [n] of the text."""
        committed = len(self.cache.ids)
        previous = self._features_before(committed, committed + ids.shape[0])
        return next_rows(
            self.cache, self._known(self._true(ids)), previous=previous, seen=self.seen if self.sees else None
        )

    def _seen_rows(self, positions: Tensor) -> SeenRows | None:
        """Return what the next rows of the text, at these positions [n], carry."""
        if self.seen is None or not self.sees:
            return None
        return self.seen.rows(positions, first=len(self.cache.ids))

    def _true(self, ids: Tensor) -> Tensor:
        """Return the ids [n] of the next rows of the text, in which placeholders stand for keys of pictures."""
        of_prompt = [] if self.seen is None or not self.sees else self.seen.ids[len(self.cache.ids) :]
        of_prompt = of_prompt[: ids.shape[0]]
        return torch.cat([on_device(of_prompt, ids.device), ids[len(of_prompt) :]]) if of_prompt else ids

    def _num_lasting(self, rows: list[int]) -> int:
        """Return how many of the first rows of the root and the path can stay as rows of the text."""
        return rows.index(-1) if -1 in rows else len(rows)

    def _features_before(self, first: int, end: int) -> Tensor | None:
        """Return the model's further inputs for the text's tokens [first, end): none."""
        del first, end
        return None

    def _features_of(self, rows: Tensor) -> Tensor | None:
        """Return the model's further inputs for children of this tree's rows [k]: none."""
        del rows
        return None

    def _known(self, ids: Tensor) -> Tensor:
        """Return ids that the draft can look up: the target's table may have more rows.

        The other ids become 0; any q is lossless.
        """
        return ids.masked_fill(ids >= self._num_embeddings, 0)

    def _known_ids(self, ids: Sequence[int]) -> list[int]:
        return [token if token < self._num_embeddings else 0 for token in ids]

    def last_paths(self, count: int) -> Sequence[Path] | None:
        """Return the paths of the last `count` rows; None where logits are not processed."""
        return None if self.process is None else self._paths[-count:]

    def q_of(self, hidden: Tensor, *, is_checked: bool, paths: Sequence[Path] | None = None) -> Tensor:
        """Return q [k, vocab] of hidden states [k, h] of nodes of these paths; only a chunk's logits exist at a time.

        Raises EdgespecError if a check is due and they are not finite.
        """
        chunks = list(row_chunks(hidden.shape[0], self.model.vocab))
        logits = self.model.logits(hidden[chunks[0]])
        if is_checked:
            refuse_not_finite(logits)
        first = self._probabilities(logits, _of(paths, chunks[0]))
        if len(chunks) == 1:
            return first
        q = first.new_empty(hidden.shape[0], self._vocab)
        q[chunks[0]] = first
        for rows in chunks[1:]:
            q[rows] = self._probabilities(self.model.logits(hidden[rows]), _of(paths, rows))
        return q

    def lazy_q(self, hidden: Tensor, paths: Sequence[Path] | None = None) -> LazyDistributions:
        """Return q of hidden states [k, h] under the present sampling, to be made chunk by chunk."""

        def q_of(rows: Tensor) -> Tensor:
            own = None if paths is None else [paths[row] for row in rows.tolist()]
            return self.q_of(hidden[rows], is_checked=False, paths=own)

        every = torch.arange(hidden.shape[0], device=hidden.device)
        return LazyDistributions(hidden=every, q_of=q_of, vocab=self.model.vocab)

    def _probabilities(self, logits: Tensor, paths: Sequence[Path] | None) -> Tensor:
        """Return q over the target's vocabulary: padding is cut off, and tokens that only one model has get 0."""
        if self.model.never_drawn.numel():
            logits = logits.index_fill(1, self.model.never_drawn, -torch.inf)
        logits = logits[:, : self._vocab]
        if self.process is not None:
            assert paths is not None
            logits = self.process(logits, paths)
        q = to_draft_probs(logits, self.sampling)
        return torch.nn.functional.pad(q, (0, self._vocab - q.shape[1]))

    def _grow(self, rows: int) -> None:
        """Allocate memory for more rows: the tree drew far more nodes than it will keep."""
        old = self._positions.shape[0]
        size = max(rows, old * 2)
        visible, positions = self._visible, self._positions
        self._visible, self._positions = visible.new_zeros(size, size), positions.new_zeros(size)
        self._visible[:old, :old], self._positions[:old] = visible, positions


def _of(paths: Sequence[Path] | None, rows: slice) -> Sequence[Path] | None:
    return None if paths is None else paths[rows]


def expand_batched(
    expansions: Sequence[tuple[LanguageModelDrafter, Tensor, Tensor]],
) -> list[Distributions | EdgespecError]:
    """Return the result of `expand` for each drafter's tokens [k] and parent rows [k], after one pass for all of them.

    The drafters, one for each text, have one model. Where q of all texts would be large, each text's is made chunk by
    chunk. An error stands in place of q where hidden states are not finite.
    """
    drafters = [drafter for drafter, _, _ in expansions]
    read = drafters[0].model.read([drafter.rows_of(tokens, parents) for drafter, tokens, parents in expansions])
    hidden = [drafter.took_in(states) for drafter, states in zip(drafters, read, strict=True)]
    found: list[Distributions | EdgespecError] = [NOT_FINITE] * len(drafters)
    groups: dict[object, list[int]] = {}  # of drafters whose q is made at once
    is_root = any(drafter.num_rows == 1 for drafter in drafters)  # the check is made once a tree
    is_finite = torch.stack([states.isfinite().all() for states in hidden]).tolist() if is_root else None
    for index, drafter in enumerate(drafters):
        if is_finite is None or is_finite[index]:
            joins = drafter.heads_join and drafter.process is None  # logits are processed text by text
            groups.setdefault(drafter.sampling if joins else index, []).append(index)
    for group in groups.values():
        num_rows = sum(hidden[index].shape[0] for index in group)
        if not is_root and num_rows > rows_made_at_once(drafters[0].model.vocab):
            for index in group:
                found[index] = drafters[index].lazy_q(hidden[index], drafters[index].last_paths(len(hidden[index])))
            continue
        try:
            paths = drafters[group[0]].last_paths(num_rows)  # of one text, where there are any
            states = torch.cat([hidden[index] for index in group])
            q = drafters[group[0]].q_of(states, is_checked=is_root, paths=paths)
        except EdgespecError as error:
            found = [error if index in group else other for index, other in enumerate(found)]
            continue
        for index, part in zip(group, q.split([hidden[index].shape[0] for index in group]), strict=True):
            found[index] = part
    return found


NOT_FINITE = EdgespecError(
    "E_NAN_LOGITS",
    "the draft's logits are NaN or infinite.",
    "Use another draft, `dtype=float32`, or `policy=none`.",
)


def refuse_not_finite(logits: Tensor) -> None:
    """Raise EdgespecError where a draft's logits are not finite.

    The check comes before they become probabilities, which may hide it.
    """
    if not bool(logits.amax().isfinite()):
        raise NOT_FINITE
