"""LangChain's and LiteLLM's clients, whole and streamed, against `edgespec serve`: the texts are the engine's own.

    pip install langchain-openai litellm
    python -m scripts.check.server_clients

The built-in pair on the loopback. Prints a line a client. Exits 1 where a text differs, or a package is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from edgespec import Engine
from edgespec.text.chat_template import Message, plain_ids
from scripts.check.running_server import running_server

PACKAGES = {"langchain_openai": "langchain-openai", "litellm": "litellm"}
QUESTION = "def main("
TOKENS, SEED, TEMPERATURE = 24, 7, 0.8


def with_langchain(address: str) -> list[str]:
    """Return what LangChain's chat model says, whole and streamed."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{address}/v1", api_key="any", model="edgespec", max_tokens=TOKENS, seed=SEED,
        temperature=TEMPERATURE,
    )  # fmt: skip
    streamed = "".join(str(chunk.content) for chunk in chat.stream(QUESTION))
    return [str(chat.invoke(QUESTION).content), streamed]


def with_litellm(address: str) -> list[str]:
    """Return what LiteLLM's completions say, whole and streamed."""
    import litellm

    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": TEMPERATURE,
    }  # fmt: skip
    openai = {**asked, "model": "openai/edgespec", "api_base": f"{address}/v1", "api_key": "any", "seed": SEED}
    whole = litellm.completion(**openai).choices[0].message.content
    stream = litellm.completion(**openai, stream=True, stream_options={"include_usage": True})
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    return [whole, streamed]


def main() -> None:
    """Ask with each client."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"missing: pip install {' '.join(missing)}")
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # which it would fetch
    with Engine.from_pretrained() as engine:
        ids = plain_ids(engine.pair.tokenizer, [Message(role="user", content=QUESTION)])
        expected = engine.generate(ids, max_new_tokens=TOKENS, seed=SEED, temperature=TEMPERATURE).text
    clients: dict[str, Callable[[str], list[str]]] = {"LangChain": with_langchain, "LiteLLM": with_litellm}
    wrong = 0
    with running_server() as (address, _):
        for name, ask in clients.items():
            found = ask(address)
            is_equal = all(text == expected for text in found)
            wrong += not is_equal
            print(f"{name:10} {len(found)} texts {'equal' if is_equal else f'DIFFER: {found} beside {expected!r}'}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
