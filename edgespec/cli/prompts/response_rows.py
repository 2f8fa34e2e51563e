"""A batch row of OpenAI's responses, as chat completions say the same."""

from collections.abc import Mapping
from typing import Any

from edgespec.cli.prompts.row_keys import NULL_SAYS_SOMETHING
from edgespec.errors import EdgespecError
from edgespec.serve.refusal import RefusalError
from edgespec.serve.request_fields import UnusedFields, only_functions
from edgespec.serve.responses_prompt import LOGPROBS, added_tools, functions, messages_of
from edgespec.validation import shown

# What a response may ask for without another text, and what another key says below
SAID_ELSEWHERE = frozenset(
    {"background", "include", "input", "instructions", "reasoning", "text", "tool_choice", "tools"}
)
STORED = ("conversation", "previous_response_id", "prompt")  # that a server would have to remember


def chat_body(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the body of a response as one of chat completions; raises EdgespecError for what is not done here."""
    stored = next((name for name in STORED if body.get(name) is not None), None)
    if stored is not None:
        raise _invalid(f'{where} has "{stored}", and nothing is stored here.', "Write the whole conversation as input.")
    if LOGPROBS in (body.get("include") or []):
        raise _invalid(
            f"{where} asks for {LOGPROBS}, which responses do not have here.", "Ask chat completions for it."
        )
    text, reasoning = _object(body, "text", where), _object(body, "reasoning", where)
    sent = body.get("input")
    if not isinstance(sent, str) and (not sent or not _are_objects(sent)):
        raise _invalid(f'the "input" of {where} is {shown(sent)}.', "Write a text or a list of items.")
    if not _are_objects(body.get("tools") or []):
        raise _invalid(f'the "tools" of {where} are no list of objects.', "Write a list of functions.")
    unused = UnusedFields(lambda _: None)
    try:
        messages = messages_of(body.get("instructions"), sent)
        tools = functions(only_functions([*(body.get("tools") or []), *added_tools(sent)], ("function",), unused))
    except RefusalError as refusal:
        raise _invalid(f"the body of {where} cannot be read: {refusal.message}", "Change it.") from refusal
    last = {} if isinstance(sent, str) else sent[-1]
    found = {
        **{name: value for name, value in body.items() if name not in SAID_ELSEWHERE},
        **dict.fromkeys(unused.names, True),  # which are named as not known
        "messages": messages,
        "continue_final_message": last.get("status") in ("in_progress", "incomplete"),
        "response_format": _response_format(text.get("format"), where),
        "reasoning_effort": reasoning.get("effort"),
        "verbosity": text.get("verbosity"),
        "tools": tools or None,
        "tool_choice": _tool_choice(body.get("tool_choice")),
    }
    if found.get("truncation") == "disabled":
        del found["truncation"]
    return {name: value for name, value in found.items() if value is not None or name in NULL_SAYS_SOMETHING}


def _response_format(text_format: Any, where: str) -> dict[str, Any] | None:
    if text_format is None or (isinstance(text_format, Mapping) and text_format.get("type") == "text"):
        return None
    if not isinstance(text_format, Mapping) or text_format.get("type") not in ("json_object", "json_schema"):
        what = f'the "text.format" of {where} is {shown(text_format)}.'
        raise _invalid(what, "Write one of the types text, json_object and json_schema.")
    if text_format["type"] == "json_object":
        return {"type": "json_object"}
    rest = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": rest}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _object(body: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    found = body.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise _invalid(
            f'the "{name}" of {where} is {shown(found)}, and no object.', "Write an object, or leave it out."
        )
    return found or {}


def _are_objects(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(item, Mapping) for item in found)


def _invalid(what: str, fix: str) -> EdgespecError:
    return EdgespecError("E_PROMPT_INVALID", what, fix)
