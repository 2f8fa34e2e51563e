"""The day that a chat template tells: the given one, in the words that transformers' own clock would have."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils

from edgespec import Engine
from edgespec.chat.template_date import telling
from tests.support.families import make_tokenizer

DAY = datetime.date(2027, 3, 5)
TEMPLATES = {
    "llama 3": '{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}'
    "{{ date_string }}\n{{ messages[0].content }}",
    "where it is defined": '{% if strftime_now is defined %}{{ strftime_now("%A, %B %d, %Y") }}{% endif %}',
    "in a macro": '{% macro system() %}Today: {{ strftime_now("%Y-%m-%d") }}\n{% endmacro %}{{ system() }}',
    "blanks before and after": '\n  {% if true %}\n {{ strftime_now("%y%m%d %H:%M %j %% 100%") }} \n{% endif %}\n\n',
    "split": '{% set parts = strftime_now("%d %b %Y").split(" ") %}{{ parts[2] ~ parts[1] }}',
    "a format in a variable": '{% set f = "%d/%m" %}{{ strftime_now(f) }}{{ strftime_now(format="%x %X") }}',
}


def put_clock_at(day: datetime.date, patch: pytest.MonkeyPatch) -> None:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls(day.year, day.month, day.day, tzinfo=tz)

    patch.setattr(chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_the_given_day_as_it_would_tell_the_clocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, said = make_tokenizer(), [{"role": "user", "content": "a"}]
    tokenizer.chat_template = TEMPLATES[name]
    given = telling(tokenizer, DAY).apply_chat_template(said, tokenize=False)
    put_clock_at(DAY, monkeypatch)
    assert given == tokenizer.apply_chat_template(said, tokenize=False)


def test_a_template_without_a_day_stays_as_it_is() -> None:
    tokenizer = make_tokenizer()
    assert telling(tokenizer, DAY) is tokenizer
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert telling(tokenizer, DAY) is tokenizer
    tokenizer.chat_template = TEMPLATES["split"]
    assert telling(tokenizer, None) is tokenizer


def test_all_templates_of_a_model_tell_it() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ strftime_now('%Y') }}", "tool_use": "{{ strftime_now('%d') }}"}
    assert telling(tokenizer, DAY).apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "2027"
    assert "%" in tokenizer.chat_template["default"]  # it is as it was


def test_a_conversation_keeps_its_first_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At midnight nothing that was read is read anew, and a session that is loaded goes on from the day it began on."""
    with Engine.from_pretrained(context_tokens=240, self_check=False) as engine:
        template = '{{ strftime_now("%d %b %Y") }}{% for m in messages %}{{ m.content }}\n{% endfor %}'
        monkeypatch.setattr(engine.pair.tokenizer, "chat_template", template)
        chat = engine.chat(max_new_tokens=2)
        before = chat.first_ids("def")
        chat.send("def")
        put_clock_at(datetime.date(2001, 1, 1), monkeypatch)
        assert chat.first_ids("def") == before
        chat.send("more")
        assert chat.last.cached_tokens >= len(before)
        chat.day = DAY
        chat.save(tmp_path / "s.json")
        loaded = engine.chat()
        loaded.load(tmp_path / "s.json")
        assert loaded.day == DAY
        assert loaded.prompt_ids(loaded.messages) == chat.prompt_ids(chat.messages)
