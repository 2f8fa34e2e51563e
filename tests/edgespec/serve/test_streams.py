"""A stream of events is read by every client, whatever the text in it."""

import json
from typing import Any

import httpx
import pytest

BREAKS = "a\u2028b\u2029c\u0085d"  # Python's splitlines, and so httpx's and others' readers, break lines at these
SCHEMA = {"type": "string", "const": BREAKS}
ASKED = [{"role": "user", "content": "def main("}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def main(", "grammar": f'start: "{BREAKS}"', "max_tokens": 32}),
        ("/v1/completions", {"prompt": BREAKS, "echo": True, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": ASKED, "grammar": f'start: "{BREAKS}"', "max_tokens": 32}),
        ("/v1/responses", {"input": ASKED, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}),
        (
            "/v1/messages",
            {
                "messages": ASKED,
                "max_tokens": 32,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
        ),
    ],
)
def test_no_character_of_a_text_ends_a_line(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = list(response.iter_lines())
    assert all(line == "" or line.startswith(("data: ", "event: ", ": reading")) for line in lines)
    sent = [line.removeprefix("data: ") for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    events = [json.loads(line) for line in sent]
    assert all(character in "".join(_texts(events)) for character in "\u2028\u2029\u0085")


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for part in (value.values() if isinstance(value, dict) else value) for text in _texts(part)]
    return [value] if isinstance(value, str) else []
