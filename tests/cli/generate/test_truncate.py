"""Prompts that the context has no room for: one never refuses the others, and nothing is cut unasked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat.chat_template import Message
from edgespec.cli.generate.requests import EncodeTurn, Request, question_tokens
from edgespec.cli.generate.truncate import fit
from edgespec.cli.prompts.rows import PromptRow, parse_row
from edgespec.config import SamplingSettings
from edgespec.engine import Engine
from tests.cli.conftest import RunCli, jsonl, records, written
from tests.support.families import make_tokenizer

CONTEXT = 64
TOKENIZER = make_tokenizer()  # a token is a byte
LONG = "".join(chr(ord("a") + index % 26) for index in range(150))
ROWS = [{"id": "first", "prompt": "def main("}, {"id": "long", "prompt": LONG}, {"id": "last", "prompt": "import os"}]


@pytest.fixture
def options(pair_folders: tuple[Path, Path]) -> list[str]:
    return ["p.jsonl", "-m", str(pair_folders[0]), "--temp", "0", "-n", "6", "-c", str(CONTEXT), "--ordered"]


@pytest.mark.parametrize("parallel", ["1", "3"])
def test_a_row_that_does_not_fit_fails_alone(run_cli: RunCli, options: list[str], parallel: str) -> None:
    outcome = run_cli([*options, "--format", "jsonl", "-np", parallel], files=jsonl(ROWS))
    first, failed, last = records(outcome, code=3)
    assert failed["error"]["type"] == "E_CONTEXT"
    assert failed["error"]["message"] == (
        f"the prompt has 150 tokens, and the context holds {CONTEXT} with at least one new one."
    )
    assert "--truncate left" in failed["error"]["fix"]
    assert (failed["finish_reason"], failed["token_ids"]) == ("error", [])
    whole = records(run_cli([*options, "--format", "jsonl"], files=jsonl([ROWS[0], ROWS[2]])))
    assert [first["token_ids"], last["token_ids"]] == [record["token_ids"] for record in whole]
    assert "too long for the context, and skipped: line 2 " in outcome.err
    assert outcome.err.count("Error: line 2: the prompt has 150 tokens") == 1


def test_a_row_that_is_far_too_long_fails_alone_and_is_never_read_whole(run_cli: RunCli, options: list[str]) -> None:
    rows = [ROWS[0], {"id": "huge", "prompt": LONG * 1_000}, {"id": "turns", "turns": ["x = ", LONG * 1_000]}, ROWS[2]]
    first, huge, turns, last = records(run_cli([*options, "--format", "jsonl"], files=jsonl(rows)), code=3)
    for failed in (huge, turns):
        assert failed["error"]["type"] == "E_CONTEXT"
        assert f"more than {2 * CONTEXT} tokens, and the context holds {CONTEXT}" in failed["error"]["message"]
        assert "--truncate left" in failed["error"]["fix"]
    whole = records(run_cli([*options, "--format", "jsonl"], files=jsonl([ROWS[0], ROWS[2]])))
    assert [first["token_ids"], last["token_ids"]] == [record["token_ids"] for record in whole]
    cut = records(run_cli([*options, "--format", "jsonl", "--truncate", "left"], files=jsonl(rows)))
    assert [record["error"] for record in cut] == [None] * 4


def test_fail_and_fail_fast_refuse_the_run_before_weights_are_read(
    run_cli: RunCli, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Engine, "__init__", refuse)
    for flags in (["--truncate", "fail"], ["--fail-fast"], ["--only", "long"]):
        outcome = run_cli([*options, *flags, "-o", "out.jsonl"], files=jsonl(ROWS)).ended(2)
        assert "Error: line 2: the prompt has 150 tokens" in outcome.err
        assert not Path("out.jsonl").exists()
    for text in ([], ["--format", "jsonl"]):
        assert run_cli(["-p", LONG, *options[1:-1], *text]).code == 2


@pytest.mark.parametrize(("side", "kept"), [("left", LONG[-58:]), ("right", LONG[:58])])
def test_a_prompt_is_cut_so_far_that_its_answer_has_room(
    side: str, kept: str, run_cli: RunCli, options: list[str]
) -> None:
    """The text is that of what is left, and the record says what is not."""
    command = [*options, "--format", "jsonl", "--seed", "1"]
    outcome = run_cli([*command, "--truncate", side], files=jsonl(ROWS))
    first, cut, _ = records(outcome)
    assert first["truncated"] is None
    assert cut["truncated"] == {"side": side, "dropped_tokens": 150 - 58}
    assert (cut["usage"]["prompt_tokens"], cut["usage"]["total_tokens"]) == (58, CONTEXT)
    assert cut["prompt"] == LONG
    (alone,) = records(run_cli(command, files=jsonl([{"id": "long", "prompt": kept}])))
    assert cut["token_ids"] == alone["token_ids"]
    where = "beginning" if side == "left" else "end"
    assert f"line 2: 92 tokens dropped from the {where} of its prompt" in outcome.err


@pytest.mark.parametrize("format_name", ["specbench", "openai-batch"])
def test_other_formats_say_so_too(format_name: str, run_cli: RunCli, options: list[str]) -> None:
    found = records(run_cli([*options, "--format", format_name, "--truncate", "left"], files=jsonl(ROWS)))
    assert [line.get("truncated") for line in found] == [None, {"side": "left", "dropped_tokens": 92}, None]


def test_what_did_not_fit_is_run_again_cut_and_other_cuts_are_not_mixed(run_cli: RunCli, options: list[str]) -> None:
    command = [*options, "-o", "out.jsonl"]
    assert run_cli(command, files=jsonl(ROWS)).code == 3
    refused = run_cli([*command, "--resume"], files=jsonl(ROWS))
    assert refused.code == 2  # what is left does not fit: no model is loaded to say it again
    assert run_cli([*command, "--resume", "--truncate", "left"], files=jsonl(ROWS)).code == 0
    found = written()
    assert [record["id"] for record in found] == ["first", "long", "last"]
    assert found[1]["truncated"]["side"] == "left"
    mixed = run_cli([*command, "--resume", "--truncate", "right"], files=jsonl(ROWS)).ended(2)
    assert "has prompts cut by --truncate left" in mixed.err


def request(row: dict[str, Any], most: int = 6) -> Request:
    parsed = parse_row(row, "line 1")
    return Request(
        row=parsed, ids=encode(parsed, ()), sampling=SamplingSettings(), max_new_tokens=most, seed=0, stop=()
    )


def encode(row: PromptRow, answers: tuple[Message, ...]) -> list[int]:
    """A template that takes four tokens a message."""
    texts = [*(str(message["content"]) for message in row.messages), *row.follow_ups[: len(answers)]]
    return TOKENIZER.encode("".join(f"<{text}>" for text in texts)) + [0] * (2 * len(texts) + len(answers))


ENCODE: EncodeTurn = encode


def test_the_longest_message_is_cut_and_all_others_stay() -> None:
    asked = request({"messages": [{"role": "system", "content": "s" * 40}, {"role": "user", "content": "u" * 39}]})
    (found,) = fit([asked], "left", ENCODE, TOKENIZER, CONTEXT)
    assert [len(message["content"]) for message in found.row.messages] == [40, 10]
    (turns,) = fit([request({"turns": ["first", "s" * 90], "id": 1})], "right", ENCODE, TOKENIZER, CONTEXT)
    assert turns.row.messages[0]["content"] == "first"
    assert set(turns.row.follow_ups[0]) == {"s"}
    assert question_tokens(turns, ENCODE) + 2 * 6 <= CONTEXT


@pytest.mark.parametrize(("side", "kept"), [("left", range(42, 100)), ("right", range(58))])
def test_a_prompt_of_token_ids_is_cut_on_the_side_that_is_said(side: str, kept: range) -> None:
    ids = tuple(range(100))
    asked = replace(request({"prompt": "a"}), ids=list(ids))
    asked = replace(asked, row=replace(asked.row, messages=(), token_ids=ids))
    (found,) = fit([asked], side, lambda row, _: list(row.token_ids), TOKENIZER, CONTEXT)
    assert found.row.token_ids == tuple(kept)
    assert found.truncated.dropped_tokens == 42


def test_where_one_message_is_not_enough_the_row_fails() -> None:
    asked = request({"messages": [{"role": "system", "content": "s" * 70}, {"role": "user", "content": "u"}]})
    (found,) = fit([asked], "left", ENCODE, TOKENIZER, CONTEXT)
    assert found.fault.code == "E_CONTEXT"


@given(
    text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=150),
    side=st.sampled_from(["left", "right"]),
    most=st.sampled_from([-1, 1, 6, 40, 500]),
)
def test_whatever_the_text_what_is_left_is_a_part_of_it_and_fits(text: str, side: str, most: int) -> None:
    """Also where a character is several tokens; answers take what they want, half of the context at most."""
    asked = request({"prompt": text}, most)
    (found,) = fit([asked], side, ENCODE, TOKENIZER, CONTEXT)
    left = str(found.row.messages[0]["content"])
    largest_tree = CONTEXT // 2 if most < 0 else min(most, CONTEXT // 2)
    assert text.endswith(left) if side == "left" else text.startswith(left)
    assert len(found.ids) + largest_tree <= CONTEXT
    assert found.fault is None
    dropped = len(asked.ids) - len(found.ids)
    if len(asked.ids) + largest_tree <= CONTEXT:
        assert (left, found.truncated) == (text, None)
    else:
        assert found.truncated.dropped_tokens == dropped > 0
        assert len(found.ids) + largest_tree > CONTEXT - 4  # no more than a character too much
