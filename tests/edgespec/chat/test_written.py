"""An answer with special tokens is read again as the model wrote it, whatever the chat template does with answers."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from edgespec import EdgespecError, Engine
from edgespec.chat.chat_template import Message, message_fields, template_ids
from edgespec.chat.conversation import Conversation
from edgespec.text.token_text import text_of_tokens
from tests.support.families import make_tokenizer

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "[TOOL_CALLS]", "<think|>")
ASSISTANT = "<|start|>assistant"
TURN = "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
FINAL = "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
REFUSAL = "{% if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
CALL = "[TOOL_CALLS]"


def template(answer: str, *, asks: str = ASSISTANT) -> str:
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% else %}" + TURN + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + asks + "{% endif %}"
    )


def tokenizer_with(text: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = text
    return tokenizer


def turn(text: str) -> str:
    return f"<|start|>user<|message|>{text}<|end|>"


def prompt(tokenizer: PreTrainedTokenizerFast, *said: str) -> str:
    """The prompt of questions and answers in turns, whose answers are tokens."""
    messages = []
    for index, text in enumerate(said):
        ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if index % 2 else ()
        content = text_of_tokens(tokenizer, ids) if ids else text
        messages.append(Message(role="assistant" if ids else "user", content=content, token_ids=ids))
    fields = [message_fields(tokenizer, message) for message in messages]
    return str(tokenizer.decode(template_ids(tokenizer, fields), skip_special_tokens=False))


def transformers_prompt(tokenizer: PreTrainedTokenizerFast, *said: str) -> str:
    """What a loop of transformers' own makes of the texts with their special tokens."""
    messages = [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(said)]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


HARMONY = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>yes"
CALLED = CALL + '[{"name": "f"}]'
PLAIN = template("{{ '<|start|>assistant' + m.content + '<|end|>' }}")


@pytest.mark.parametrize("answers", [("yes", "no"), (CALLED, "done"), (HARMONY, HARMONY), (f" {CALLED} ", "b")])
def test_it_is_transformers_own_prompt_where_the_template_adds_nothing(answers: tuple[str, str]) -> None:
    tokenizer = tokenizer_with(PLAIN)
    said = ("a", answers[0], "b", answers[1], "c")
    assert prompt(tokenizer, *said) == transformers_prompt(tokenizer, *said)


@pytest.mark.parametrize(
    "answer", [FINAL, REFUSAL + FINAL, REFUSAL + "{{ m.content }}"], ids=["frame", "both", "refusal"]
)
def test_a_frame_is_not_read_twice_and_a_refusal_loses_nothing(answer: str) -> None:
    """As gpt-oss: its template puts answers into a channel, and refuses those that have channels."""
    tokenizer = tokenizer_with(template(answer))
    end = "<|end|>" if FINAL in answer else ""
    first = f"{turn('a')}{ASSISTANT}{HARMONY}{end}{turn('b')}{ASSISTANT}"
    assert prompt(tokenizer, "a", HARMONY, "b") == first
    assert prompt(tokenizer, "a", HARMONY, "b", HARMONY, "c") == f"{first}{HARMONY}{end}{turn('c')}{ASSISTANT}"


def test_answers_without_special_tokens_beside_such_ones_stay_the_templates() -> None:
    tokenizer = tokenizer_with(template(REFUSAL + FINAL))
    framed = f"{ASSISTANT}<|channel|>final<|message|>plain<|end|>"
    assert prompt(tokenizer, "a", "plain", "b") == f"{turn('a')}{framed}{turn('b')}{ASSISTANT}"
    expected = f"{turn('a')}{framed}{turn('b')}{ASSISTANT}{HARMONY}<|end|>{turn('c')}{framed}{turn('d')}{ASSISTANT}"
    assert prompt(tokenizer, "a", "plain", "b", HARMONY, "c", "plain", "d") == expected


def test_a_template_that_cuts_something_out_is_followed() -> None:
    """As Gemma 4's, which knows the marks of its thoughts, and leaves earlier ones out."""
    tokenizer = tokenizer_with(template("{{ '<|start|>assistant' + m.content.split('<think|>')[-1] + '<|end|>' }}"))
    said = ("a", "thoughts<think|>yes", "b")
    assert prompt(tokenizer, *said) == f"{turn('a')}{ASSISTANT}yes<|end|>{turn('b')}{ASSISTANT}"
    assert prompt(tokenizer, *said) == transformers_prompt(tokenizer, *said)


def test_an_opening_that_only_the_question_has_is_before_the_answer() -> None:
    """As templates that begin an answer for the model: it is part of what the answer was written behind."""
    answer = "{{ '<|start|>assistant' + m.content + '<|end|>' }}"
    tokenizer = tokenizer_with(template(answer, asks=ASSISTANT + "<|channel|>"))
    said = ("a", "final<|message|>yes", "b")
    opened = f"{ASSISTANT}<|channel|>"
    assert prompt(tokenizer, *said) == f"{turn('a')}{opened}final<|message|>yes<|end|>{turn('b')}{opened}"


def test_a_template_that_leaves_answers_out_is_one_error() -> None:
    with pytest.raises(EdgespecError, match=r"message 2 \(role 'assistant'\) does not reach the prompt"):
        prompt(tokenizer_with(template("")), "a", HARMONY, "b")


def test_a_template_that_fails_anyway_is_one_error() -> None:
    tokenizer = tokenizer_with(template("{{ raise_exception('no answers') }}"))
    with pytest.raises(EdgespecError, match="no answers"):
        prompt(tokenizer, "a", HARMONY, "b")


def test_a_conversation_goes_on_from_what_the_model_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it reads nothing anew; a session keeps it, and the shown text may have it too."""
    with Engine.from_pretrained(context_tokens=240, self_check=False) as engine:
        tokenizer = engine.pair.tokenizer
        mark = tokenizer.convert_tokens_to_ids("@")
        tokenizer.add_special_tokens({"additional_special_tokens": ["@"]})
        monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
        options = {"max_new_tokens": 6, "temperature": 0, "logit_bias": {mark: 100}}
        chat: Conversation = engine.chat(**options)
        chat.send("def")
        assert chat.last.token_ids == (mark,) * 6
        assert chat.last.text == ""
        chat.send("more")
        assert chat.last.cached_tokens >= len(tokenizer.encode("def\n")) + 5
        chat.save(tmp_path / "s.json")
        loaded = engine.chat()
        loaded.load(tmp_path / "s.json")
        assert loaded.prompt_ids(loaded.messages) == chat.prompt_ids(chat.messages)
        keeping = engine.chat(skip_special_tokens=False, **options)
        assert keeping.send("def").text == "@" * 6
        keeping.save(tmp_path / "kept.json")
        loaded.load(tmp_path / "kept.json")
        assert loaded.messages[1].token_ids == (mark,) * 6
        assert engine.generate("def", stop="@@", skip_special_tokens=False, **options).text == ""
        assert engine.generate("def", stop="@", **options).finish_reason == "stop"
