"""Tools in the chat: calls are a line, their results are asked for, and a session has them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.chat.tools import read_tools
from edgespec.cli.chat.loop import converse
from edgespec.errors import EdgespecError
from tests.cli.chat.conftest import Lines, new_chat
from tests.cli.conftest import RunCli
from tests.edgespec.serve.test_tools import OPENAI as TOOLS
from tests.edgespec.serve.test_tools import TEMPLATE


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tree = TreeSettings(size=8)
    with Engine.from_pretrained(tree=tree, dtype="float32", context_tokens=1024, chat_template=TEMPLATE) as found:
        yield found


class Typed(Lines):
    """Notes what stood before the cursor."""

    def __init__(self, lines: list[Any]) -> None:
        super().__init__(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str, default: str) -> str:
        self.prompts.append(prompt)
        return super().__call__(prompt, default)


def test_a_call_is_shown_as_a_line_and_its_result_is_asked_for(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chat, path = new_chat(engine), tmp_path / "s.json"
    chat.conversation.options["max_new_tokens"] = 200
    chat.conversation.use_tools(read_tools(TOOLS[:1], "required"))
    chat.read_message = typed = Typed(["The weather?", "", "/result It shines.", f"/save {path}", "It rains."])
    assert converse(chat, None) == 0
    assert typed.prompts == ["> ", *["result of sun> "] * 5]
    calls = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(calls) == 3
    for call in calls:
        name, _, arguments = call.partition(" ")
        assert name == "sun"
        assert json.loads(arguments)["city"] in {"Paris", "Rome"}
    said = chat.conversation.messages
    assert [message.role for message in said] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert [message.content for message in said if message.role == "tool"] == ["It shines.", "It rains."]
    assert said[2].more == {"tool_call_id": said[1].calls[0]["id"], "name": "sun"}

    other = new_chat(engine)
    assert other.conversation.load(path).messages == said[:4]
    assert [call["function"]["name"] for call in other.conversation.pending_calls] == ["sun"]
    assert other.conversation.prompt_ids(said[:4]) != chat.conversation.prompt_ids(said[:4])  # which has tools
    other.conversation.use_tools(chat.conversation.toolset)
    assert other.conversation.prompt_ids(said[:4]) == chat.conversation.prompt_ids(said[:4])
    other.conversation.save(tmp_path / "s.md")
    assert "Call: sun {" in (tmp_path / "s.md").read_text()


def test_a_result_that_does_not_fit_is_asked_for_again(engine: Engine) -> None:
    chat = new_chat(engine)
    chat.conversation.options["max_new_tokens"] = 200
    chat.conversation.use_tools(read_tools(TOOLS[:1], "required"))
    chat.read_message = typed = Typed(["The weather?", "long " * 2000])
    assert converse(chat, None) == 0
    assert typed.prompts == ["> ", "result of sun> ", "result of sun> "]
    assert len(chat.conversation.messages) == 2


def test_without_tools_or_calls_nothing_is_asked_for(engine: Engine) -> None:
    chat = new_chat(engine)
    with pytest.raises(EdgespecError, match="no call waits"):
        chat.conversation.give_result("It shines.")
    free = chat.conversation.send("The weather?")
    other = new_chat(engine)
    other.conversation.use_tools(read_tools(TOOLS))
    other.conversation.send("The weather?")
    assert other.conversation.pending_calls == []
    assert other.conversation.num_tokens > chat.conversation.num_tokens
    assert free.text
    raw = engine.chat(raw=True, sampling=SamplingSettings())
    with pytest.raises(EdgespecError, match="tools need a chat template"):
        raw.use_tools(read_tools(TOOLS))


def test_the_flag_reads_a_file(run_cli: RunCli) -> None:
    files = {"tools.json": json.dumps(TOOLS), "t.jinja": TEMPLATE, "wrong.json": '[{"name": "sun"}]'}
    common = ["-p", "The weather?", "-n", "8", "--temp", "0", "--chat-template", "t.jinja", "--tools"]
    assert run_cli([*common, "tools.json"], files=files, command="chat").ended().out.strip()
    assert "--tools: tools.0" in run_cli([*common, "wrong.json"], command="chat").ended(2).err
    assert "no-file.json" in run_cli([*common, "no-file.json"], command="chat").err
    assert "tools need a chat template" in run_cli(["-p", "a", "-n", "2", "--tools", "tools.json"], command="chat").err
