"""The grammar of an answer that has to be a call of a tool.

A mark such as `<tool_call>` is one token of most families, and the text of a grammar never matches such a token: it is
named by its id. Where a tokenizer has no such token, a thought ends where the mark of its end first appears.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.sampling.grammar import Grammar
from edgespec.text.answer import AnswerForm, Tool

SPACE = r"/\s{0,2}/"  # no more: a model that may write spaces for ever does


def forced_calls(form: AnswerForm | None, tools: Sequence[Tool], *, is_thinking: bool) -> Grammar:
    """Return the grammar of an answer that is one call of these tools; raises EdgespecError without such a form."""
    if form is None or not form.call:
        what = "a call of a tool cannot be enforced for this model: calls in its form are not JSON."
        raise EdgespecError("E_GRAMMAR", what, "Leave the choice of tools to the model.")
    rules = [f"start: {'thought_end ' if is_thinking else ''}call", _call(form, tools)]
    return Grammar(form="grammar", text="\n".join([*rules, *(_thought(form) if is_thinking else ())]) + "\n")


def _call(form: AnswerForm, tools: Sequence[Tool]) -> str:
    """Return the rule of a call."""
    found = form.call
    one = {"anyOf": [_schema(found, tool) for tool in tools]}
    schema = {"type": "array", "items": one, "minItems": 1, "maxItems": 1} if found.get("list") else one
    marks = [_symbol(form, found[name]) if found.get(name) else None for name in ("mark", "close")]
    parts = [marks[0], f"%json {json.dumps(schema)}", marks[1]]
    return "call: " + " ".join(f"{SPACE} {part}" for part in parts if part is not None)


def _schema(call: dict[str, Any], tool: Tool) -> dict[str, Any]:
    function = tool["function"]
    return {
        "type": "object",
        "properties": {
            call["name"]: {"const": function["name"]},
            call["arguments"]: function.get("parameters") or {"type": "object"},
        },
        "required": [call["name"], call["arguments"]],
        "additionalProperties": False,
    }


def _thought(form: AnswerForm) -> list[str]:
    """Return the rules of a thought up to its end and with it; tokens that no text matches may stand in it."""
    end = str(form.template["fields"]["reasoning"]["close"])
    others = sorted({*form.plain_tokens} - {form.tokens.get(end, -1)})
    escaped = re.escape(end).replace("/", r"\/")
    before = "before:" + (f" (THOUGHT? <[{','.join(map(str, others))}]>)*" if others else "")
    without = f"THOUGHT: /(?s:.*)/ & ~/(?s:.*)({escaped})(?s:.*)/"
    if end in form.tokens:
        return [f"thought_end: before THOUGHT? {_symbol(form, end)}", before, without]
    return ["thought_end: before last", before, without, "last[lazy]: LAST", f"LAST: /(?s:.*){escaped}/"]


def _symbol(form: AnswerForm, mark: str) -> str:
    return f"<[{form.tokens[mark]}]>" if mark in form.tokens else json.dumps(mark)
