"""A run's template and what is given to it: by options, by rows, and by none in silence."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import cli
from edgespec.cli.prompts.read import encode_turn
from edgespec.cli.prompts.rows import parse_row
from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair, open_pair
from tests.cli.conftest import RunCli, jsonl

TEMPLATE = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}"
    "{{ tools | tojson if tools else '' }}{{ mood }}{{ reasoning_effort }}{% if add_generation_prompt %}>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "warmth"}}]
USER = {"role": "user", "content": "hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "warmth", "arguments": '{"city": "Bern"}'}}],
}


@pytest.fixture
def folder(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    copied = shutil.copytree(pair_folders[0], tmp_path / "chat")
    (copied / "chat_template.jinja").write_text(TEMPLATE)
    return copied


@pytest.fixture
def pair(folder: Path) -> ModelPair:
    return open_pair(folder, None)


def turn(pair: ModelPair, row: Any, **options: Any) -> str:
    return str(pair.tokenizer.decode(encode_turn(pair, parse_row(row, "line 3"), **{"raw": False, **options})))


def theirs(pair: ModelPair, messages: list[dict[str, Any]], **values: Any) -> str:
    """What transformers makes of them."""
    ids = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **values)
    return str(pair.tokenizer.decode(ids))


def test_a_lost_message_is_named_by_row_number_and_role(pair: ModelPair) -> None:
    for messages, system in [([{**USER, "role": "User"}], None), ([USER, {**USER, "role": "function"}], "Be short.")]:
        with pytest.raises(EdgespecError, match="does not reach the prompt") as caught:
            turn(pair, {"messages": messages}, system=system)
        role = messages[-1]["role"]
        assert caught.value.what.startswith(f"line 3: message {len(messages)} (role '{role}')")
    developer = {"role": "developer", "content": "Be short."}
    assert turn(pair, {"messages": [developer, USER]}, system="not this") == "<system>Be short.<user>hi>"


def test_calls_of_tools_are_read_in_openai_s_form(pair: ModelPair) -> None:
    given = {**CALL, "tool_calls": [{"function": {"name": "warmth", "arguments": {"city": "Bern"}}}]}
    assert turn(pair, {"messages": [USER, CALL, USER]}) == theirs(pair, [USER, given, USER])
    with pytest.raises(EdgespecError, match=r"line 3: message 2 \(role 'assistant'\) only calls tools"):
        turn(pair, {"messages": [USER, CALL, USER]}, raw=True)


@pytest.mark.parametrize("in_body", [True, False], ids=["batch", "row"])
def test_what_a_row_gives_to_the_template_reaches_it(pair: ModelPair, in_body: bool) -> None:
    given = {"chat_template_kwargs": {"mood": "calm", "reasoning_effort": "low"}, "reasoning_effort": "high"}
    row = {"messages": [USER], "tools": TOOLS, **given}
    values = {"mood": "calm", "reasoning_effort": "high", "tools": TOOLS}
    parsed = parse_row({"custom_id": "a", "body": row} if in_body else row, "line 3")
    assert parsed.settings.template_args == values
    assert turn(pair, {"body": row} if in_body else row) == theirs(pair, [USER], **values)
    assert parsed.ignored_keys == set()
    others = [parse_row({**row, "tools": tools}, "line 3") for tools in (TOOLS, [], None)]
    assert len({each.digest for each in others}) == 2  # none are none, however that is written


def test_wrong_values_for_the_template_are_named(pair: ModelPair) -> None:
    with pytest.raises(EdgespecError, match="line 3: chat_template_kwargs 'mood' is wrong"):
        parse_row({"prompt": "a", "chat_template_kwargs": "mood"}, "line 3")
    with pytest.raises(EdgespecError, match="line 3: tokenize cannot be given"):
        turn(pair, {"prompt": "a", "chat_template_kwargs": {"tokenize": True}})
    with pytest.raises(EdgespecError, match="line 3: tools 'all' is no list of objects"):
        turn(pair, {"prompt": "a", "tools": "all"})


def test_a_run_gives_values_that_rows_replace(run_cli: RunCli, folder: Path) -> None:
    files = jsonl([{"prompt": "a"}, {"prompt": "b", "chat_template_kwargs": {"mood": "wild"}}])
    common = ["p.jsonl", "-m", str(folder), "-n", "1", "--policy", "none", "-o", "out.jsonl", "--template-arg"]
    assert run_cli([*common, 'mood={"a": [1]}', "--template-arg", "colour=red"], files=files).code == 0
    outcome = run_cli([*common, "mood=calm", "--resume"]).ended(2)
    assert 'template_args {"colour": "red", "mood": {"a": [1]}} there, {"mood": "calm"} here' in outcome.err.replace(
        '{"mood": {"a": [1]}, "colour": "red"}', '{"colour": "red", "mood": {"a": [1]}}'
    )


def test_what_is_done_otherwise_is_said_once(run_cli: RunCli, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(NO_SYSTEM + TEMPLATE)
    rows = [{"prompt": "a", "system": "s", "chat_template_kwargs": {"thinking": True}}] * 2
    files = jsonl(rows)
    common = ["p.jsonl", "-m", str(folder), "--dry-run", "--policy", "none"]
    err = run_cli([*common, "--template-arg", "colour=red"], files=files).err
    assert err.count("the chat template has no system role: the system prompt goes before the first user's") == 1
    assert err.count("not applied: the chat template does not read colour, thinking") == 1
    assert "not applied without a chat template: thinking" in run_cli([*common, "--raw"], files=files).err


def test_a_template_is_chosen_by_name_or_file(run_cli: RunCli, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (folder / f"additional_chat_templates/{name}.jinja").write_text(name + TEMPLATE)
    common = ["-p", "a", "-m", str(folder), "--dry-run", "--policy", "none"]
    unchosen = run_cli(common)
    assert (unchosen.code, "no default: rag, tool_use" in unchosen.err) == (2, True)
    assert "Try: Choose one with --chat-template rag." in unchosen.err
    assert run_cli([*common, "--chat-template", "tool_use"]).code == 0
    assert run_cli([*common, "--chat-template", "own.jinja"], files={"own.jinja": TEMPLATE}).code == 0
    missing = run_cli([*common, "--chat-template", "no.jinja"])
    assert (missing.code, "the model's own are rag, tool_use" in missing.err) == (4, True)
    assert run_cli([*common, "--raw", "--chat-template", "rag"]).code == 2
    assert run_cli([*common, "--chat-template", "rag", "--template-arg", "mood"]).code == 2


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_values_are_json_or_text(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one JSON object may hold all of them, as other tools take them."""
    found: dict[str, Any] = {}
    flags = ["mood=false", "day=2026-07-01", "text=a=b", "n=3", "none=", 'q="x"', '{"b": 1, "c": [2]}']
    monkeypatch.setattr("edgespec.cli.options.template.settle", lambda options, **fields: found.update(fields) or 1 / 0)
    arguments = [word for flag in flags for word in ("--template-arg", flag)]
    with pytest.raises(ZeroDivisionError):
        cli.main([command, "-p", "a", *arguments], standalone_mode=False)
    assert found["values"] == {
        "mood": False, "day": "2026-07-01", "text": "a=b", "n": 3, "none": "", "q": "x", "b": 1, "c": [2],
    }  # fmt: skip
