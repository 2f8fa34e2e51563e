"""The ids of a prompt as transformers makes them, from a row's JSON or a folder's files: for check.mutations."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

TEXT = "def main(arguments):\n    return 1"
MESSAGES = [{"role": "user", "content": "Hello there"}]


class DiffersError(Exception):
    """A prompt has other tokens than transformers gives it, and nothing says so."""


def rows_of_file(path: Path) -> list[Any] | None:
    """Return the values of a prompt file's rows; None of one that is not plain UTF-8 JSON."""
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        if path.suffix == ".json":
            return list(json.loads(text))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError, TypeError):
        return None


def row_ids(tokenizer: PreTrainedTokenizerBase, row: Any) -> list[int] | None:
    """Return the ids up to a row's first answer; None where transformers has no way of its own.

    That is a conversation without a template. Documented changes are made here, too: parts of a content are joined,
    arguments of calls that are JSON are read, and a developer is the system.
    """
    messages, fields = _messages(row)
    body = row.get("body") if isinstance(row, dict) else None
    if isinstance(body, dict) and body.get("prompt") is not None and fields.get("messages") is None:
        prompt = body["prompt"]  # as it stands, without a template
        return list(tokenizer(prompt).input_ids) if isinstance(prompt, str) else list(prompt)
    if not tokenizer.chat_template:
        only = messages[0]["content"] if len(messages) == 1 else None
        return list(tokenizer(only).input_ids) if only is not None else None
    values = {**(fields.get("chat_template_kwargs") or {}), "tools": fields.get("tools") or None}
    if fields.get("reasoning_effort") is not None:
        values["reasoning_effort"] = fields["reasoning_effort"]
    return _template_ids(tokenizer, [_as_documented(message) for message in messages], values)


def check_folder(folder: Path, ids: list[int], template_ids: list[int] | None) -> None:
    """Raise DiffersError where TEXT, or MESSAGES through the template, have other ids in transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    expected = list(tokenizer(TEXT).input_ids)
    if ids != expected:
        raise DiffersError(f"text: {ids} and {expected}")
    if template_ids is not None and template_ids != (expected := _template_ids(tokenizer, MESSAGES, {})):
        raise DiffersError(f"template: {template_ids} and {expected}")


def _template_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], values: dict[str, Any]
) -> list[int]:
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **values)
    return list(found)


def _messages(row: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if isinstance(row, str):
        return [{"role": "user", "content": row}], {}
    if isinstance(row, list):
        return [{"role": "user", "content": row[1]}], {}
    body = row.get("body") if isinstance(row.get("body"), dict) else {}
    fields = {**row, **{name: value for name, value in body.items() if value is not None}}
    if fields.get("messages") is not None:
        messages = list(fields["messages"])
    else:
        text = fields["prompt"] if fields.get("prompt") is not None else fields["turns"][0]
        messages = [{"role": "user", "content": text}]
    system = fields.get("system")
    return ([{"role": "system", "content": system}] if system else []) + messages, fields


def _as_documented(message: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if not (name == "tool_calls" and value is None)}
    content = found.get("content")
    found["content"] = "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    if found["role"] == "developer":
        found["role"] = "system"
    return found
