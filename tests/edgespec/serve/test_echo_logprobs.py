"""A completion with `echo` and `logprobs` says how likely its prompt is, as a plain forward of transformers has it."""

import json
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine
from edgespec.decode import reading

TEXT = "def area(w, h):\n    return w"
NEAR = 1e-4


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[float]:
    """The log-probabilities of TEXT's tokens from the second on."""
    ids = engine.pair.tokenizer.encode(TEXT)
    model = AutoModelForCausalLM.from_pretrained(engine.pair.target.folder, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [rows[place, token].item() for place, token in enumerate(ids[1:])]


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    found = client.post("/v1/completions", json={"temperature": 0, "echo": True, "logprobs": 2, **body}).json()
    assert "choices" in found, found
    return found


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("is_text", [True, False])
def test_each_token_of_the_prompt_has_its_own(
    client: httpx.Client, engine: Engine, expected: list[float], max_tokens: int, is_text: bool
) -> None:
    ids = engine.pair.tokenizer.encode(TEXT)
    for _ in range(2):  # the second time rows of the prompt are kept
        found = ask(client, prompt=TEXT if is_text else ids, max_tokens=max_tokens)
        (choice,) = found["choices"]
        entries = choice["logprobs"]
        assert choice["text"].startswith(TEXT)
        assert (entries["token_logprobs"][0], entries["top_logprobs"][0]) == (None, None)
        assert entries["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=NEAR)
        assert all(len(top) == 2 for top in entries["top_logprobs"][1:])
        assert {len(part) for part in entries.values()} == {len(ids) + max_tokens}
        assert found["usage"]["completion_tokens"] == max_tokens
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for token, start in zip(entries["tokens"], entries["text_offset"], strict=True):
            assert choice["text"].startswith(token, start)


def test_several_prompts_and_a_stream_say_the_same(client: httpx.Client, expected: list[float]) -> None:
    texts = [TEXT, "import os", TEXT, "s = 'h\u00e9\u00e9\u20ac\U0001f600"]
    body: dict[str, Any] = {"prompt": texts, "max_tokens": 2}
    choices = ask(client, **body)["choices"]
    assert choices[0]["logprobs"]["token_logprobs"][1 : 1 + len(expected)] == pytest.approx(expected, abs=NEAR)
    assert choices[0] == {**choices[2], "index": 0}
    body |= {"stream": True, "echo": True, "logprobs": 2, "temperature": 0}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [choice for line in lines for choice in json.loads(line)["choices"]]
    for index, whole in enumerate(choices):
        own = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["text"] for piece in own) == whole["text"]
        for name in ("tokens", "text_offset"):
            joined = [value for piece in own if piece["logprobs"] for value in piece["logprobs"][name]]
            assert joined == whole["logprobs"][name]


def test_offsets_of_a_stream_go_on_behind_its_prompt(client: httpx.Client) -> None:
    body = {"prompt": "def", "max_tokens": 1, "stream": True, "echo": True, "logprobs": 0, "temperature": 0}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    entries = [choice["logprobs"] for line in lines for choice in json.loads(line)["choices"] if choice["logprobs"]]
    assert [place for entry in entries for place in entry["text_offset"]] == [0, 3]  # "def" is one token


def test_no_tokens_need_an_echo(client: httpx.Client) -> None:
    refused = client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    found = client.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 0, "echo": True}).json()
    assert (found["choices"][0]["text"], found["choices"][0]["logprobs"]) == (TEXT, None)


def test_rows_in_small_chunks_say_the_same(
    engine: Engine, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(reading, "row_chunks", lambda count, _: [slice(0, 3), slice(3, count)])
    found = engine.generate(TEXT, max_new_tokens=0, prompt_logprobs=1)
    assert [entry.logprob for entry in found.prompt_logprobs] == pytest.approx(expected, abs=NEAR)
    assert (found.text, found.token_ids, found.finish_reason) == ("", (), "length")
