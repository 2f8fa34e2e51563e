"""What stands around an answer: a thought before it, and the marks of a family whose every word stands between marks.

A grammar constrains the answer alone. What the prompt's end has begun is known from its last words: a thought that it
opened comes first, one that it closed comes no more, and elsewhere the model may begin one.

A mark such as `<think>` is one token of most families, and the text of a grammar never matches such a token: it is
named by its id. Where a tokenizer has no such token, the words before a mark end where it first appears.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from edgespec.sampling.grammar import Grammar

if TYPE_CHECKING:
    from edgespec.chat.answer import AnswerFormat

Thought = Literal["open", "may come", "none"]  # as the prompt leaves it
# No more spaces than these: a model that may write them for ever does. Others than JSON's are no JSON before it.
SPACE = r"/[ \t\r\n]{0,2}/"


def thought_behind(answer_format: AnswerFormat, prompt_end: str, *, is_thinking: bool) -> Thought:
    """Return whether a thought is open behind a prompt's last words, may begin, or is over before the answer."""
    marks = marks_of_thoughts(answer_format)
    if is_thinking:
        return "open"
    return "none" if not marks or prompt_end.rstrip().endswith(marks[1].rstrip()) else "may come"


def framed(answer_format: AnswerFormat, answer: Grammar, thought: Thought) -> Grammar:
    """Return the grammar of an answer that has its own, with what stands before it."""
    before = before_answer(answer_format, thought)
    if not before and not answer_format.answer:
        return answer
    rules = [f"start: {before} {inner_answer(answer_format)}", *(thought_rules(answer_format) if before else ())]
    return Grammar(form="grammar", text="\n".join(rules) + "\n", answer=answer)


def inner_answer(answer_format: AnswerFormat) -> str:
    """Return the answer that has a grammar of its own, with what begins it."""
    begins = answer_format.answer.get("begins", "")
    return f"({' | '.join(marked(answer_format, one) for one in begins)}) @answer" if begins else f"{SPACE} @answer"


def before_answer(answer_format: AnswerFormat, thought: Thought) -> str:
    """Return what may stand before an answer, in words of `thought_rules`; empty where nothing may."""
    if thought == "none" or not marks_of_thoughts(answer_format):
        return ""
    after = marked(answer_format, answer_format.answer["between"]) if answer_format.answer else ""
    if thought == "open":
        return f"thought_end {after}"
    opened = marked(answer_format, marks_of_thoughts(answer_format)[0])
    return f"({SPACE if not answer_format.answer else ''} {opened} thought_end {after})?"


def marks_of_thoughts(answer_format: AnswerFormat) -> tuple[str, ...]:
    """Return what stands before and after a thought; nothing where the family writes none."""
    field = answer_format.template["fields"].get("reasoning", {})
    marks = field.get("open"), field.get("close")
    return tuple(map(str, marks)) if answer_format.thinks and all(isinstance(mark, str) for mark in marks) else ()


def thought_rules(answer_format: AnswerFormat) -> list[str]:
    """Return the rules of a thought, and of one with its end."""
    end = marks_of_thoughts(answer_format)[1]
    return [*words(answer_format, "thought", [end]), *until(answer_format, "thought_end", "thought", end, [end])]


def words(answer_format: AnswerFormat, rule: str, marks: Sequence[str]) -> list[str]:
    """Return the rules of words without these marks; other tokens that no text matches may stand among them."""
    plain, terminal = answer_format.plain_tokens.items(), rule.upper()
    others = sorted(token for text, token in plain if not any(mark in text or text in mark for mark in marks))
    before = f"{rule}_before:" + (f" ({terminal}? <[{','.join(map(str, others))}]>)*" if others else "")
    return [f"{rule}: {rule}_before {terminal}?", before, f"{terminal}: /(?s:.*)/ & {without(marks)}"]


def until(answer_format: AnswerFormat, rule: str, words: str, mark: str, marks: Sequence[str]) -> list[str]:
    """Return the rules of words up to a mark and with it, where none of these `marks` stands in the words."""
    if any(mark.startswith(token) for token in answer_format.tokens):
        return [f"{rule}: {words} {marked(answer_format, mark)}"]
    terminal = rule.upper()
    if within := next((token for token in answer_format.tokens if token in mark), None):
        begin, _, rest = mark.partition(within)  # what stands before the token is text, as the words are
        last = f"/(?s:.*){either([begin])}/ & {without(marks)}"
        return [f"{rule}: {words}_before {terminal} {marked(answer_format, within + rest)}", f"{terminal}: {last}"]
    # A token that ends with the mark is no text either.
    ends = [token for text, token in answer_format.plain_tokens.items() if text.rstrip().endswith(mark)]
    others = [other for other in marks if other != mark]
    excluded = f" & {without(others)}" if others else ""
    return [
        f"{rule}: {words}_before {rule}_first" + (f" | {words} <[{','.join(map(str, ends))}]>" if ends else ""),
        f"{rule}_first[lazy]: {terminal}",
        f"{terminal}: /(?s:.*){either([mark])}/{excluded}",
    ]


def without(marks: Sequence[str], *, before: str = "(?s:.*)") -> str:
    """Return an expression of texts in which none of these marks stands behind what is `before`."""
    return f"~/{before}({either(marks)})(?s:.*)/"


def either(marks: Sequence[str]) -> str:
    """Return an expression of any of these marks."""
    # In a rule a line or an expression would end there.
    return "|".join(re.escape(mark).replace("\\\n", r"\n").replace("/", r"\/") for mark in marks)


def marked(answer_format: AnswerFormat, text: str) -> str:
    """Return a text in which marks that are tokens are named by their ids."""
    marks = "|".join(map(re.escape, sorted(answer_format.tokens, key=len, reverse=True)))
    pieces = re.split(f"({marks})", text) if marks else [text]
    return " ".join(symbol(answer_format, piece) for piece in pieces if piece)


def symbol(answer_format: AnswerFormat, mark: str) -> str:
    """Return a mark as a rule names it."""
    return f"<[{answer_format.tokens[mark]}]>" if mark in answer_format.tokens else quoted(mark)


def quoted(text: str) -> str:
    """Return a text as a rule has it."""
    return json.dumps(text, ensure_ascii=False)
