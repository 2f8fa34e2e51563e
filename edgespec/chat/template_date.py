"""The day that a chat template gives to the model.

It is fixed for a run and for a conversation: yesterday's messages are read today as they were then. The hour is
midnight's, whenever the template is read.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKS = "strftime_now"  # the function that transformers gives to templates
_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMpPrRsSTuUVwWxXyYzZ"  # a platform may lack some
_PERCENT = "\\u0000"  # stands for two, which mean one
_FLAGS = ("", "-", "_", "#")  # without zeros, or with blanks for them


def asks_for_day(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template reads the day."""
    return _ASKS in str(tokenizer.chat_template)


def telling(tokenizer: PreTrainedTokenizerBase, day: datetime.date | None) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose chat template reads this day, where it reads one; None is the clock's."""
    if day is None or not asks_for_day(tokenizer):
        return tokenizer
    found, template = copy.copy(tokenizer), tokenizer.chat_template
    by_name = isinstance(template, dict)
    found.chat_template = {name: _macro(day) + t for name, t in template.items()} if by_name else _macro(day) + template
    return found


def parse_day(text: object) -> datetime.date | None:
    """Return the day of YYYY-MM-DD, and None for anything else."""
    try:
        return datetime.date.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


@functools.lru_cache(maxsize=8)
def _macro(day: datetime.date) -> str:
    """Return a template's first line, which is no text, and defines the function in place of transformers' own.

    A template is handed plain data alone: no function can be given to it.
    """
    at = datetime.datetime.combine(day, datetime.time())
    values = {}
    for name in [f"{flag}{letter}" for letter in _DIRECTIVES for flag in _FLAGS]:
        with suppress(ValueError):  # the platform's own strftime refuses it
            if (text := at.strftime(f"%{name}")) != f"%{name}":
                values[name] = text
    return (
        f"{{% macro {_ASKS}(format) %}}{{% set told = {json.dumps(values)} %}}{{% set written %}}"
        f"{{% for part in format.replace('%%', '{_PERCENT}').split('%') %}}"
        "{% if loop.first %}{{ part }}{% elif part[:2] in told %}{{ told[part[:2]] + part[2:] }}"
        "{% elif part[:1] in told %}{{ told[part[:1]] + part[1:] }}{% else %}{{ '%' + part }}{% endif %}"
        f"{{% endfor %}}{{% endset %}}{{{{ written|replace('{_PERCENT}', '%') }}}}{{% endmacro %}}\n"
    )
