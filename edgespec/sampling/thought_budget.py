"""A budget of thought: behind so many tokens of it, only the words that close it may come.

What may come after a node of a tree is a function of the text and the node's path alone, as a grammar's tokens are, so
that trees give the text of plain decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.sampling.matcher import TokenGrammar

TAIL = 40  # tokens in which a mark is looked for: it may be spelled in letters
CUT_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtBudget:
    """How long a text may think. All its thoughts share the tokens."""

    most: int
    close: tuple[int, ...]  # tokens that end a thought
    marks: tuple[str, str]  # before a thought and behind it
    is_open: bool  # whether the prompt has begun one
    reopens: bool  # whether a thought may come anywhere; otherwise only as the first words
    decode: Callable[[Sequence[int]], str]  # with marks that are tokens

    def leaves_nothing(self, max_new_tokens: int) -> bool:
        """Return whether a text of so many tokens may end before its answer begins."""
        return self.most > 0 and self.most + len(self.close) >= max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Where a text stands."""

    is_open: bool
    may_open: bool = True
    num_thought: int = 0  # tokens of thoughts
    num_closed: int = 0  # of the tokens that close it, which are written
    tail: tuple[int, ...] = ()  # since the last mark


class BudgetMatcher:
    """The budget of one text, and the grammar that it has, if any."""

    def __init__(self, budget: ThoughtBudget, grammar: TokenGrammar | None, *, vocab: int) -> None:
        self._budget, self._vocab = budget, vocab
        self._grammar = None if grammar is None else grammar.matcher()
        self._state = _State(is_open=budget.is_open)
        self._behind: dict[tuple[int, ...], _State] = {}  # of the paths of a tree

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            self._state = self._after(self._state, token)
        self._behind = {}
        if self._grammar is not None:
            self._grammar.add(tokens)

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow the text and a path, [vocab] bool on the host; None for any.

        Raises EdgespecError where the grammar's library has given up.
        """
        allowed = None if self._grammar is None else self._grammar.allowed(path)
        forced = self._forced(self._state_behind(tuple(path)))
        if forced is None or (allowed is not None and not allowed[forced]):
            return allowed
        only = torch.zeros(self._vocab if allowed is None else len(allowed), dtype=torch.bool)
        only[forced] = True
        return only

    def likely(self, path: Sequence[int]) -> list[int]:
        """Return how a tokenizer spells the only text that may follow the text and a path."""
        if self._grammar is None or self._forced(self._state_behind(tuple(path))) is not None:
            return []
        return self._grammar.likely(path)

    def _state_behind(self, path: tuple[int, ...]) -> _State:
        if not path:
            return self._state
        found = self._behind.get(path)
        if found is None:
            found = self._behind[path] = self._after(self._state_behind(path[:-1]), path[-1])
        return found

    def _forced(self, state: _State) -> int | None:
        """Return the only token that may come next; a character that is cut is ended first."""
        budget = self._budget
        if not state.is_open or state.num_thought < budget.most:
            return None
        if not state.num_closed and budget.decode(state.tail).endswith(CUT_CHARACTER):
            return None
        return budget.close[state.num_closed]

    def _after(self, state: _State, token: int) -> _State:
        """Return the state behind one token more."""
        budget = self._budget
        if not state.is_open and not state.may_open:
            return state
        if token == self._forced(state):
            num_closed = state.num_closed + 1
            if num_closed == len(budget.close):
                return _State(is_open=False, may_open=budget.reopens, num_thought=state.num_thought)
            return replace(state, num_closed=num_closed)
        tail = (*state.tail, token)[-TAIL:]
        text, (opens, closes) = budget.decode(tail), budget.marks
        if state.is_open:
            num_thought = state.num_thought + 1
            if closes in text:
                return _State(is_open=False, may_open=budget.reopens, num_thought=num_thought)
            return _State(is_open=True, num_thought=num_thought, tail=tail)
        said = text.lstrip().rstrip(CUT_CHARACTER)
        if opens in text if budget.reopens else said.startswith(opens):
            return _State(is_open=True, num_thought=state.num_thought)
        may_open = budget.reopens or opens.startswith(said)
        return _State(is_open=False, may_open=may_open, num_thought=state.num_thought, tail=tail)
