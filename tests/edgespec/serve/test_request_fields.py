"""One rule for every field in every protocol: it is done, or taken and named where it changes nothing, or refused."""

import gzip
import json
import zlib
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from anthropic.types import message_create_params as anthropics
from anthropic.types.beta import message_create_params as anthropics_beta
from openai.types import completion_create_params as openais_completions
from openai.types.chat import completion_create_params as openais_chat
from openai.types.responses import response_create_params as openais_responses

from edgespec import Engine
from edgespec.serve.anthropic_body import MessagesBody
from edgespec.serve.body import Fields
from edgespec.serve.field_table import CHAT, COMPLETIONS, FIELDS, MESSAGES, PROTOCOLS, RESPONSES
from edgespec.serve.openai_chat import ChatBody
from edgespec.serve.openai_completions import CompletionBody
from edgespec.serve.openai_responses import ResponsesBody
from edgespec.serve.openai_schema import SamplingFields, usage
from edgespec.serve.request_fields import HEADER, UnusedFields, read_fields
from scripts.make import request_fields
from tests.edgespec.serve.conftest import Started

PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions", RESPONSES: "/v1/responses",
         MESSAGES: "/v1/messages"}  # fmt: skip
BODIES: dict[str, type[Fields]] = {
    CHAT: ChatBody, COMPLETIONS: CompletionBody, RESPONSES: ResponsesBody, MESSAGES: MessagesBody,
}  # fmt: skip
SAID = [{"role": "user", "content": "a"}]
SMALL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID, "max_tokens": 2}, COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 2}, MESSAGES: {"messages": SAID, "max_tokens": 2},
}  # fmt: skip
SUN = {"name": "sun", "parameters": {"type": "object", "properties": {}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "function", "function": SUN}],
    RESPONSES: [{"type": "function", **SUN}],
    MESSAGES: [{"name": "sun", "input_schema": SUN["parameters"]}],
}
FORCED: dict[str, Any] = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}


def ask(client: httpx.Client, protocol: str, change: dict[str, Any]) -> httpx.Response:
    return client.post(PATHS[protocol], json={**SMALL[protocol], **change})


def test_the_page_has_the_table_that_requests_are_read_by() -> None:
    page = request_fields.PATH.read_text(encoding="utf-8")
    assert page == request_fields.page_with_table(page), "run: python -m scripts.make.request_fields"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_each_field_has_one_record_and_what_is_done_is_read(protocol: str) -> None:
    fields = [field for field in FIELDS if protocol in field.protocols]
    names = [field.name for field in fields]
    assert len(names) == len(set(names))
    done = {field.name for field in fields if field.use == "done" and field.other_name_of is None}
    assert done == set(BODIES[protocol].model_fields)
    assert {field.other_name_of for field in fields} - {None} <= done


def test_every_field_of_how_texts_are_drawn_sets_the_option_of_its_name() -> None:
    alike = {
        "temperature": 0.1, "top_p": 0.2, "top_k": 3, "min_p": 0.4, "presence_penalty": 0.5, "frequency_penalty": 0.6,
        "repetition_penalty": 1.7, "seed": 8, "ignore_eos": True, "cache_prompt": False, "grammar": "start: /a/",
    }  # fmt: skip
    fields = {**alike, "max_tokens": 9, "min_tokens": 2, "stop": "x", "logit_bias": {"5": 1.5}}
    options = {**alike, "max_new_tokens": 9, "min_new_tokens": 2, "stop": ["x"], "logit_bias": {5: 1.5}}
    assert SamplingFields.model_validate(fields).text_options() == options
    few = {name: alike[name] for name in ("temperature", "top_p", "top_k")}
    message = MessagesBody.model_validate({**SMALL[MESSAGES], **few, "seed": 8, "stop_sequences": ["x"]})
    assert message.text_options() == {**few, "seed": 8, "max_new_tokens": 2, "stop": ["x"]}
    response = ResponsesBody.model_validate({**SMALL[RESPONSES], **few, "min_p": 0.4, "seed": 8})
    assert response.job(UnusedFields(print)).options == {**few, "min_p": 0.4, "seed": 8, "max_new_tokens": 2}


def test_usage_counts_a_prompt_once_however_many_answers_it_has() -> None:
    results: list[Any] = [
        SimpleNamespace(prompt_tokens=read, cached_tokens=cached, image_tokens=0, token_ids=(1,) * made)
        for read, cached, made in ((10, 4, 1), (10, 10, 2), (100, 0, 3), (100, 100, 4))
    ]
    found = usage(results, 2, num_thought=5)
    assert (found["prompt_tokens"], found["completion_tokens"], found["total_tokens"]) == (110, 10, 120)
    assert found["prompt_tokens_details"] == {"cached_tokens": 4}
    assert found["completion_tokens_details"] == {"reasoning_tokens": 5}


@pytest.mark.parametrize(
    ("protocol", "parameters"),
    [
        (CHAT, openais_chat.CompletionCreateParamsBase),
        (COMPLETIONS, openais_completions.CompletionCreateParamsBase),
        (RESPONSES, openais_responses.ResponseCreateParamsBase),
        (MESSAGES, anthropics.MessageCreateParamsBase),
        (MESSAGES, anthropics_beta.MessageCreateParamsBase),
    ],
)
def test_whatever_the_makers_own_clients_can_send_is_in_the_table(protocol: str, parameters: Any) -> None:
    known = {field.name for field in FIELDS if protocol in field.protocols}
    assert set(parameters.__annotations__) <= known


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_asks_for_nothing_is_taken_in_every_field(protocol: str) -> None:
    needed = SMALL[protocol].keys() | {"echo"}
    for field in FIELDS:
        if protocol in field.protocols and field.name not in needed:
            for value in (None, *(() if field.is_empty_value_read else ("", [], {})), *field.nothing):
                unused = UnusedFields(lambda _line: None)
                read_fields(BODIES[protocol], protocol, {**SMALL[protocol], field.name: value}, unused)
                assert not unused.names, (field.name, value)
    for value in (None, "", [], {}, False):
        body = {**SMALL[protocol], "a_field_of_tomorrow": value}
        read_fields(BODIES[protocol], protocol, body, UnusedFields(lambda _line: None))


@pytest.mark.parametrize("protocol", TOOLS)
def test_tools_that_may_be_called_are_named_where_no_template_reads_them(
    client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    tools = [{"type": "web_search_20250305", "name": "web"}, *TOOLS[protocol]]
    for template in (None, "{{ messages[0].content }}"):
        monkeypatch.setattr(engine.pair.tokenizer, "chat_template", template)
        offered = ask(client, protocol, {"tools": tools})
        assert (offered.status_code, offered.headers[HEADER]) == (200, "tools[web_search_20250305], tools")
        forced = ask(client, protocol, {"tools": tools, "tool_choice": FORCED[protocol]})
        assert (forced.status_code, "tool_choice" in forced.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("protocol", "change", "names"),
    [
        (CHAT, {"reasoning_effort": "high", "thinking": {"type": "enabled"}}, "thinking, reasoning_effort"),
        (CHAT, {"reasoning": {"effort": "low", "enabled": False, "exclude": True}}, "reasoning, reasoning.effort"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        (CHAT, {"store": True, "user": "a", "metadata": {"a": "b"}}, "store, user, metadata"),
        (COMPLETIONS, {"num_ctx": 4096, "samplers": ["top_k"], "cache_prompt": True}, "num_ctx, samplers"),
        (RESPONSES, {"truncation": "auto", "reasoning": {"effort": "low"}}, "truncation, reasoning.effort"),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "a"}}, "metadata, thinking"),
        (MESSAGES, {"mcp_servers": [], "container": None, "output_config": {"effort": "low"}}, "output_config.effort"),
    ],
)
@pytest.mark.usefixtures("start")  # a server says it once
def test_what_changes_nothing_is_named_in_a_header_and_once_in_the_log(
    client: httpx.Client, caplog: pytest.LogCaptureFixture, protocol: str, change: dict[str, Any], names: str
) -> None:
    for _ in range(2):
        answer = ask(client, protocol, change)
        assert (answer.status_code, answer.headers[HEADER]) == (200, names)
    assert [record.message.split("'")[2] for record in caplog.records] == names.split(", ")
    assert HEADER not in ask(client, protocol, {}).headers


def test_a_name_of_the_clients_own_stays_in_its_header(client: httpx.Client) -> None:
    answer = ask(client, CHAT, {"chat_template_kwargs": {"a\r\nX-Evil: 1\u20ac" + "b" * 200: 1}})
    assert "x-evil" not in answer.headers
    assert len(answer.headers[HEADER]) <= 60


@pytest.mark.parametrize(
    ("protocol", "change", "field"),
    [
        (CHAT, {"documents": [{"text": "a"}]}, "documents"),
        (CHAT, {"chat_template_kwargs": {"documents": [{"text": "a"}]}}, "chat_template_kwargs.documents"),
        (CHAT, {"lora": [{"id": 0, "scale": 1}]}, "lora"),
        (CHAT, {"function_call": {"name": "sun"}}, "function_call"),
        (CHAT, {"audio": {"voice": "a"}}, "audio"),
        (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
        (COMPLETIONS, {"mirostat": 1}, "mirostat"),
        (COMPLETIONS, {"dynamic_temperature": True}, "dynamic_temperature"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        (COMPLETIONS, {"guided_regex": "a", "structured_outputs": {"json": {}}}, "structured_outputs.json"),
        (COMPLETIONS, {"n_predict": 3}, "n_predict"),
        (RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
        (MESSAGES, {"mcp_servers": [{"url": "http://a"}]}, None),
        (MESSAGES, {"container": "a"}, None),
    ],
)
def test_what_a_client_relies_on_is_refused_by_name(
    client: httpx.Client, protocol: str, change: dict[str, Any], field: str | None
) -> None:
    answer = ask(client, protocol, change)
    assert answer.status_code == 400
    assert next(iter(change)) in answer.json()["error"]["message"]
    assert answer.json()["error"].get("param") == field


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"structured_outputs": {"regex": "(ab|cd)/e"}}, {"ab/e", "cd/e"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"', "json": None, "backend": "auto"}}, {"x", "y"}),
        ({"structured_outputs": {"json": '{"enum": [1, 2]}'}}, {"1", "2"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
        ({"guided_regex": "[ab]"}, {"a", "b"}),
        ({"guided_choice": ["yes", "no"], "guided_decoding_backend": "xgrammar"}, {"yes", "no"}),
        ({"guided_grammar": 'start: "x"', "structured_outputs": {}}, {"x"}),
        ({"ebnf": 'root ::= "x"', "response_format": {"type": "text"}}, {"x"}),
        ({"response_format": {"type": "json_object", "schema": {"enum": [1, 2]}}}, {"1", "2"}),
    ],
)
@pytest.mark.parametrize("protocol", [CHAT, COMPLETIONS])
def test_forms_of_other_servers_are_followed(
    client: httpx.Client, protocol: str, change: dict[str, Any], texts: set[str]
) -> None:
    choice = ask(client, protocol, {**change, "max_tokens": 8, "temperature": 2}).json()["choices"][0]
    assert (choice["message"]["content"] if protocol == CHAT else choice["text"]) in texts
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("protocol", [CHAT, COMPLETIONS])
def test_usage_in_each_chunk_counts_up_to_the_last(client: httpx.Client, protocol: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream": True, "stream_options": options, "max_tokens": 6, "ignore_eos": True}
    lines = ask(client, protocol, body).text.split("\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    written = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert written == sorted(written)
    assert (written[0] < 6, written[-2:]) == (True, [6, 6])
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert all(chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + number
               for chunk, number in zip(chunks, written, strict=True))  # fmt: skip


def test_tokens_that_end_a_text_and_those_before_which_none_ends(client: httpx.Client, engine: Engine) -> None:
    whole = ask(client, COMPLETIONS, {"prompt": "def main(", "max_tokens": 24, "temperature": 0}).json()["choices"][0]
    ids = engine.generate("def main(", max_new_tokens=24, temperature=0).token_ids
    end = next(token for token in ids[3:] if token not in ids[:3])
    for also in ({}, {"ignore_eos": True}):
        asked = {"prompt": "def main(", "max_tokens": 24, "temperature": 0, "stop_token_ids": [end], **also}
        cut = ask(client, COMPLETIONS, asked).json()
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["usage"]["completion_tokens"] == ids.index(end) + 1
        assert whole["text"].startswith(cut["choices"][0]["text"])
    assert ask(client, COMPLETIONS, {**asked, "min_tokens": 12}).json()["usage"]["completion_tokens"] > 12
    assert ask(client, COMPLETIONS, {"stop_token_ids": [10**9]}).status_code == 400


def test_two_names_of_one_field_are_one(client: httpx.Client) -> None:
    asked = {"prompt": "a", "n_predict": 3, "max_new_tokens": 3, "ignore_eos": True}
    assert client.post(PATHS[COMPLETIONS], json=asked).json()["usage"]["completion_tokens"] == 3


def test_the_best_of_as_many_as_are_wanted_are_all_of_them(client: httpx.Client) -> None:
    body = {"prompt": "import", "max_tokens": 1, "n": 2}
    assert len(client.post("/v1/completions", json={**body, "best_of": 2}).json()["choices"]) == 2
    assert client.post("/v1/completions", json={**body, "best_of": 3}).status_code == 400


def test_a_count_of_tokens_takes_what_a_message_has(client: httpx.Client) -> None:
    body = {"messages": SAID, "max_tokens": 4, "temperature": 0.5, "stream": True, "metadata": {"user_id": "a"}}
    assert client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 0


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", "identity", ""])
def test_a_packed_body_is_read(client: httpx.Client, encoding: str) -> None:
    content = json.dumps(SMALL[CHAT]).encode()
    packed = gzip.compress(content) if "gzip" in encoding.lower() else content
    assert client.post(PATHS[CHAT], content=packed, headers={"content-encoding": encoding}).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        ("zstd", b"{}", 415),
        ("deflate", zlib.compress(b"{}"), 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), 415),
        ("gzip", b"{}", 400),
        ("gzip", gzip.compress(json.dumps(SMALL[CHAT]).encode(), mtime=0)[:-20], 400),
        ("gzip", gzip.compress(json.dumps(SMALL[CHAT]).encode(), mtime=0) + b"more", 400),
    ],
)
def test_what_is_packed_otherwise_is_refused(client: httpx.Client, encoding: str, content: bytes, status: int) -> None:
    answer = client.post(PATHS[CHAT], content=content, headers={"content-encoding": encoding})
    assert answer.status_code == status
    assert status == 400 or encoding in answer.json()["error"]["message"]


def test_a_body_is_bounded_as_it_is_unpacked(start: Started) -> None:
    _, address = start(max_body_bytes=100_000)
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 100_000
    assert httpx.post(address + PATHS[CHAT], content=bomb, headers={"content-encoding": "gzip"}).status_code == 413
