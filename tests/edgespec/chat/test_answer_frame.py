"""A grammar holds for the answer: behind a thought, and between a family's own marks."""

import pytest

from edgespec.chat.answer import AnswerReader, _known_formats, answer_format_of
from edgespec.chat.answer_frame import framed, thought_behind
from edgespec.sampling.grammar import Grammar, json_schema_grammar
from tests.edgespec.chat.test_call_grammar import Family

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
ANSWERS = {
    "schema": (json_schema_grammar(SCHEMA), '{"a": "<b>1"}', '{"b": 1}'),
    "choice": (Grammar(form="grammar", text='start: "yes" | "no"'), "yes", "Yes"),
    "GBNF": (Grammar(form="grammar", text='root ::= "yes" | "no"'), "no", "maybe"),
}
THINKING = [known["name"] for known in _known_formats() if "reasoning" in known["fields"]]


def family_of(name: str, *, has_tokens: bool) -> tuple[Family, str, str]:
    """A family and its marks, which are tokens or text."""
    known = next(known for known in _known_formats() if known["name"] == name)
    opened, closed = (known["fields"]["reasoning"][mark] for mark in ("open", "close"))
    marks = (
        [opened.strip(), closed] if not known.get("answer") else ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    )
    template = " ".join([*known["markers"], opened, closed])
    found = Family(template, marks=[mark for mark in marks if has_tokens])
    first = next(one for one in _known_formats() if all(mark in template for mark in one["markers"]))
    assert first["fields"] == known["fields"]
    return found, opened, closed


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", THINKING)
def test_the_thought_is_free_and_the_answer_is_not(name: str, has_tokens: bool, answer: str) -> None:
    found, opened, closed = family_of(name, has_tokens=has_tokens)
    grammar, right, wrong = ANSWERS[answer]
    frame = found.format.answer
    begins = frame["begins"][0] if frame else "\n"
    between = frame["between"] + begins if frame else "\n\n"
    thought = f"Hm: {wrong}, or {right}?{closed}{between}"
    for prompt_end, before in (
        (opened, thought),
        ("", opened + thought),
        ("", begins),
        (f"{opened}\n{closed}\n", begins),
    ):
        state = thought_behind(found.format, prompt_end, is_thinking=prompt_end == opened)
        whole = framed(found.format, grammar, state)
        if whole is grammar:  # the thought is over, and nothing stands around the answer
            before = ""
        assert found.takes(whole, before + right)
        assert not found.takes(whole, before + wrong)
        assert not found.takes(whole, before), "an answer of nothing"
        if state == "open":
            assert not found.takes(whole, right), "the thought is not the answer"
        if state == "none":
            assert not found.takes(whole, opened + thought + right, ends=False)


def test_a_model_without_thoughts_answers_from_the_first_token() -> None:
    found = Family("<tool_call>", marks=())
    assert not found.format.thinks
    grammar, right, _ = ANSWERS["schema"]
    assert framed(found.format, grammar, thought_behind(found.format, "<assistant>", is_thinking=False)) is grammar
    assert found.takes(grammar, right)


def test_a_token_that_holds_the_mark_and_more_ends_the_thought() -> None:
    found = Family("<think>", marks=["\n</think>\n\n"])
    grammar, right, _ = ANSWERS["choice"]
    whole = framed(found.format, grammar, "open")
    assert found.takes(whole, f"Hm.\n</think>\n\n{right}")
    assert not found.takes(whole, "Hm.\n</think>\n\nHm.", ends=False)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_marks_within_the_answer_are_words_however_it_comes(size: int) -> None:
    found = Family("<think>", marks=())
    said = '{"a": "<think>b</think>"}'
    reader = AnswerReader(found.format, prompt_end="<think>\n", ends_with_words=True)
    text = f"Hm.</think>\n\n{said}"
    parts = [part for start in range(0, len(text), size) for part in reader.feed(text[start : start + size])]
    parts += reader.end()
    assert "".join(part.text for part in parts if part.kind == "content") == said
    assert "".join(part.text for part in parts if part.kind == "reasoning") == "Hm."


def test_the_form_of_an_own_template_knows_its_tokens() -> None:
    found = Family("<think> </think>", marks=["<think>", "</think>"])
    own = {"start_anchor": "\x00", "fields": {"reasoning": {"open": "<think>", "close": "</think>"}, "content": {}}}
    found.tokenizer.response_template = own
    known = answer_format_of(found.tokenizer)
    assert known.thinks
    assert set(known.tokens) == {"<think>", "</think>"}
