"""`/adapter` and `/set adapters` choose among the adapters of a chat, by name and scale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.chat.actions import handle_command
from edgespec.cli.chat.settings import SETTINGS, change_settings, restore_settings
from edgespec.errors import EdgespecError


def chat_with(*names: str) -> tuple[Any, list[str]]:
    said: list[str] = []
    given = tuple(SimpleNamespace(name=name, scale=1.0) for name in names)
    pair = SimpleNamespace(target=SimpleNamespace(adapters=given), tokenizer=SimpleNamespace(chat_template=None))
    tree = SimpleNamespace(policy="none", num_nodes=0, num_layers=0)
    engine = SimpleNamespace(pair=pair, tree=tree, pinned_tree=None, is_tuned=False, use_tree=lambda _: None)
    pair.default_sampling = lambda: SimpleNamespace(**dict.fromkeys(SETTINGS, 0))
    conversation = SimpleNamespace(options={"max_new_tokens": 3}, template_values={}, is_raw=True)
    screen = SimpleNamespace(say=lambda *lines: said.extend(lines))
    return SimpleNamespace(engine=engine, conversation=conversation, screen=screen, shows_stats=True), said


@pytest.mark.parametrize(
    ("typed", "chosen"),
    [
        ("Style", ["Style"]),
        ("style two:0.5", ["Style", ("two", 0.5)]),
        ("two:-1.5,Style", [("two", -1.5), "Style"]),
        ("none", []),
        ("auto", None),
    ],
)
def test_adapters_are_chosen_by_name_and_scale(typed: str, chosen: Any) -> None:
    chat, _ = chat_with("Style", "two")
    handle_command(chat, "adapter", typed)
    assert chat.conversation.options.get("adapters") == chosen
    other, _ = chat_with("Style", "two")
    assert restore_settings(other, {"adapters": SETTINGS["adapters"].get(chat)}) == []
    assert other.conversation.options == chat.conversation.options


def test_an_unknown_adapter_is_refused_and_nothing_changes() -> None:
    chat, said = chat_with("one")
    handle_command(chat, "lora", "")
    assert said == ["adapters as they were given; there are one:1"]
    for wrong in ("two", "one one"):
        with pytest.raises(EdgespecError, match=r"two|twice"):
            handle_command(chat, "adapter", wrong)
    with pytest.raises(EdgespecError, match="two"):
        change_settings(chat, "adapters=ONE,two")
    assert "adapters" not in chat.conversation.options
    assert restore_settings(chat, {"adapters": "two"})[0].startswith("not applied: adapters two")
