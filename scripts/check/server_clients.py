"""LangChain's and LiteLLM's clients, whole and streamed, against `edgespec serve`: texts are the engine's own.

    pip install langchain-openai litellm
    python -m scripts.check.server_clients

The built-in pair on the loopback, with a chat template in which a grammar writes calls of tools. Each client asks for a
text, for a call, and for an answer to the call's result. Prints a line a client. Exits 1 where a text is another, a
call has no place to look at, or a package is missing.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgespec import Engine
from tests.support.running_server import TEMPLATE, running_server

PACKAGES = {"langchain_openai": "langchain-openai", "litellm": "litellm"}
QUESTION = "def main("
TOKENS, CALL_TOKENS, SEED, TEMPERATURE = 24, 200, 7, 0.8
CITIES = ("Paris", "Rome")
PARTS = {"city": {"enum": CITIES}}
SCHEMA = {"type": "object", "properties": PARTS, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Looks.", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}

Found = tuple[list[str], list[dict[str, Any]], str]  # texts, arguments of calls, and an answer to a result


def with_langchain(address: str) -> Found:
    """Return what LangChain's chat model says and calls, whole and streamed."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def chat(max_tokens: int) -> Any:
        return ChatOpenAI(
            base_url=f"{address}/v1", api_key="any", model="edgespec", max_tokens=max_tokens, seed=SEED,
            temperature=TEMPERATURE,
        )  # fmt: skip

    texts = [str(chat(TOKENS).invoke(QUESTION).content)]
    texts.append("".join(str(chunk.content) for chunk in chat(TOKENS).stream(QUESTION)))
    calling = chat(CALL_TOKENS).bind_tools([TOOL], tool_choice="weather")
    whole = calling.invoke(QUESTION)
    streamed: Any = None
    for chunk in calling.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    calls = [call for message in (whole, streamed) for call in message.tool_calls]
    told = [HumanMessage(QUESTION), whole, ToolMessage("It rains.", tool_call_id=calls[0]["id"])]
    answer = chat(TOKENS).bind_tools([TOOL]).invoke(told)
    return texts, [call["args"] for call in calls], str(answer.content)


def with_litellm(address: str) -> Found:
    """Return what LiteLLM's completions say and call, whole and streamed, in OpenAI's form."""
    return _with_litellm({"model": "openai/edgespec", "api_base": f"{address}/v1", "api_key": "any", "seed": SEED})


def with_litellms_anthropic(address: str) -> Found:
    """Return the same in Anthropic's form, which has no seed."""
    return _with_litellm({"model": "anthropic/edgespec", "api_base": address, "api_key": "any", "temperature": 0})


def _with_litellm(way: dict[str, Any]) -> Found:
    import litellm

    question = {"role": "user", "content": QUESTION}
    asked: dict[str, Any] = {"messages": [question], "max_tokens": TOKENS, "temperature": TEMPERATURE, **way}
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    texts = [litellm.completion(**asked).choices[0].message.content]
    chunks = [chunk for chunk in litellm.completion(**streamed) if chunk.choices]
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    tools = {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": CALL_TOKENS}
    whole = litellm.completion(**{**asked, **tools}).choices[0].message
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**{**streamed, **tools})))
    calls = [call for message in (whole, rebuilt.choices[0].message) for call in message.tool_calls]
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": "It rains."}
    told = {**asked, "messages": [question, whole.model_dump(), result], "tools": [TOOL]}
    answer = litellm.completion(**told).choices[0].message.content
    return texts, [json.loads(call.function.arguments) for call in calls], answer


def main() -> None:
    """Ask with each client."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        sys.exit(f"missing: pip install {' '.join(missing)}")
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # which it would fetch
    with Engine.from_pretrained(chat_template=TEMPLATE) as engine:
        asked = engine.encode([{"role": "user", "content": QUESTION}])
        drawn, likeliest = (
            engine.generate(asked, max_new_tokens=TOKENS, seed=SEED, temperature=temperature).text
            for temperature in (TEMPERATURE, 0.0)
        )
    clients: dict[str, tuple[Callable[[str], Found], str]] = {
        "LangChain": (with_langchain, drawn),
        "LiteLLM": (with_litellm, drawn),
        "LiteLLM, Anthropic's form": (with_litellms_anthropic, likeliest),
    }
    num_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        with running_server("--chat-template", str(template)) as (address, _):
            for name, (ask, expected) in clients.items():
                texts, calls, answer = ask(address)
                is_right = all(text == expected for text in texts) and len(calls) == 2
                is_right = is_right and all(call["city"] in CITIES for call in calls) and bool(answer)
                num_wrong += not is_right
                found = "2 texts, 2 calls and an answer" if is_right else f"WRONG: {texts} {calls} {answer!r}"
                print(f"{name:26} {found}")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
