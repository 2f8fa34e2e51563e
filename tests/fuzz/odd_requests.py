"""Requests with odd values, as hypothesis draws them, and what is wrong in an answer to one."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from hypothesis import strategies as st

_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "sun", "arguments": '{"a": 1}'}}
_SAMPLING: dict[str, Any] = {
    "model": "any", "stream": False, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1,
}  # fmt: skip
_OPENAI: dict[str, Any] = {
    **_SAMPLING, "max_tokens": 2, "n": 1, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}, "stop": ["\n\n"], "ignore_eos": False, "user": "someone",
    "stream_options": {"include_usage": True},
}  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "sun", "description": "d", "parameters": _SCHEMA, "strict": False}}
# For each path a body in which all fields are right: one or two of them become odd
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_OPENAI,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "y"},
        ],
        "logprobs": True, "top_logprobs": 1, "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": True,
        "chat_template_kwargs": {"add_day": False}, "reasoning_effort": "low",
    },
    "/v1/completions": {**_OPENAI, "prompt": "def main(", "logprobs": 1, "echo": True},
    "/v1/completions#schema": {
        "prompt": "a", "max_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    },
    "/v1/completions#grammar": {"prompt": [5, 6], "max_tokens": 2, "grammar": 'start: "a" | "b"'},
    "/v1/responses": {
        **_SAMPLING, "max_output_tokens": 2, "instructions": "s",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "sun", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "y"},
        ],
        "tools": [{"type": "function", "name": "sun", "parameters": _SCHEMA}], "tool_choice": "auto",
        "parallel_tool_calls": True, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "truncation": "disabled",
    },
    "/v1/messages": {
        "model": "any", "max_tokens": 2, "stream": False, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
                                              {"type": "tool_use", "id": "c", "name": "sun", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "y", "is_error": True},
                                         {"type": "text", "text": "z"}]},
        ],
        "tools": [{"name": "sun", "description": "d", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "stop_sequences": ["\n\n"],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"model": "any", "messages": [{"role": "user", "content": "x"}], "system": "s"},
    "/tokenize": {"content": "x", "add_special": False},
    "/detokenize": {"tokens": [5, 6]},
}  # fmt: skip
GOOD = BODIES["/v1/completions"]  # which every server answers
_DEEP = "[" * 400 + "]" * 400
_ODD = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 10**400, -(10**400), 2**31, 2**63, 2**64, -(2**63),
    float("nan"), float("inf"), "", " ", "a", "0", "-1", "\ud800", "a\udfff", "\x00", "\u202e\ufeff", "x" * 3000,
    "é" * 80, "{{ 1 / 0 }}", "<|im_start|>", "required", "json_schema", "text", [], {}, [None], [[]], [{}], [""],
    [1, "a"], {"": ""}, {"type": None}, {"type": "text"}, {"type": "text", "text": None}, {"type": "function"},
    {"\ud800": 1}, json.loads(_DEEP),
]  # fmt: skip
_PIECES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=8), part, max_size=3),
    max_leaves=6,
)
_VALUES = st.sampled_from(_ODD) | _PIECES
_RAW = [
    b"", b"{", b"null", b"[]", b"\xff\xfe{}", b'{"a": 1, "a": 2}', b'{"seed": NaN}', b"{" * 5000, b"[" * 100_000,
    b'{"temperature": 1e999}', b'{"seed": ' + b"9" * 5000 + b"}", b'{"a":' * 3000 + b"1" + b"}" * 3000, b"\x00" * 9,
]  # fmt: skip
_HEADERS = [
    "content-type", "accept", "origin", "host", "authorization", "x-api-key", "anthropic-version", "anthropic-beta",
    "accept-encoding", "user-agent", "cookie", "x-forwarded-for", "x-odd",
]  # fmt: skip
_HEADER_VALUES = [
    b"", b"*", b"null", b"[", b"[::1", b"http://[", b"http://[::1]:x", b"127.0.0.1:999999", b"localhost", b"a@b@c",
    b"\xff\xfe", b"Bearer", b"Bearer \xe9", b"application/json; charset=utf-16", b"text/plain", b"x" * 5000, b"//",
    b":",
]  # fmt: skip
# Options have names of their own in the engine, and the messages of a body are counted
_ALSO_CALLED = {
    "max_tokens": ("max_new_tokens",), "max_output_tokens": ("max_new_tokens",),
    "messages": ("message",), "input": ("message",), "prompt": ("prompt", "text", "token"),
    "system": ("message", "system"), "instructions": ("message", "system"), "logprobs": ("logprobs",),
    "stop_sequences": ("stop",), "tools": ("tool",), "tokens": ("token", "prompt"), "content": ("text", "prompt"),
    "response_format": ("schema",),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, and the fields of its body that were made odd."""

    path: str
    content: bytes
    changed: tuple[str, ...] = ()
    headers: Mapping[str, bytes] = field(default_factory=dict)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Draw a request: a body with one odd field or two, one that is no object, or odd headers."""
    name = draw(st.sampled_from(sorted(BODIES)))
    path = name.partition("#")[0]
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return Asked(path=path, content=draw(st.sampled_from(_RAW) | st.binary(max_size=40)))
    body = copy.deepcopy(BODIES[name])
    if kind == 1:
        headers = draw(st.dictionaries(st.sampled_from(_HEADERS), st.sampled_from(_HEADER_VALUES), max_size=3))
        return Asked(path=path, content=json.dumps(body).encode(), headers=headers)
    if "stream" in body:
        body["stream"] = draw(st.booleans())
    changed = []
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(list(_places(body, ()))))
        _put(body, place, draw(_VALUES))
        changed.append(str(place[0]))
    if draw(st.integers(0, 9)) == 0:
        key = draw(st.text(st.characters(codec=None), max_size=6))
        body.setdefault(key, draw(_VALUES))
        changed.append(key)
    return Asked(path=path, content=json.dumps(body).encode(), changed=tuple(changed))


def _places(value: Any, above: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Yield where values stand, which are the fields, and what is in them."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield (*above, name)
        if len(above) < 5:
            yield from _places(part, (*above, name))


def _put(value: Any, place: tuple[str | int, ...], new: Any) -> None:
    for name in place[:-1]:
        value = value[name]
    value[place[-1]] = copy.deepcopy(new)


def problem(asked: Asked, answer: httpx.Response) -> str | None:
    """Return what is wrong in an answer; None where nothing is."""
    if answer.status_code == httpx.codes.OK:
        return _problem_of_stream(answer.text) if "event-stream" in answer.headers["content-type"] else None
    allowed = {400, 403, 429} if asked.headers else {400, 429}
    if answer.status_code not in allowed:
        return f"status {answer.status_code}"
    try:
        body = answer.json()
        error = body["error"]
        if asked.path.startswith("/v1/messages"):
            said, has_form = error["message"], body["type"] == "error" and {*error} == {"type", "message"}
        else:
            said, has_form = f"{error['message']} {error['param']}", {*error} == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError) as problem_of_form:
        return f"an error in no form: {problem_of_form!r}"
    if not has_form or not isinstance(error["type"], str) or not error["message"]:
        return "an error in another form"
    if asked.changed and answer.status_code == httpx.codes.BAD_REQUEST:
        names = [word for name in asked.changed for word in (name, *_ALSO_CALLED.get(name, ()))]
        is_of_several = said.startswith(
            ("the body", "the prompt", "'the body'")
        )  # fields, none of which is wrong alone
        if not is_of_several and not any(word in said or repr(word)[1:-1] in said for word in names):
            return f"an error that names none of {names}"
    return None


def _problem_of_stream(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    last = lines[-1][6:] if lines else ""
    if last != "[DONE]" and json.loads(last or "{}").get("type") not in {
        "message_stop", "response.completed", "response.incomplete",
    }:  # fmt: skip
        return f"a stream that ends with {last[:200]}"
    failed = next((line for line in lines if '"error": {' in line), None)
    return None if failed is None else f"a stream with an error: {failed[:300]}"
