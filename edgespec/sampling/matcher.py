"""A grammar that is followed token by token, with the llguidance library: which tokens may come next.

After a node of a tree, the grammar allows the tokens that may follow the text and the node's own ancestors: the matcher
follows that path, computes its mask, and goes back to the text.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import Grammar, bounded_json, refused, schema_to_follow

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MOST_CACHED = 1 << 26  # bytes of masks
MOST_COMPILED = 64  # grammars that are kept
MAX_REASON = 300  # characters of the library's message
MAX_COMPILE_S = 2.5  # of a grammar, which is refused within five on a busy machine too
STACK_BYTES = 1 << 28  # for a schema whose references follow each other as often as the library takes it
_STACK = threading.Lock()  # the size is that of all threads that begin


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrammar:
    """A grammar over a model's tokens, which can be followed."""

    grammar: Grammar
    start: LLMatcher = field(repr=False)  # at the beginning of a text
    stop_tokens: frozenset[int]  # that are allowed where the grammar's text can end

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the beginning of a text."""
        return GrammarMatcher(self)


class GrammarMatcher:
    """The state of a grammar in one text; the prompt is no part of it."""

    def __init__(self, grammar: TokenGrammar) -> None:
        self._matcher: LLMatcher = grammar.start.deep_copy()
        self._stop_tokens = grammar.stop_tokens
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # by path, of the text as it is

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text; those after a stop token do not count."""
        self._matcher.consume_tokens(self._before_end(tokens))
        self._masks = {}

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Return the tokens that may follow the text and a path, [vocab] bool on the host.

        None after a stop token, and behind a path that the grammar does not have. Raises EdgespecError where the
        library has given up, now or before: it never recovers.
        """
        known = tuple(path)
        if known not in self._masks:
            allowed = self._mask(known)
            if len(self._masks) * (0 if allowed is None else len(allowed)) > MOST_CACHED:
                self._masks = {}
            self._masks[known] = allowed
        return self._masks[known]

    def likely(self, path: Sequence[int]) -> list[int]:
        """Return the tokens by which a tokenizer writes the only text that may follow the text and a path.

        The model may spell it otherwise.
        """
        tokens = self._before_end(path)
        if len(tokens) < len(path):
            return []
        with self._behind(tokens) as has_path:
            return list(self._matcher.compute_ff_tokens()) if has_path else []

    def _mask(self, path: tuple[int, ...]) -> Tensor | None:
        tokens = self._before_end(path)
        if len(tokens) < len(path):
            return None
        with self._behind(tokens) as has_path:
            bias = self._matcher.compute_logit_bias() if has_path else None
        if self._matcher.is_error():
            raise refused("the grammar", _reason(self._matcher.get_error()))
        # By numpy, in this thread: torch's threads wait for each other where other programs run.
        return None if bias is None else torch.from_numpy(np.frombuffer(bias, dtype=np.uint8) > 0)

    @contextmanager
    def _behind(self, tokens: Sequence[int]) -> Iterator[bool]:
        """Within this block stand behind more tokens, if the grammar has them."""
        num_taken = self._matcher.try_consume_tokens(list(tokens)) if tokens else 0
        yield num_taken == len(tokens)
        if num_taken:
            self._matcher.rollback(num_taken)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        end = next((index for index, token in enumerate(tokens) if token in self._stop_tokens), len(tokens))
        return list(tokens[:end])


def token_grammar(
    grammar: Grammar, tokenizer: PreTrainedTokenizerBase, *, vocab: int, stop_tokens: frozenset[int]
) -> TokenGrammar:
    """Return a grammar over a model's tokens; `stop_tokens` end the text.

    Raises EdgespecError for a wrong grammar, or without the library.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        what = "grammars and JSON schemas need the library llguidance, which is not installed."
        raise EdgespecError("E_GRAMMAR", what, "Install it: pip install 'edgespec[grammar]'.") from error
    if not stop_tokens:
        what = "a grammar's text must be able to end, and no token ends a text here."
        raise EdgespecError("E_GRAMMAR", what, "Leave out `ignore_eos=True`, or the grammar.")
    return _compiled(grammar, tokenizer, vocab, stop_tokens)


@functools.lru_cache(maxsize=MOST_COMPILED)
def _compiled(
    grammar: Grammar, tokenizer: PreTrainedTokenizerBase, vocab: int, stop_tokens: frozenset[int]
) -> TokenGrammar:
    """Return a grammar that all texts share which have it: a large schema takes tens of milliseconds."""
    what = {"json_schema": "the JSON schema", "grammar": "the grammar"}[grammar.form]
    tokens = _tokens(tokenizer, vocab, stop_tokens)
    start = _within_seconds(partial(_start, grammar, tokens, what), what)
    return TokenGrammar(grammar=grammar, start=start, stop_tokens=stop_tokens)


def _within_seconds(work: Callable[[], LLMatcher], what: str) -> LLMatcher:
    """Return what work in a thread of its own returns; raises EdgespecError where it takes longer than it may."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _STACK:
        others = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar").start()
        finally:
            threading.stack_size(others)
    try:
        start: LLMatcher = done.result(MAX_COMPILE_S)
    except TimeoutError:
        raise refused(what, f"it takes longer than {MAX_COMPILE_S:g} s to compile") from None
    return start


def _start(grammar: Grammar, tokens: LLTokenizer, what: str) -> LLMatcher:
    """Return a matcher at the beginning of a text; raises EdgespecError for a wrong grammar."""
    from llguidance import LLMatcher, grammar_from

    try:
        parts = [grammar] if grammar.answer is None else [grammar, grammar.answer]
        source = json.dumps({"grammars": [_part(part, grammar_from) for part in parts]})
    except ValueError as error:
        raise refused(what, _reason(str(error))) from error
    start = LLMatcher(tokens, source, log_level=0)
    if start.is_error():
        raise refused(what, _reason(start.get_error()))
    first = start.deep_copy()
    has_first = any(first.compute_logit_bias())
    if first.is_error():
        raise refused(what, f"it allows no first token ({_reason(first.get_error())})")
    if not has_first:
        raise refused(what, "it allows no first token")
    return start


def _part(grammar: Grammar, read: Callable[[Any, str], str]) -> dict[str, Any]:
    """Return a grammar as the library reads one of several; raises ValueError for a wrong one."""
    if grammar.form == "json_schema":
        return {"name": "answer", "json_schema": bounded_json(schema_to_follow(json.loads(grammar.text)))}
    # Lark's `?` before a rule shapes a tree that is not made here; the library knows none.
    text = re.sub(r"^(\s*)\?(?=[a-z_]\w*\s*:)", r"\1", grammar.text, flags=re.MULTILINE)
    return {"name": "answer" if grammar.answer is None else "calls", "lark_grammar": read("gbnf", text)}


@functools.lru_cache(maxsize=2)
def _tokens(tokenizer: PreTrainedTokenizerBase, vocab: int, stop_tokens: frozenset[int]) -> LLTokenizer:
    """Return the library's table of the tokens; of 262,144 it takes seconds, in which no thread of Python runs."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab, eos_token=sorted(stop_tokens))  # type: ignore[arg-type]


def _reason(said: str) -> str:
    """Return the library's message on one line, without the state that it appends; it says where it has panicked."""
    words = " ".join(re.split("<state>|<backtrace>", said)[0].split()).rstrip(".")
    words = words.replace("panic: ", "llguidance fails at it, ")
    return words if len(words) <= MAX_REASON else words[:MAX_REASON] + "…"
