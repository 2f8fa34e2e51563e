"""Texts are those that the engine makes with the same seed, through the clients that people use."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from edgespec import Engine
from edgespec.chat.chat_template import Message, plain_ids
from tests.edgespec.serve.conftest import Started

ASKED: list[Any] = [{"role": "user", "content": "def main("}]
DRAWN: dict[str, Any] = {"max_tokens": 24, "seed": 7, "temperature": 0.8}


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
    assert len(plain.choices[0].logprobs.tokens or []) == 4 + 24  # the prompt's, too


def test_a_prompt_of_token_ids_and_strings_that_stop(openai: OpenAI, engine: Engine) -> None:
    ids = engine.encode("def main(")
    found = openai.completions.create(model="any", prompt=ids, stop=["\n"], **DRAWN)
    assert found.choices[0].text == text_of(engine, ids, stop="\n")
    assert found.choices[0].finish_reason == "stop"


def test_the_string_that_stops_is_named_where_the_protocol_does(anthropic: Anthropic, engine: Engine) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": ASKED, "max_tokens": 24, "extra_body": {"temperature": 0}}
    text = text_of(engine, chat_ids(engine), temperature=0.0)
    string = text[6:9]
    for stops in ([string], ["no such string", string]):
        found = anthropic.messages.create(**asked, stop_sequences=stops)
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", string)
        assert [block.text for block in found.content if block.type == "text"] == [text[: text.find(string)]]
        with anthropic.messages.stream(**asked, stop_sequences=stops) as stream:
            streamed = stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", string)
    cut = anthropic.messages.create(**asked, stop_sequences=["no such string"])
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


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
    assert anthropic.messages.count_tokens(model="any", messages=ASKED).input_tokens == len(chat_ids(engine))


def test_what_a_turn_has_in_common_with_the_last_is_not_read_again(client: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "x = 1\n" * 20}], "max_tokens": 4, "temperature": 0}
    first = client.post("/v1/chat/completions", json=asked).json()
    said = [*asked["messages"], first["choices"][0]["message"], {"role": "user", "content": "y = 2\n"}]
    second = client.post("/v1/chat/completions", json={**asked, "messages": said}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert second["timings"]["prompt_n"] < first["usage"]["prompt_tokens"] / 2


@pytest.mark.usefixtures("start")  # counts are of one server
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

    timings = client.post("/v1/chat/completions", json={"messages": ASKED, **DRAWN}).json()["timings"]
    assert client.post("/v1/chat/completions", json={"prompt": ""}).status_code == 400
    found = numbers()
    assert found["edgespec_requests_total /v1/chat/completions 200"] == 1
    assert found["edgespec_requests_total /v1/chat/completions 400"] == 1
    names = {"read": "prompt_n", "cached": "cache_n", "written": "predicted_n", "drafted": "draft_n"}
    assert {kind: found[f"edgespec_tokens_total {kind}"] for kind in (*names, "accepted")} == {
        **{kind: timings[name] for kind, name in names.items()}, "accepted": timings["draft_n_accepted"],
    }  # fmt: skip
    assert found["edgespec_first_token_seconds_count"] == found["edgespec_request_first_token_seconds_count"] == 1
    assert found["edgespec_request_first_token_seconds_sum"] >= found["edgespec_first_token_seconds_sum"] > 0
    assert found["edgespec_pass_seconds_sum"] >= found["edgespec_longest_pass_seconds"] > 0
    assert found["edgespec_open_texts"] == 0
    assert found["edgespec_texts_at_once"] == 2


def test_two_clients_at_once_with_samplings_of_their_own_get_their_own_texts(openai: OpenAI, engine: Engine) -> None:
    samplings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.9}]
    with ThreadPoolExecutor(2) as clients:
        found = list(
            clients.map(
                lambda sampling: openai.completions.create(
                    model="any", prompt="def main(", max_tokens=24, seed=7, **sampling
                ),
                samplings,
            )
        )
    texts = [answer.choices[0].text for answer in found]
    assert texts == [text_of(engine, "def main(", **sampling) for sampling in samplings]
    assert texts[0] != texts[1]


def test_samples_and_logprobs_stream_as_they_come_whole(openai: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": ASKED, "n": 2, "logprobs": True, "top_logprobs": 2, **DRAWN}
    whole = openai.chat.completions.create(**asked)
    texts, entries = ["", ""], [[], []]  # type: tuple[list[str], list[list[Any]]]
    for chunk in openai.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    assert texts == [choice.message.content for choice in whole.choices]
    for choice, streamed in zip(whole.choices, entries, strict=True):
        assert choice.logprobs is not None
        assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content or []]
        assert all(len(entry.top_logprobs) == 2 for entry in streamed)


@pytest.mark.parametrize(
    "harmless",
    [
        {"stop": None, "tools": None, "logit_bias": None, "functions": None, "n": None},
        {"stream_options": {"include_usage": None}, "stop": [], "logit_bias": {}, "tools": []},
        {"top_logprobs": 0, "logprobs": False, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0},
        {"parallel_tool_calls": True, "tool_choice": "auto", "reasoning_effort": "medium", "verbosity": "medium"},
        {"modalities": ["text"], "response_format": {"type": "text"}, "service_tier": "auto", "store": False},
        {"prompt_cache_key": "a", "user": "b", "metadata": {}, "prediction": {"type": "content", "content": "c"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "def main(", "cache_control": {}}]}]},
    ],
)
def test_what_editors_send_beside_the_question_changes_nothing(
    client: httpx.Client, engine: Engine, harmless: dict[str, Any]
) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": ASKED, **DRAWN, **harmless})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == text_of(engine, chat_ids(engine))


def test_what_would_change_the_text_is_refused_by_name(client: httpx.Client) -> None:
    for field, value in {"suffix": "x", "best_of": 3, "mirostat": 2, "typical_p": 0.5}.items():
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_no_bound_is_written_as_minus_one(client: httpx.Client, engine: Engine) -> None:
    stops: dict[str, Any] = {"stop": ["\n"], "seed": 7, "temperature": 0.8}
    for path, body in {
        "/v1/completions": {"prompt": "def main(", "max_tokens": -1},
        "/v1/chat/completions": {"messages": ASKED, "max_tokens": -1},
        "/v1/chat/completions?": {"messages": ASKED, "max_completion_tokens": -1},
    }.items():
        answer = client.post(path, json={**body, **stops})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        prompt = body.get("prompt") or chat_ids(engine)
        text = text_of(engine, prompt, num_tokens=-1, stop="\n")
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text
    for wrong in (0, -2):
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_without_a_temperature_texts_are_drawn_as_the_server_says(
    start: Started, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampling_and_texts(**options: Any) -> tuple[dict[str, float], set[str]]:
        _, address = start(**options)
        body = {"prompt": "def main(", "max_tokens": 12, "n": 3, "seed": 7}
        texts = [choice["text"] for choice in httpx.post(f"{address}/v1/completions", json=body).json()["choices"]]
        return httpx.get(f"{address}/props").json()["sampling"], set(texts)

    stated = engine.pair.target.generation_config
    for name in ("do_sample", "temperature", "top_p"):
        monkeypatch.setitem(stated, name, None)
    drawn, texts = sampling_and_texts()
    assert (drawn["temperature"], len(texts)) == (1, 3)
    assert text_of(engine, "def main(", num_tokens=12, temperature=1) in texts
    assert len(sampling_and_texts(temperature=0)[1]) == 1  # as its user has started it
    monkeypatch.setitem(stated, "temperature", 0.3)
    assert sampling_and_texts()[0]["temperature"] == 0.3
    assert sampling_and_texts(temperature=0.6)[0]["temperature"] == 0.6
    monkeypatch.setitem(stated, "do_sample", False)
    assert sampling_and_texts()[0]["temperature"] == 0
