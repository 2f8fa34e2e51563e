"""Prompt files of every kind are read as their tools mean them; a wrong row is named, and nothing ends in a trace."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.chat.chat_template import Message
from edgespec.cli.prompts.read import describe, encode_prompts, encode_turn, read_prompts
from edgespec.cli.prompts.rows import PromptRow, parse_row
from edgespec.cli.prompts.selection import RowSelection, repeated, select
from edgespec.errors import EdgespecError
from edgespec.pair.pair import ModelPair, open_pair

USER = {"role": "user", "content": "hi"}
# As Spec-Bench's question.jsonl has them: two turns of MT-Bench, one turn of the others, a reference or none
SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Write a story.", "Now rhyme it."]},
    {"question_id": 111, "category": "math", "turns": ["What is 2 + 2?", "Why?"], "reference": ["4", "Because."]},
    {"question_id": 241, "category": "translation", "turns": ["Translate: Guten Tag."], "reference": ["Hello."]},
]


def read(tmp_path: Path, name: str, content: str, *, lines: bool = False) -> list[PromptRow]:
    (tmp_path / name).write_bytes(content.encode())
    return read_prompts(str(tmp_path / name), lines=lines)


def read_or_refuse(path: Path) -> list[PromptRow] | EdgespecError:
    try:
        return read_prompts(str(path), lines=False)
    except EdgespecError as error:
        return error


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["p.txt", "p.md", "p"])
def test_a_text_file_is_one_prompt_unless_it_is_to_be_split(name: str, tmp_path: Path) -> None:
    assert [row.prompt for row in read(tmp_path, name, "a\n\nb\n")] == ["a\n\nb"]
    assert [row.prompt for row in read(tmp_path, name, "a\n\nb\n", lines=True)] == ["a", "b"]


def test_every_kind_of_row_is_understood(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "m"}]},
        {"turns": ["t1", "t2"]},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER], "model": "x"}},
        {"custom_id": "d", "body": {"prompt": "b"}},
        ["e", "templated"],
        [7, "numbered"],
        "bare",
    ]
    for name, content in (
        ("p.jsonl", jsonl(*rows)),
        ("p.ndjson", jsonl(*rows)),
        ("p.json", json.dumps(rows, indent=1)),
    ):
        found = read(tmp_path, name, content)
        assert [row.id for row in found] == ["0", "1", "2", "c", "d", "e", "7", "row-7"]
        assert [row.prompt for row in found] == ["p", "s\nm", "t1", "hi", "b", "templated", "numbered", "bare"]
        kinds = ["prompt", "messages", "turns", "batch", "completion", "pair", "pair", "string"]
        assert [row.kind for row in found] == kinds
        assert found[2].follow_ups == ("t2",)
        assert found[3].meta == {"method": "POST", "url": "/v1/chat/completions", "body": {"model": "x"}}
        assert found[3].ignored_keys == {"model"}
    assert describe(found) == (
        "prompts: 8 rows, 1 of single prompts, 1 of messages, 1 of turns, 1 of OpenAI batch messages, "
        "1 of OpenAI batch prompts, 2 of [id, text] pairs, 1 of strings (9 turns)"
    )


def test_spec_bench_questions_are_read_as_they_are(tmp_path: Path) -> None:
    found = read(tmp_path, "question.jsonl", jsonl(*SPEC_BENCH))
    assert [(row.id, row.own_id, row.category) for row in found] == [
        ("81", 81, "writing"), ("111", 111, "math"), ("241", 241, "translation"),
    ]  # fmt: skip
    assert [row.num_turns for row in found] == [2, 2, 1]
    assert [row.reference for row in found] == [None, ["4", "Because."], ["Hello."]]
    assert all(not row.meta for row in found)
    assert describe(found) == "prompts: 3 rows, MT-Bench turns (5 turns)"


def test_a_picture_that_is_none_is_the_fault_of_its_row(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "p.jsonl", jsonl({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}))
    assert (row.fault.code, row.where) == ("E_PICTURE", "line 1")
    assert row.fault.what.startswith("picture 1 is no text")


def test_unknown_keys_are_handed_through_and_null_counts_as_absent(tmp_path: Path) -> None:
    (row,) = read(tmp_path, "p.jsonl", jsonl({"prompt": "a", "messages": None, "id": None, "colour": {"deep": [1]}}))
    assert (row.id, row.meta) == ("0", {"messages": None, "id": None, "colour": {"deep": [1]}})


def test_contents_in_parts_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (row,) = read(tmp_path, "p.jsonl", jsonl({"messages": [{"role": "user", "content": parts, "name": "x"}]}))
    assert row.messages == ({"role": "user", "content": "one\ntwo", "name": "x"},)
    assert row.as_written == [{"role": "user", "content": parts, "name": "x"}]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"text": "a"}, 'none of "prompt", "messages", "turns" and "body"'),
        ({"prompt": "a", "turns": ["b"]}, 'both "prompt" and "turns"'),
        ({"prompt": "a", "messages": [USER]}, 'both "prompt" and "messages"'),
        ({"body": {"model": "x"}}, 'the body of line 1 has none of "messages" and "prompt"'),
        ({"body": {"prompt": "a", "messages": [USER]}}, "the body of line 1 has both"),
        ({"body": "text"}, "none of"),
        ({"prompt": ["a"]}, 'the "prompt" of line 1'),
        ({"turns": "a"}, 'the "turns" of line 1'),
        ({"turns": []}, 'the "turns" of line 1'),
        ({"turns": ["a", 2]}, 'the "turns" of line 1'),
        ({"turns": ["a", ""]}, "empty turn"),
        ({"messages": []}, 'the "messages" of line 1'),
        ({"messages": [{"content": "a"}]}, 'message 1 of line 1 has no "role"'),
        ({"messages": [USER, {"role": "user"}]}, 'message 2 of line 1 has no "content"'),
        ({"messages": [{"role": "user", "content": ""}]}, "are empty"),
        ({"messages": [{"role": "system", "content": "s"}, USER], "system": "t"}, 'both "system"'),
        ({"prompt": "a", "id": True}, "an id that is no string"),
        ({"prompt": "a", "id": 1.5}, "an id that is no string"),
        (["a"], "no pair"),
        (["a", "b", "c"], "no pair"),
        ([None, "b"], "no pair"),
        (["a", 5], "no pair"),
        (5, "no object, string or pair"),
        (None, "no object, string or pair"),
        ("", "empty prompt"),
    ],
    ids=lambda value: json.dumps(value) if not isinstance(value, str) else "",
)
def test_a_wrong_row_is_named(row: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(EdgespecError) as caught:
        read(tmp_path, "p.jsonl", jsonl(row))
    assert "line 1" in caught.value.what
    assert named in caught.value.what
    assert caught.value.exit_code == 2
    with pytest.raises(EdgespecError, match="row 2"):
        read(tmp_path, "p.json", json.dumps(["fine", row]))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"temperature": -1}, "temperature -1"),
        ({"temperature": "hot"}, "temperature 'hot'"),
        ({"temperature": True}, "temperature True"),
        ({"temperature": 10**400}, "temperature 1000"),
        ({"top_p": 0}, "top_p 0"),
        ({"top_k": 1.5}, "top_k 1.5"),
        ({"top_k": 1e999}, "top_k inf"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"top_k": -2}, "top_k -2"),
        ({"min_p": 2}, "min_p 2"),
        ({"seed": -2}, "seed -2"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
        ({"stop": ["a", 1]}, "stop.1 1"),
        ({"system": ["a"]}, "system ['a']"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"max_new_tokens": "5"}, "max_new_tokens '5'"),
        ({"max_new_tokens": 5, "max_tokens": 6}, "both max_new_tokens and max_tokens"),
    ],
    ids=str,
)
def test_a_wrong_setting_of_a_row_is_named_with_the_row(setting: dict[str, Any], named: str) -> None:
    for row in ({"prompt": "a", **setting}, {"body": {"prompt": "a", **setting}}):
        with pytest.raises(EdgespecError, match="line 4") as caught:
            parse_row(row, "line 4")
        assert caught.value.code == "E_SETTING"
        assert named in caught.value.what


def test_a_rows_settings_have_the_names_of_other_tools() -> None:
    given = {"max_completion_tokens": 5, "temperature": 1, "top_k": 3, "stop": "x", "seed": None, "system": "be brief"}
    assert parse_row({"body": {"prompt": "a", **given}}, "line 1").settings.set_values() == {
        "max_new_tokens": 5, "temperature": 1, "top_k": 3, "stop": ("x",), "system": "be brief",
    }  # fmt: skip


def test_whole_floats_are_whole_numbers() -> None:
    given = parse_row({"prompt": "a", "max_tokens": 16.0, "top_k": 50.0, "seed": 3.0}, "line 1").settings.set_values()
    assert given == {"max_new_tokens": 16, "top_k": 50, "seed": 3}
    assert {type(value) for value in given.values()} == {int}


def test_json_that_is_no_array_is_refused(tmp_path: Path) -> None:
    for content in ('"a"', "5", '{"prompt":\n "a"}'):
        with pytest.raises(EdgespecError, match="no array"):
            read(tmp_path, "p.json", content)
    with pytest.raises(EdgespecError, match="is not JSON"):
        read(tmp_path, "p.json", jsonl({"prompt": "a"}) + "text")
    for content in ("", "[]", " \n"):
        with pytest.raises(EdgespecError, match="no prompt"):
            read(tmp_path, "p.json", content)


SOME_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ROW_KEYS = st.sampled_from([
    "prompt", "messages", "turns", "body", "id", "custom_id", "question_id", "system", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "max_tokens", "max_new_tokens", "category", "reference", "role", "content", "x",
])  # fmt: skip
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content"]), SOME_JSON | st.just("user"), max_size=3), max_size=3
)
SETTINGS = st.sampled_from(
    ["id", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "system", "x"]
)
VALUES = st.floats(0, 1) | st.integers(0, 9) | st.text(max_size=3) | SOME_JSON
GOOD = st.sampled_from([{"prompt": "a"}, {"turns": ["a", "b"]}, {"messages": [USER]}, {"body": {"messages": [USER]}}])
ROWS = (
    st.builds(lambda row, more: {**more, **row}, GOOD, st.dictionaries(SETTINGS, VALUES, max_size=2))
    | st.dictionaries(
        ROW_KEYS, VALUES | MESSAGES | st.dictionaries(ROW_KEYS, VALUES | MESSAGES, max_size=4), max_size=5
    )
    | st.tuples(st.integers(), st.text("ab", max_size=2)).map(list)
    | SOME_JSON
)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    name=st.sampled_from(["p.jsonl", "p.json"]),
    cut=st.none() | st.integers(1, 300),
)
def test_any_json_is_prompts_or_an_error(
    rows: list[Any], name: str, cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rows with known keys and any values, whole or cut short: 500 of them, no other exception than ours."""
    path = tmp_path_factory.getbasetemp() / name
    content = json.dumps(rows) if name == "p.json" else jsonl(*rows)
    path.write_bytes(content.encode()[:cut])
    found = read_or_refuse(path)
    if isinstance(found, EdgespecError):
        assert found.code in {"E_PROMPT_INVALID", "E_PROMPT_EMPTY", "E_SETTING"}
        return
    assert all(row.prompt and row.id for row in found)
    json.dumps([(row.as_written, row.meta, row.settings.set_values(), row.digest) for row in found], allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200), name=st.sampled_from(["b.jsonl", "b.json", "b.txt"]))
def test_any_bytes_are_prompts_or_an_error(data: bytes, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    found = read_or_refuse(path)
    assert found.exit_code == 2 if isinstance(found, EdgespecError) else all(row.prompt for row in found)


def test_rows_are_selected_by_category_and_id_then_by_place(tmp_path: Path) -> None:
    rows = read(
        tmp_path, "q.jsonl", jsonl(*({"id": f"r{i}", "prompt": "a", "category": "ab"[i % 2]} for i in range(10)))
    )

    def ids(**wanted: Any) -> list[str]:
        return [row.id for row in select(rows, RowSelection(**wanted))]

    assert ids(start=3, limit=2) == ["r3", "r4"]
    assert ids(only=("r7", "r2")) == ["r2", "r7"]
    assert ids(categories=("b",), start=1, limit=2) == ["r3", "r5"]
    assert ids(categories=("a", "b")) == [row.id for row in rows]
    twice = repeated(select(rows, RowSelection(limit=2)), 2)
    assert [(row.id, row.index, row.repeat) for row in twice] == [
        ("r0", 0, 0),
        ("r1", 1, 0),
        ("r0#2", 0, 1),
        ("r1#2", 1, 1),
    ]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"only": ("r99",)}, "no row has id 'r99'"),
        ({"categories": ("c",)}, "no row has category 'c'"),
        ({"start": 10}, "none is left"),
        ({"start": -1}, "--start -1"),
        ({"limit": 0}, "--limit 0"),
        ({"repeat": 0}, "--repeat 0"),
    ],
    ids=str,
)
def test_a_selection_that_leaves_nothing_is_an_error(wanted: dict[str, Any], named: str, tmp_path: Path) -> None:
    rows = read(tmp_path, "q.jsonl", jsonl(*({"id": f"r{index}", "prompt": "a"} for index in range(10))))
    with pytest.raises(EdgespecError) as caught:
        select(rows, RowSelection(**wanted))
    assert named in caught.value.what


@pytest.fixture
def plain_pair(pair_folders: tuple[Path, Path]) -> ModelPair:
    return open_pair(pair_folders[0], None)


@pytest.fixture
def template_pair(pair_folders: tuple[Path, Path], tmp_path: Path) -> ModelPair:
    folder = shutil.copytree(pair_folders[0], tmp_path / "chat")
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}>{% endif %}")
    return open_pair(folder, None)


def turn(pair: ModelPair, row: Any, answers: tuple[str, ...] = (), **options: Any) -> str:
    said = tuple(Message(role="assistant", content=answer) for answer in answers)
    ids = encode_turn(pair, parse_row(row, "line 1"), said, **{"raw": False, **options})
    return str(pair.tokenizer.decode(ids))


def test_an_answer_that_was_begun_goes_on_unless_the_row_says_that_it_is_whole(template_pair: ModelPair) -> None:
    begun = [USER, {"role": "assistant", "content": "Well, "}]
    rows = [
        parse_row({"messages": begun}, "line 1"),
        parse_row({"messages": [USER, {**begun[1], "prefix": True}]}, "line 2"),
        parse_row({"messages": begun, "continue_final_message": False}, "line 3"),
    ]
    texts = [template_pair.tokenizer.decode(ids) for ids in encode_prompts(template_pair, rows, raw=False)]
    assert texts[0] == texts[1]
    assert texts[0].endswith("Well, ")
    assert texts[2].startswith(texts[0])
    assert texts[2] != texts[0]


def test_a_template_gets_system_messages_and_earlier_turns(template_pair: ModelPair) -> None:
    asked = {"turns": ["one", "two"]}
    assert turn(template_pair, {"prompt": "p"}) == "[user:p]>"
    assert turn(template_pair, asked, ("first",), system="s") == "[system:s][user:one][assistant:first][user:two]>"
    assert turn(template_pair, {**asked, "system": "own"}, system="s") == "[system:own][user:one]>"
    messages = [{"role": "system", "content": "mine"}, USER]
    assert turn(template_pair, {"messages": messages}, system="s") == "[system:mine][user:hi]>"
    assert turn(template_pair, asked, ("first",), raw=True) == "onefirst\ntwo"


def test_without_a_template_a_conversation_is_one_text(plain_pair: ModelPair) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert turn(plain_pair, {"messages": messages}, system="s") == "s\nab\nc"
    assert turn(plain_pair, {"turns": ["def f(", "def g("]}, ("x): pass",)) == "def f(x): pass\ndef g("
