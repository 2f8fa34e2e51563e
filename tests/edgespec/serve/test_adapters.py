"""Clients choose an adapter by the model's name, or by llama.cpp's scales: each text is the one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from edgespec import Engine
from edgespec.hub.names import BUILT_IN_TARGET
from tests.edgespec.serve.conftest import close_server, open_server
from tests.support.adapters import write_adapter

ASKED = [{"role": "user", "content": "def main("}]
NEW = 12
NAMES = ("one", "two", "three")
# A model's name -> its adapters
USES: dict[str, Any] = {"demo": None, "demo:one": ["one"], "demo:two": ["two"], "demo:three": ["three"]}
# A protocol's path, what its body has beside the model, and where its text is
PROTOCOLS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (
        {"messages": ASKED, "max_tokens": NEW},
        lambda found: found["choices"][0]["message"]["content"],
    ),
    "/v1/completions": ({"prompt": "def main(", "max_tokens": NEW}, lambda found: found["choices"][0]["text"]),
    "/v1/responses": (
        {"input": "def main(", "max_output_tokens": NEW},
        lambda found: found["output"][0]["content"][0]["text"],
    ),
    "/v1/messages": ({"messages": ASKED, "max_tokens": NEW}, lambda found: found["content"][0]["text"]),
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The built-in target: texts that choose none have one adapter at half its scale."""
    room = tmp_path_factory.mktemp("adapters")
    model: Any = AutoModelForCausalLM.from_pretrained(BUILT_IN_TARGET)
    ends = ["q_proj", "up_proj", "down_proj"]
    places = [write_adapter(room / name, model, ends, seed=seed) for seed, name in enumerate(NAMES)]
    adapters: list[tuple[Path, float]] = [(place, 0.5 if place.name == "one" else 0) for place in places]
    with Engine.from_pretrained(
        draft="none", adapters=adapters, parallel=4, context_tokens=256, device="cpu", dtype="float32",
        self_check=False,
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def adapted_client(adapted: Engine) -> Iterator[httpx.Client]:
    _, server, thread = open_server(adapted)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        yield client
    close_server(server, thread)


@pytest.fixture(scope="module")
def texts(adapted: Engine) -> dict[str, str]:
    """Of each model."""
    found = {
        name: adapted.generate("def main(", adapters=use, max_new_tokens=NEW, temperature=0.0).text
        for name, use in USES.items()
    }
    assert len(set(found.values())) == len(NAMES)  # the base has the first of them
    return found


@pytest.mark.parametrize("path", PROTOCOLS)
def test_the_models_name_chooses_in_each_protocol(
    path: str, adapted_client: httpx.Client, texts: dict[str, str]
) -> None:
    """Of requests that come at once, and again, when rows of the same prompt are kept with other adapters."""
    body, text_of = PROTOCOLS[path]

    def ask(name: str) -> Any:
        found = adapted_client.post(path, json={**body, "model": name, "temperature": 0})
        assert found.status_code == 200, found.text
        return found.json()

    names = [*USES, *USES, *reversed(USES)]
    with ThreadPoolExecutor(4) as threads:
        for name, answer in zip(names, threads.map(ask, names), strict=True):
            assert text_of(answer) == texts[name], name
            assert answer["model"] == name
    assert text_of(ask("")) == texts["demo"]


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("name", ["demo:four", "other", "demo:"])
def test_a_model_that_is_not_here_is_named_with_those_that_are(
    path: str, name: str, adapted_client: httpx.Client
) -> None:
    found = adapted_client.post(path, json={**PROTOCOLS[path][0], "model": name})
    error = found.json()["error"]
    assert found.status_code == 404
    assert ", ".join(USES) in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "not_found_error"
    else:
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_models_and_adapters_are_listed(adapted_client: httpx.Client, adapted: Engine) -> None:
    listed = adapted_client.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [
        (name, None if name == "demo" else "demo") for name in USES
    ]
    assert adapted_client.get("/v1/models/demo:two").json()["id"] == "demo:two"
    assert "demo:two" in adapted_client.get("/v1/models/demo:four").json()["error"]["message"]
    given = adapted.pair.target.adapters
    assert adapted_client.get("/lora-adapters").json() == [
        {"id": number, "name": name, "path": str(given[number].adapter.path), "scale": 0 if number else 0.5}
        for number, name in enumerate(NAMES)
    ]


@pytest.mark.parametrize("path", PROTOCOLS)
def test_scales_of_llama_cpp_are_of_the_request(path: str, adapted_client: httpx.Client, adapted: Engine) -> None:
    """An adapter that is not named counts nothing."""
    body, text_of = PROTOCOLS[path]
    for lora, use in (
        ([{"id": 1, "scale": 0.5}], [("two", 0.5)]),
        ([{"id": 0, "scale": 2}, {"id": 1, "scale": 1}], [("one", 2.0), ("two", 1.0)]),
        ([], []),
    ):
        wanted = adapted.generate("def main(", adapters=use, max_new_tokens=NEW, temperature=0.0).text
        found = adapted_client.post(path, json={**body, "temperature": 0, "lora": lora})
        assert text_of(found.json()) == wanted, lora


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an id that is not here": ({"lora": [{"id": 3, "scale": 1}]}, "0 is one, 1 is two, 2 is three"),
    "a negative id": ({"lora": [{"id": -1, "scale": 1}]}, "0 is one, 1 is two, 2 is three"),
    "twice": ({"lora": [{"id": 1, "scale": 1}, {"id": 1, "scale": 2}]}, "chosen twice"),
    "no scale": ({"lora": [{"id": 1}]}, "'lora.0.scale' is missing"),
    "beside a model that chooses": ({"lora": [{"id": 1, "scale": 1}], "model": "demo:one"}, "both choose"),
    "another field": ({"adapter": "one"}, "BASE:ADAPTER"),
}


@pytest.mark.parametrize("of", WRONG)
def test_a_choice_that_is_none_is_refused(of: str, adapted_client: httpx.Client) -> None:
    fields, words = WRONG[of]
    path = "/v1/chat/completions"
    found = adapted_client.post(path, json={**PROTOCOLS[path][0], **fields})
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
