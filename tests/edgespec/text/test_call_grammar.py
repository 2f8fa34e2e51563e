"""A required call is one of the tools, whether the marks around it are tokens or text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from edgespec.pair.find import find_pair
from edgespec.pair.pair import open_pair
from edgespec.sampling.grammar import Grammar
from edgespec.sampling.matcher import token_grammar
from edgespec.text.answer import answer_form
from edgespec.text.call_grammar import forced_calls

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
SUN: Any = {"type": "function", "function": {"name": "sun", "parameters": CITY}}
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]")
TEMPLATES = {"hermes": "<tool_call> <think>", "mistral": "[TOOL_CALLS]", "llama 3": '<|start_header_id|> "parameters"'}
RIGHT = {
    "hermes": '<tool_call>\n{"name": "sun", "arguments": {"city": "Rome"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "sun", "arguments": {"city": "Rome"}}]',
    "llama 3": '{"name": "sun", "parameters": {"city": "Rome"}}',
}
FAMILIES = [(family, has_tokens) for family in TEMPLATES for has_tokens in (True, False)]


class Family:
    """A family's form over the built-in pair's tokenizer, whose marks are tokens of it or text."""

    def __init__(self, name: str, *, has_tokens: bool) -> None:
        self.tokenizer = open_pair(*find_pair(None, None)).tokenizer
        if has_tokens:
            self.tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
        self.tokenizer.chat_template = TEMPLATES[name]
        form = answer_form(self.tokenizer)
        assert form is not None
        self.form, self.vocab, self.stop = form, len(self.tokenizer), 0

    def matcher(self, grammar: Grammar) -> Any:
        return token_grammar(grammar, self.tokenizer, vocab=self.vocab, stop_tokens=frozenset({self.stop})).matcher()

    def takes(self, grammar: Grammar, text: str, *, ends: bool = True) -> bool:
        """Return whether every token of a text is allowed where it stands, and the text may end there."""
        ids, matcher = self.tokenizer.encode(text, add_special_tokens=False), self.matcher(grammar)
        for number, token in enumerate(ids):
            if not matcher.allowed(ids[:number])[token]:
                return False
        return not ends or bool(matcher.allowed(ids)[self.stop])


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda found: f"{found[0]}, {'tokens' if found[1] else 'text'}")
def family(request: pytest.FixtureRequest) -> tuple[str, Family]:
    name, has_tokens = request.param
    return name, Family(name, has_tokens=has_tokens)


def test_a_required_call_may_be_written_as_the_model_writes_it(family: tuple[str, Family]) -> None:
    name, found = family
    grammar = forced_calls(found.form, [SUN], is_thinking=False)
    assert found.takes(grammar, RIGHT[name])
    assert not found.takes(grammar, RIGHT[name].replace("Rome", "Oslo"))
    assert not found.takes(grammar, "Hello")
    assert not found.takes(grammar, RIGHT[name].replace("sun", "any"))


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_required_call_may_come_after_the_thought_that_the_prompt_began(has_tokens: bool) -> None:
    found = Family("hermes", has_tokens=has_tokens)
    grammar = forced_calls(found.form, [SUN], is_thinking=True)
    assert found.takes(grammar, f"I call <tool_call> now.\n</think>\n\n{RIGHT['hermes']}")
    assert not found.takes(grammar, "I think on.")
    assert not found.takes(grammar, "Hm.</think>Hello", ends=False)
