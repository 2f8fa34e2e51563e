"""The last message is the assistant's: each protocol goes on with it as its clients expect."""

from typing import Any

import httpx
import pytest

from edgespec import Engine

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BEGUN: list[dict[str, Any]] = [{"role": "user", "content": "Write."}, {"role": "assistant", "content": "def main("}]
GOES_ON = "<user>Write.</user><assistant>def main("
ANEW = f"{GOES_ON}</assistant><assistant>"
CHAT = "/v1/chat/completions"
PREFIX = [BEGUN[0], {**BEGUN[1], "prefix": True}]


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (CHAT, {"messages": BEGUN}, GOES_ON),
        (CHAT, {"messages": PREFIX}, GOES_ON),
        (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}, GOES_ON),
        (CHAT, {"messages": BEGUN, "continue_final_message": False}, ANEW),
        (CHAT, {"messages": BEGUN, "add_generation_prompt": True}, ANEW),
        ("/v1/messages", {"messages": BEGUN}, GOES_ON),
        ("/v1/responses", {"input": [BEGUN[0], {**BEGUN[1], "status": "incomplete"}]}, GOES_ON),
        ("/v1/responses", {"input": [BEGUN[0], {**BEGUN[1], "status": "completed"}]}, ANEW),
        ("/v1/responses", {"input": BEGUN}, ANEW),
    ],
)
def test_the_text_goes_on_or_begins_anew(
    client: httpx.Client, engine: Engine, path: str, body: dict[str, Any], prompt: str
) -> None:
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = client.post(path, json={**body, length: 8, "temperature": 0}).json()
    if path == CHAT:
        found = answer["choices"][0]["message"]["content"]
    else:
        found = (answer["content"] if path == "/v1/messages" else answer["output"][0]["content"])[0]["text"]
    assert found == engine.generate(prompt, max_new_tokens=8, temperature=0).text


def test_two_wishes_that_contradict_each_other_are_refused(client: httpx.Client) -> None:
    body = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True, "max_tokens": 4}
    found = client.post(CHAT, json=body)
    assert (found.status_code, "both true" in found.json()["error"]["message"]) == (400, True), found.json()
