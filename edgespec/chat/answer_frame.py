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
    from edgespec.chat.answer import AnswerForm

Thought = Literal["open", "may come", "none"]  # as the prompt leaves it
# No more spaces than these: a model that may write them for ever does. Others than JSON's are no JSON before it.
SPACE = r"/[ \t\r\n]{0,2}/"


def thought_behind(form: AnswerForm, prompt_end: str, *, is_thinking: bool) -> Thought:
    """Return whether a thought is open behind a prompt's last words, may begin, or is over before the answer."""
    marks = marks_of_thoughts(form)
    if is_thinking:
        return "open"
    return "none" if not marks or prompt_end.rstrip().endswith(marks[1].rstrip()) else "may come"


def framed(form: AnswerForm, answer: Grammar, thought: Thought) -> Grammar:
    """Return the grammar of an answer that has its own, with what stands before it."""
    before = before_answer(form, thought)
    if not before and not form.answer:
        return answer
    begins = form.answer.get("begins", "")
    inside = f"{SPACE} @answer" if not begins else f"({' | '.join(marked(form, one) for one in begins)}) @answer"
    rules = [f"start: {before} {inside}", *(thought_rules(form) if before else ())]
    return Grammar(form="grammar", text="\n".join(rules) + "\n", answer=answer)


def before_answer(form: AnswerForm, thought: Thought) -> str:
    """Return what may stand before an answer, in words of `thought_rules`; empty where nothing may."""
    if thought == "none" or not marks_of_thoughts(form):
        return ""
    after = marked(form, form.answer["between"]) if form.answer else ""
    if thought == "open":
        return f"thought_end {after}"
    opened = marked(form, marks_of_thoughts(form)[0])
    return f"({SPACE if not form.answer else ''} {opened} thought_end {after})?"


def marks_of_thoughts(form: AnswerForm) -> tuple[str, ...]:
    """Return what stands before and after a thought; nothing where the family writes none."""
    field = form.template["fields"].get("reasoning", {})
    marks = field.get("open"), field.get("close")
    return tuple(map(str, marks)) if form.thinks and all(isinstance(mark, str) for mark in marks) else ()


def thought_rules(form: AnswerForm) -> list[str]:
    """Return the rules of a thought, and of one with its end."""
    end = marks_of_thoughts(form)[1]
    return [*words(form, "thought", [end]), *until(form, "thought_end", "thought", end, [end])]


def words(form: AnswerForm, rule: str, marks: Sequence[str]) -> list[str]:
    """Return the rules of words without these marks; other tokens that no text matches may stand among them."""
    plain, terminal = form.plain_tokens.items(), rule.upper()
    others = sorted(token for text, token in plain if not any(mark in text for mark in marks))
    before = f"{rule}_before:" + (f" ({terminal}? <[{','.join(map(str, others))}]>)*" if others else "")
    return [f"{rule}: {rule}_before {terminal}?", before, f"{terminal}: /(?s:.*)/ & {without(marks)}"]


def until(form: AnswerForm, rule: str, words: str, mark: str, marks: Sequence[str]) -> list[str]:
    """Return the rules of words up to a mark and with it, where none of these `marks` stands in the words."""
    if mark in form.tokens:
        return [f"{rule}: {words} {symbol(form, mark)}"]
    # A token that ends with the mark is no text either.
    ends = [token for text, token in form.plain_tokens.items() if text.rstrip().endswith(mark)]
    others, terminal = [other for other in marks if other != mark], rule.upper()
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


def marked(form: AnswerForm, text: str) -> str:
    """Return a text in which marks that are tokens are named by their ids."""
    marks = "|".join(map(re.escape, sorted(form.tokens, key=len, reverse=True)))
    pieces = re.split(f"({marks})", text) if marks else [text]
    return " ".join(symbol(form, piece) for piece in pieces if piece)


def symbol(form: AnswerForm, mark: str) -> str:
    """Return a mark as a rule names it."""
    return f"<[{form.tokens[mark]}]>" if mark in form.tokens else quoted(mark)


def quoted(text: str) -> str:
    """Return a text as a rule has it."""
    return json.dumps(text, ensure_ascii=False)
