"""The day that a chat template tells the model, where it asks for one.

It is fixed for a run and for a conversation: what was asked yesterday is read today as it was read then. The hour is
midnight's, whenever the template is read.
"""

from __future__ import annotations

import datetime
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKS = "strftime_now"  # the function that transformers gives to templates
_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMpPrRsSTuUVwWxXyYzZ"  # a platform may lack some
_FLAGS = ("", "-", "_", "#")  # without zeros, or with blanks for them


def asks_for_day(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template may tell which day it is."""
    return isinstance(tokenizer.chat_template, str) and _ASKS in tokenizer.chat_template


def day_values(tokenizer: PreTrainedTokenizerBase, day: datetime.date | None) -> dict[str, Any]:
    """Return what makes the chat template tell this day, where it asks for one; None is the clock's."""
    return {"chat_template": _macro(day) + tokenizer.chat_template} if day and asks_for_day(tokenizer) else {}


def parse_day(text: object) -> datetime.date | None:
    """Return the day of YYYY-MM-DD, and None for anything else."""
    try:
        return datetime.date.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _macro(day: datetime.date) -> str:
    """Return a template's first line, which is no text, and defines the function in place of transformers' own.

    A template is handed plain data alone: no function can be given to it.
    """
    at = datetime.datetime.combine(day, datetime.time())
    replaced = ""
    for directive in [f"%{flag}{letter}" for letter in _DIRECTIVES for flag in _FLAGS]:
        with suppress(ValueError):  # the platform's own strftime refuses it
            if (text := at.strftime(directive)) != directive:
                replaced += f"|replace({json.dumps(directive)},{json.dumps(text)})"
    return f'{{% macro {_ASKS}(format) %}}{{{{ format{replaced}|replace("%%","%") }}}}{{% endmacro %}}\n'
