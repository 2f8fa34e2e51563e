"""Addresses as people and clients write them: each works, or the answer says what is meant."""

import httpx
import pytest

from edgespec.errors import EdgespecError
from edgespec.serve.meant_path import meant_path
from edgespec.serve.settings import ServerSettings, origin_of
from tests.edgespec.serve.conftest import KEY, Started

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/gpt/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/models", "/v1/models"),
        ("/api/v0/models/", "/v1/models"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/models/org/models", "/v1/models/org/models"),
        ("/v1/models/a/completions", "/v1/models/a/completions"),
        ("/", "/"),
        ("//", "/"),
        ("/health/", "/health"),
        ("/page/main.js", "/page/main.js"),
        ("/v1/", "/v1"),
        ("/api/chat", "/api/chat"),
        ("/xcompletions", "/xcompletions"),
    ],
)
def test_a_path_means_one_of_ours_or_none(path: str, meant: str) -> None:
    assert meant_path(path) == meant


def test_clients_find_what_they_mean_and_whoever_does_not_is_told(client: httpx.Client) -> None:
    base = str(client.base_url).rstrip("/")
    for path in ("/chat/completions", "/v1/chat/completions/", "/api/v1/chat/completions"):
        assert client.post(path, json=CHAT).status_code == 200
    assert client.post("/v1/v1/messages", json={}).json()["type"] == "error"  # in this protocol's form
    assert client.get("/models/demo").json()["id"] == "demo"
    assert client.get(f"{base}//v1/models/").json()["data"][0]["id"] == "demo"
    for method, path in (("GET", "/v1"), ("POST", "/"), ("POST", "/v1/"), ("POST", "/v1/embeddings")):
        answer = client.request(method, path)
        assert (answer.status_code, f"{base}/v1, and" in answer.json()["error"]["message"]) == (404, True)
    assert "Ollama" in client.post("/api/chat", json=CHAT).json()["error"]["message"]
    wrong = client.get("/chat/completions")
    assert (wrong.status_code, "takes POST" in wrong.json()["error"]["message"]) == (405, True)


def test_a_path_written_otherwise_needs_the_key_as_well(start: Started) -> None:
    _, address = start(api_key=KEY)
    for path in ("/models", "//v1/models", "/v1/models/", "/health/../v1/models", "/page/main.js/models"):
        assert httpx.get(address + path).status_code in (401, 404)
        assert httpx.get(address + path, headers={"authorization": "Bearer wrong"}).status_code in (401, 404)
    assert httpx.get(f"{address}/models", headers={"api-key": KEY}).status_code == 200


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://localhost:3000/", "http://localhost:3000"),
        (" HTTP://LOCALHOST:3000 ", "http://localhost:3000"),
        ("https://example.org:443/", "https://example.org"),
        ("http://example.org:80", "http://example.org"),
        ("https://example.org:80", "https://example.org:80"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("https://Bücher.example", "https://xn--bcher-kva.example"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_an_origin_is_what_browsers_say(given: str, origin: str) -> None:
    assert ServerSettings(allowed_origins=(given,)).allowed_origins == (origin,)


@pytest.mark.parametrize(
    "given",
    ["localhost:3000", "localhost", "*", "http://*.example.org", "null", "", "http://", "http://localhost:x", "http://[",
     "file:///a.html"],
)  # fmt: skip
def test_what_no_origin_equals_is_refused_at_the_start(given: str) -> None:
    with pytest.raises(EdgespecError, match="no page's origin") as found:
        origin_of(given)
    assert "http://localhost:3000" in found.value.fix


@pytest.mark.parametrize("given", ["http://a.example/chat", "http://a.example?x=1", "http://me@a.example#x"])
def test_an_address_with_more_than_an_origin_is_told_which_it_has(given: str) -> None:
    with pytest.raises(EdgespecError) as found:
        origin_of(given)
    assert found.value.fix == "Use http://a.example."
