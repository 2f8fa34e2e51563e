"""Texts are those that the engine makes with the same seed, through the clients that people use."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from edgespec import Engine
from edgespec.text.chat_template import Message, plain_ids

ASKED: list[Any] = [{"role": "user", "content": "def main("}]
DRAWN: dict[str, Any] = {"max_tokens": 24, "seed": 7, "temperature": 0.8}


@pytest.fixture
def openai(client: httpx.Client) -> OpenAI:
    return OpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def anthropic(client: httpx.Client) -> Anthropic:
    return Anthropic(base_url=str(client.base_url), api_key="any", max_retries=0)


def text_of(engine: Engine, prompt: Any, *, num_tokens: int = 24, temperature: float = 0.8, **options: Any) -> str:
    found = engine.generate(prompt, max_new_tokens=num_tokens, seed=7, temperature=temperature, **options)
    return found.text


def chat_ids(engine: Engine) -> list[int]:
    return plain_ids(engine.pair.tokenizer, [Message(role="user", content="def main(")])


def test_chat_whole_and_streamed_is_the_engines_own_text(openai: OpenAI, engine: Engine) -> None:
    expected = text_of(engine, chat_ids(engine))
    whole = openai.chat.completions.create(model="any", messages=ASKED, **DRAWN)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    parts, usage = [], None
    stream = openai.chat.completions.create(
        model="any", messages=ASKED, stream=True, stream_options={"include_usage": True}, **DRAWN
    )
    for chunk in stream:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == expected
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(chat_ids(engine)), 24)


def test_samples_of_several_prompts_draw_apart_and_the_first_as_alone(openai: OpenAI, engine: Engine) -> None:
    prompts = ["def main(", "import os\n"]
    found = openai.completions.create(model="any", prompt=prompts, n=2, **DRAWN)
    texts = [choice.text for choice in found.choices]
    assert [texts[0], texts[2]] == [text_of(engine, prompt) for prompt in prompts]
    assert [texts[1], texts[3]] == [text_of(engine, prompt, name="1") for prompt in prompts]
    assert texts[0] != texts[1]


def test_logprobs_have_an_entry_a_token(openai: OpenAI) -> None:
    chat = openai.chat.completions.create(model="any", messages=ASKED, logprobs=True, top_logprobs=3, **DRAWN)
    entries = chat.choices[0].logprobs
    assert entries is not None
    assert [len(entry.top_logprobs) for entry in entries.content or []] == [3] * 24
    plain = openai.completions.create(model="any", prompt="def main(", logprobs=2, echo=True, **DRAWN)
    assert plain.choices[0].text.startswith("def main(")
    assert plain.choices[0].logprobs is not None
    assert len(plain.choices[0].logprobs.tokens or []) == 24


def test_a_prompt_of_token_ids_and_strings_that_stop(openai: OpenAI, engine: Engine) -> None:
    ids = engine.encode("def main(")
    found = openai.completions.create(model="any", prompt=ids, stop=["\n"], **DRAWN)
    assert found.choices[0].text == text_of(engine, ids, stop="\n")
    assert found.choices[0].finish_reason == "stop"


def test_a_schema_is_followed(openai: OpenAI, engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = openai.chat.completions.create(model="any", messages=ASKED, response_format=form, **DRAWN)
    assert found.choices[0].message.content == text_of(engine, chat_ids(engine), json_schema=schema)
    assert (found.choices[0].message.content or "").startswith("{")


def test_anthropics_messages_whole_and_streamed(anthropic: Anthropic, engine: Engine) -> None:
    expected = text_of(engine, chat_ids(engine), temperature=0.0)
    asked: dict[str, Any] = {"model": "any", "messages": ASKED, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = anthropic.messages.create(**asked)
    assert [block.text for block in whole.content if block.type == "text"] == [expected]
    assert whole.stop_reason == "max_tokens"
    with anthropic.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().usage.output_tokens == 24
    counted = anthropic.messages.count_tokens(model="any", messages=ASKED)
    assert counted.input_tokens == len(chat_ids(engine))


def test_what_a_turn_has_in_common_with_the_last_is_not_read_again(client: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "x = 1\n" * 20}], "max_tokens": 4, "temperature": 0}
    first = client.post("/v1/chat/completions", json=asked).json()
    said = [*asked["messages"], first["choices"][0]["message"], {"role": "user", "content": "y = 2\n"}]
    second = client.post("/v1/chat/completions", json={**asked, "messages": said}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert second["timings"]["prompt_n"] < first["usage"]["prompt_tokens"] / 2


def test_numbers_for_prometheus_count_what_was_done(client: httpx.Client) -> None:
    def numbers() -> dict[str, float]:
        found = client.get("/metrics")
        assert found.headers["content-type"].startswith("text/plain")
        families = text_string_to_metric_families(found.text)
        return {
            " ".join([sample.name, *sample.labels.values()]): sample.value
            for family in families
            for sample in family.samples
        }

    body = {"messages": ASKED, **DRAWN}
    timings = client.post("/v1/chat/completions", json=body).json()["timings"]
    assert client.post("/v1/chat/completions", json={"prompt": ""}).status_code == 400
    found = numbers()
    assert found["edgespec_requests_total /v1/chat/completions 200"] == 1
    assert found["edgespec_requests_total /v1/chat/completions 400"] == 1
    names = {"read": "prompt_n", "cached": "cache_n", "written": "predicted_n", "drafted": "draft_n"}
    assert {kind: found[f"edgespec_tokens_total {kind}"] for kind in (*names, "accepted")} == {
        **{kind: timings[name] for kind, name in names.items()}, "accepted": timings["draft_n_accepted"],
    }  # fmt: skip
    assert found["edgespec_first_token_seconds_count"] == 1
    assert found["edgespec_open_texts"] == 0
    assert found["edgespec_texts_at_once"] == 2
