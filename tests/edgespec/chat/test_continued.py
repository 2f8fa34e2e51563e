"""An answer that others have begun goes on where transformers' `continue_final_message` lets it, or is refused."""

from typing import Any

import pytest

from edgespec.chat.continued import goes_on
from edgespec.chat.prompt_ids import prompt_ids
from edgespec.errors import EdgespecError
from tests.edgespec.chat.test_rendering import with_template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
# As Qwen 3's: thoughts of the last answer are written anew
THINKS = (
    "{% for m in messages %}{% set content = m.content %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PARTS = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
SHOUTS = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
USER = {"role": "user", "content": "Count to five, please."}


def begun(text: Any, **fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": text, **fields}]


@pytest.mark.parametrize("template", [CHATML, TRIMS, THINKS], ids=["chatml", "trims", "thinks"])
@pytest.mark.parametrize("text", ["One, two,", "One, two, ", "One\n", "<think>\n\n</think>\n\n", "<|im_end|>", "a"])
def test_the_prompt_is_transformers_own(template: str, text: str) -> None:
    tokenizer = with_template(template)
    expected = tokenizer.apply_chat_template(begun(text), continue_final_message=True, tokenize=False)
    assert expected.rstrip().endswith(text.strip())
    assert prompt_ids(tokenizer, begun(text)) == tokenizer.encode(expected, add_special_tokens=False)
    whole = tokenizer.apply_chat_template(begun(text), add_generation_prompt=True, tokenize=False)
    assert prompt_ids(tokenizer, begun(text), continues=False) == tokenizer.encode(whole, add_special_tokens=False)


def test_parts_and_templates_that_read_parts_go_on_too() -> None:
    for template in (CHATML, PARTS):
        tokenizer = with_template(template)
        found = tokenizer.decode(prompt_ids(tokenizer, begun([{"type": "text", "text": "One, two,"}])))
        assert found.endswith("assistant\nOne, two,")


def test_a_flag_counts_above_the_messages_own_prefix_and_both_above_the_role() -> None:
    assert goes_on(begun("a"))
    assert goes_on(begun("a", prefix=True))
    assert not goes_on(begun("a", prefix=False))
    assert goes_on(begun("a", prefix=False), True)
    assert not goes_on(begun("a", prefix=True), False)
    assert not goes_on([USER])
    for messages, wish in (([USER], True), ([{**USER, "prefix": True}], None)):
        with pytest.raises(EdgespecError, match="the last is user's"):
            goes_on(messages, wish)
    for prefix in ("false", "", 0, 1, []):
        with pytest.raises(EdgespecError, match="neither true nor false"):
            goes_on(begun("a", prefix=prefix))


@pytest.mark.parametrize(
    ("template", "message", "words"),
    [
        (CHATML, {"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "calls tools"),
        (CHATML, {"content": "", "reasoning_content": "Hm."}, "thoughts and no text"),
        (SHOUTS, {"content": "One, two,"}, "writes its text otherwise"),
        (THINKS, {"content": "<think>a</think>b"}, "writes its text otherwise"),
    ],
    ids=["calls", "thoughts", "capitals", "thoughts anew"],
)
def test_what_cannot_go_on_is_refused_with_a_way_out(template: str, message: dict[str, Any], words: str) -> None:
    messages = [USER, {"role": "assistant", **message}]
    with pytest.raises(EdgespecError, match=words) as refused:
        prompt_ids(with_template(template), messages)
    assert "message 2" in refused.value.what
    assert "continue_final_message" in refused.value.fix
