"""How long an answer may think and thought: a budget of tokens, behind which the model's closing words come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from edgespec.chat.answer import AnswerFormat, AnswerReader
from edgespec.chat.answer_frame import Thought, marks_of_thoughts
from edgespec.chat.given_template import template_text
from edgespec.errors import EdgespecError
from edgespec.sampling.thought_budget import ThoughtBudget
from edgespec.text.token_ids import encoded
from edgespec.text.token_text import TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.pair.pair import ModelPair

NO_THOUGHTS = "the model's chat template knows of no thoughts"


def thought_budget(
    tokenizer: PreTrainedTokenizerBase,
    answer_format: AnswerFormat | None,
    thought: Thought,
    most: int,
    message: str = "",
) -> ThoughtBudget:
    """Return a budget of `most` tokens of thought; `message` stands before the words that close it.

    Raises EdgespecError where the family writes none.
    """
    marks = () if answer_format is None else marks_of_thoughts(answer_format)
    if answer_format is None or not marks:
        what = f"`reasoning_budget={most}` has nothing to bound: {NO_THOUGHTS}."
        raise EdgespecError("E_SETTING", what, "Leave it out.")
    opened, closed = marks
    close = encoded(tokenizer, message + _as_written(tokenizer, closed), add_special_tokens=False)
    return ThoughtBudget(
        most=most,
        close=tuple(close),
        marks=(opened, closed),
        is_open=thought == "open",
        reopens=bool(answer_format.answer),
        decode=partial(_decoded, tokenizer),
    )


def num_thought(
    pair: ModelPair, reader: AnswerReader, answer_format: AnswerFormat | None, tokens: Sequence[int]
) -> int:
    """Return how many of an answer's tokens have something of what is thought; `reader` has read nothing of it.

    The end of a line before the mark that ends it is the mark's, where the chat template writes one.
    """
    decoder = TokenText(pair.tokenizer, keeps_special=True)
    pieces = [decoder.step(token) for token in tokens if token not in pair.stop_tokens]
    pieces[-1:] = [piece + decoder.rest() for piece in pieces[-1:]]
    text, (_, closed) = "".join(pieces), (marks_of_thoughts(answer_format) if answer_format else ()) or ("", "")
    reader.feed(text)
    reader.end()
    before = _as_written(pair.tokenizer, closed).partition(closed)[0] if closed else ""
    cut, mark = len(before), before + closed
    spans = [(start, end - cut * text.startswith(mark, end - cut)) for start, end in reader.thoughts]
    found, waiting, at = 0, 0, 0
    for piece in pieces:
        waiting += 1  # a token without text of its own is a part of the next one's
        if piece:
            is_thought = any(start < at + len(piece) and at < end for start, end in spans)
            found, waiting, at = found + waiting * is_thought, 0, at + len(piece)
    return found


def _as_written(tokenizer: PreTrainedTokenizerBase, closed: str) -> str:
    """Return the mark with the ends of lines that the chat template writes around it."""
    text = template_text(tokenizer).replace("\\n", "\n")  # as a string within the template has it
    before = "\n" if f"\n{closed}" in text else ""
    return before + closed + ("\n\n" if f"{closed}\n\n" in text else "")


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
