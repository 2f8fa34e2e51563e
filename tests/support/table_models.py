"""Two models that are tables: a target and a draft that look up what follows a text."""

from collections import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgespec.model.text_cache import shared_length
from edgespec.tree.token_tree import TokenTree

RowOf = Callable[[tuple[int, ...]], Tensor]  # a text -> [vocab]


class TableTarget:
    """A target that looks its logits up, in passes that texts of other tables may share."""

    device = torch.device("cpu")
    reads_whole = False
    part_rows = 1
    is_left_out = False
    takes_branches = True
    adapters = ()
    seen = None  # no picture

    def __init__(self, logits_of: RowOf, *, vocab: int) -> None:
        self.logits_of, self.vocab = logits_of, vocab
        self.text: list[int] = []  # that has rows: the root excepted
        self.unread: list[int] = []
        self.num_kept = 0
        self.looked_at: TokenTree | None = None

    @property
    def num_unread(self) -> int:
        """Tokens of the prompt that no pass has read."""
        return len(self.unread)

    @property
    def num_read(self) -> int:
        """Tokens that a pass has read."""
        return len(self.text)

    def begin(self, ids: abc.Sequence[int], *, needs_logits: bool = True, prompt_tokens: int | None = None) -> None:
        """Start a text, with the rows that it shares with the last one."""
        del prompt_tokens
        self.num_kept = shared_length(self.text, ids[:-1] if needs_logits else ids)
        self.text, self.unread = list(ids[: self.num_kept]), list(ids[self.num_kept :])

    def rows_within(self, most: int) -> int:
        """Return how many of the next tokens of the prompt a pass may read that has room for so many."""
        return min(most, self.num_unread)

    def text_rows(self, count: int) -> Tensor:
        """Look up the logits after the next tokens of the prompt."""
        ends = range(1, min(count, self.num_unread) + 1)
        return torch.stack([self.logits_of((*self.text, *self.unread[:end])) for end in ends])

    def took_in(self, count: int) -> None:
        """Move tokens of the prompt to the text that is read."""
        self.text += self.unread[:count]
        del self.unread[:count]

    def end_prompt(self, hidden: Tensor) -> None:
        """Take the last hidden states of the prompt's end."""
        self.prompt_end = hidden[-1:]

    def tree_rows(self, tree: TokenTree) -> Tensor:
        """Look up the logits after every node, which stand for hidden states."""
        assert not self.unread, "trees grow below a text that has been read"
        self.looked_at = tree
        texts: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            texts.append((*(texts[parent] if parent >= 0 else self.text), token))
        return torch.stack([self.logits_of(text) for text in texts])

    def read(self, parts: abc.Sequence[Tensor]) -> list[Tensor]:
        """Return the rows, which were looked up as they were made."""
        return list(parts)

    def logits(self, hidden: Tensor, runs: object = None) -> Tensor:
        """Return the rows: they are logits."""
        del runs
        return hidden

    def read_anew(self) -> None:
        """Do nothing: a table knows no positions."""

    def max_depth(self, most: int) -> int:
        """Return `most`."""
        return most

    def uncommit_last(self) -> None:
        """Let the prompt's last token become a root."""
        self.text.pop()

    def commit(self, path: tuple[int, ...]) -> None:
        """Add the root and the path to the text."""
        self.text += self.looked_at.tokens[[0, *path]].tolist()


class TableDrafter:
    """A draft that looks rows up and makes its q of them."""

    def __init__(self, row_of: RowOf, to_q: Callable[[Tensor], Tensor]) -> None:
        """Take rows of logits, or of whatever `to_q` makes q of: [nodes, vocab] -> [nodes, vocab]."""
        self.row_of, self.to_q = row_of, to_q
        self.process: Any = None  # what changes logits by the text so far
        self.begin([])

    def begin(self, ids: abc.Sequence[int]) -> None:
        """Start a text."""
        self.text = list(ids)
        self.rewind()

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Return q after nodes: [nodes, vocab]."""
        new = [
            (*(self.paths[parent] if parent >= 0 else ()), token)
            for token, parent in zip(tokens.tolist(), parent_rows.tolist(), strict=True)
        ]
        self.paths += new
        rows = torch.stack([self.row_of((*self.text, *path)) for path in new])
        if self.process is not None:
            rows = self.process(rows, [path[1:] for path in new])  # the root's token is the text's
        q = self.to_q(rows)
        self.q += q
        return q

    def hidden(self, rows: Tensor) -> Tensor:
        """Return what decision models read: logarithms of q, for want of states."""
        return torch.stack([self.q[row] for row in rows.tolist()]).clamp(min=1e-9).log()

    def rewind(self) -> None:
        """Forget the tree."""
        self.paths: list[tuple[int, ...]] = []
        self.q: list[Tensor] = []

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        """Add the root and the path to the text."""
        for row, length in zip(path_rows, range(2, len(path_tokens) + 2), strict=True):
            assert row < 0 or self.paths[row] == (root, *path_tokens)[:length], "rows are those of the path"
        self.text += [root, *path_tokens]
        self.rewind()
