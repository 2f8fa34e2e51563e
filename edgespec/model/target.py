"""The target of one text: the passes that read the text and its trees, with the text's own cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import MOST_PROMPT_ROWS, PassRows, next_rows
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.text_cache import TextCache, num_in_place
from edgespec.to_device import on_device
from edgespec.tree.token_tree import TokenTree, ancestors_mask, depths
from offload.adapters.use import AdapterUse, Run


class Target:
    """The model whose distribution the output follows, for one text."""

    def __init__(self, model: CausalModel, cache: TextCache | None = None) -> None:
        """Begin a text, with the rows of its beginning that `cache` has."""
        self._model = model
        self.cache = model.new_text() if cache is None else cache
        self._unread: list[int] = []  # of the text, from the front
        self._looked_at: Tensor | None = None  # tokens [n] of the tree whose rows the cache holds
        self._rows_exact = 0  # of the rows that the running pass appends, those that are as in plain decoding
        self.num_kept = 0  # rows of the text that the cache had
        self.seen: SeenPrompt | None = None  # the prompt with pictures that the text begins with

    @property
    def device(self) -> torch.device:
        """The device that logits come out on."""
        return self._model.device

    @property
    def vocab(self) -> int:
        """The number of the logits' columns."""
        return self._model.vocab

    @property
    def reads_whole(self) -> bool:
        """Whether a prompt's rows belong into one pass."""
        return self._model.reads_whole

    @property
    def is_left_out(self) -> bool:
        """Whether the last pass went on without rows of this text: they are not to be used."""
        return self.cache.is_left_out

    def leave_out(self) -> None:
        """Let the running pass go on without this text's rows, from its next chunk on."""
        self.cache.is_left_out = True

    @property
    def part_rows(self) -> int:
        """The number of a text's tokens that parts of its prompt are multiples of."""
        return self._model.part_rows

    @property
    def num_read(self) -> int:
        """The number of the text's tokens that have rows."""
        return len(self.cache.ids)

    @property
    def takes_branches(self) -> bool:
        """Whether a tree's node may have several children."""
        return not self._model.is_plain

    @property
    def num_unread(self) -> int:
        """The number of the text's tokens that have no rows yet."""
        return len(self._unread)

    def begin(self, ids: Sequence[int], *, needs_logits: bool = True, prompt_tokens: int | None = None) -> None:
        """Start a text; cached rows of its beginning stay, those of its last token where its logits are known.

        Logits are needed after a prompt. The same one has those that it had, in every format: its end's hidden state
        is cached as well. The first `prompt_tokens` are its prompt, by default all. Cached rows of a prompt whose
        length has another rotation are dropped. Rows of pictures are kept by their keys, and whole where they see each
        other.
        """
        prompt_tokens = len(ids) if prompt_tokens is None else prompt_tokens
        before = self.cache.prompt_tokens
        ids = ids if self.seen is None else self.seen.keyed(ids)
        lengths = {self._model.rotation.length(tokens) for tokens in (self.cache.prompt_tokens, prompt_tokens)}
        if len(lengths) > 1:
            self.cache.truncate(0)
        self.cache.prompt_tokens = prompt_tokens
        end = self.cache.prompt_end
        is_known = not needs_logits or (end is not None and list(end[0]) == list(ids))
        self.num_kept = self.cache.keep_prefix(ids if is_known else ids[:-1])
        if self.seen is not None and self.seen.is_within_block(self.num_kept):
            self.num_kept = self.cache.keep_prefix(ids[: self.seen.start_of_block(self.num_kept)])
        if self._model.is_exact and (before != prompt_tokens or self.cache.num_exact < prompt_tokens):
            # The rows are another prompt's, of which whole spans alone were read alike, or a file's.
            self.cache.num_exact = min(self.cache.num_exact, before, prompt_tokens - 1)
            self.num_kept = self._keep_exact()
        self._unread = list(ids[self.num_kept :])

    def _keep_exact(self) -> int:
        """Drop the rows that were not read as in plain decoding, and return how many are left.

        A prompt's are read anew from a multiple on, and recurrent states may not reach back so far.
        """
        kept, part = self.cache.num_exact, self.part_rows
        while True:
            kept = kept if kept >= self.cache.prompt_tokens else kept // part * part
            self.cache.truncate(kept)
            if kept == len(self.cache.ids):
                return kept
            kept = len(self.cache.ids)

    @property
    def is_exact(self) -> bool:
        """Whether all of the text's rows were read as plain decoding reads them, where that is kept account of."""
        return self._model.is_exact and not self.num_inexact

    @property
    def num_inexact(self) -> int:
        """The number of the text's last rows that were read among others."""
        return len(self.cache.ids) - self.cache.num_exact

    def begin_exactly(self, path: tuple[int, ...]) -> None:
        """Make the root and a path's nodes text whose rows are to be read, and drop rows that were read otherwise."""
        assert self._looked_at is not None
        ids = [*self.cache.ids, *self._looked_at[on_device([0, *path], self.device)].tolist()]
        self._unread = ids[self._keep_exact() :]

    def exact_rows(self) -> PassRows:
        """Return the next rows for a pass as plain decoding reads them: the prompt's, or all behind it one by one."""
        left = self.cache.prompt_tokens - len(self.cache.ids)
        if left > MOST_PROMPT_ROWS:
            left = self.rows_within(MOST_PROMPT_ROWS)
        return self.text_rows(left) if left > 0 else self.text_rows(self.num_unread, one_by_one=True)

    def text_rows(self, count: int, *, one_by_one: bool = False) -> PassRows:
        """Return the next rows of the text, at most `count`, for a pass; call `took_in` after it."""
        self.cache.truncate()  # an interrupted pass may have left rows
        ids = self._unread[:count]
        left = len(ids) if one_by_one else max(0, self.cache.prompt_tokens - len(self.cache.ids))
        self._rows_exact = min(left, len(ids)) if self.is_exact else 0
        if self.seen is not None:
            ids = self.seen.true_ids(ids, self.cache.length)
        return next_rows(self.cache, on_device(ids, self.device), seen=self.seen, one_by_one=one_by_one)

    def rows_within(self, most: int) -> int:
        """Return how many of the next rows a pass has, `most` at most: they end where a part may end.

        Rows that see each other are read together, and may be more.
        """
        if self.num_unread <= most or self.reads_whole:
            return self.num_unread
        start = self.num_read
        count = max(0, (start + most) // self.part_rows * self.part_rows - start)
        return count if self.seen is None or not count else self.seen.end_of_block(start + count) - start

    def took_in(self, count: int) -> None:
        """Commit the next `count` rows of the text, which a pass has read."""
        self.cache.commit_next(self._unread[:count])
        del self._unread[:count]
        self.cache.num_exact += min(count, self._rows_exact)

    @property
    def prompt_end(self) -> Tensor:
        """The last hidden state [1, h] of the end of a prompt that is read."""
        assert self.cache.prompt_end is not None
        return self.cache.prompt_end[1]

    def end_prompt(self, hidden: Tensor) -> None:
        """Take the last hidden states [n, h] of the prompt's end: the text's."""
        self.cache.prompt_end = tuple(self.cache.ids), hidden[-1:].clone()

    def tree_rows(self, tree: TokenTree) -> PassRows:
        """Return the rows of a tree for a pass; the cache holds them until `commit`."""
        self.cache.truncate()  # an interrupted pass may have left rows
        self._looked_at = tree.tokens
        is_single = tree.num_nodes == 1
        self._rows_exact = int(is_single and self.is_exact)
        if is_single:
            return next_rows(self.cache, tree.tokens, seen=self.seen)
        positions = len(self.cache.ids) + depths(tree.parents)
        return PassRows(
            cache=self.cache,
            ids=tree.tokens,
            positions=positions,
            visible=ancestors_mask(tree.parents) if tree.ancestors is None else tree.ancestors,
            seen=None if self.seen is None else self.seen.rows_behind(positions),
        )

    def read_anew(self) -> None:
        """Read the text again if the next token changes the rotation of all rows."""
        num_tokens = len(self.cache.ids) + 1
        if self._model.rotation.outgrows(self.cache.prompt_tokens, num_tokens):
            ids = list(self.cache.ids)
            self.begin(ids, needs_logits=False, prompt_tokens=num_tokens)
            while self.num_unread:
                count = self.rows_within(MOST_PROMPT_ROWS)
                self.read([self.text_rows(count)])
                self.took_in(count)

    def max_depth(self, most: int) -> int:
        """Return the most layers of a tree, up to `most`, whose rows rotate as in plain decoding."""
        limit = self._model.rotation.tokens_before(self.cache.prompt_tokens, len(self.cache.ids) + 1)
        return most if limit is None else min(most, limit)

    def prefill(self, ids: Tensor) -> Tensor:
        """Read a text [n] alone, in one pass, and return the logits [vocab] after it."""
        self.begin(ids.tolist())
        (hidden,) = self.read([self.text_rows(self.num_unread)])
        self.took_in(self.num_unread)
        return self.logits(hidden[-1:])[0]

    def look(self, tree: TokenTree) -> Tensor:
        """Read a tree alone, and return the last hidden states [n, h] of its nodes."""
        (hidden,) = self.read([self.tree_rows(tree)])
        return hidden

    def read(self, parts: Sequence[PassRows]) -> list[Tensor]:
        """Return the last hidden states [n, h] of rows of this text and of others, after one pass over the weights."""
        return self._model.read(parts)

    def logits(self, hidden: Tensor, runs: Sequence[Run] | None = None) -> Tensor:
        """Return the logits [k, vocab] of hidden states [k, h]: of this text, or of several by their `runs`."""
        return self._model.logits(hidden, runs=[(self.adapters, hidden.shape[0])] if runs is None else runs)

    @property
    def adapters(self) -> AdapterUse:
        """The adapters that the text's rows have."""
        return self.cache.adapters

    def uncommit_last(self) -> None:
        """Take the last token from the text: it becomes a root."""
        self.cache.uncommit_last()

    def commit(self, path: tuple[int, ...]) -> None:
        """Append the root and the path's nodes to the text: keep their rows, and drop the others."""
        assert self._looked_at is not None
        rows = [0, *path]
        nodes = on_device(rows, self.device)
        tokens = self._looked_at[nodes].tolist()  # a handful, after verification has waited for the pass
        self.cache.commit(nodes + len(self.cache.ids), tokens, num_in_place=num_in_place(rows))
        self.cache.num_exact += self._rows_exact
