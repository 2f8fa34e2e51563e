"""An answer that was cut goes on as if it had not been: its tokens, its text and its messages are the whole one's."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import EdgespecError, Engine, SamplingSettings, TreeSettings
from edgespec.chat.chat_template import Message
from edgespec.chat.conversation import Conversation
from edgespec.chat.tools import read_tools
from edgespec.sampling.noise import generator_at, text_key
from tests.edgespec.chat.test_conversation import TEMPLATE
from tests.support.families import FAMILIES, RECURRENT, make_model, save_folder

SAID = ("def main(", "import os", "for name in sorted(")
WARM = SamplingSettings(temperature=0.9, top_p=0.95)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"sampling": WARM, "seed": 4},
    "penalised": {"sampling": SamplingSettings(presence_penalty=1.5, repetition_penalty=1.3, frequency_penalty=0.5)},
    "a form": {"temperature": 0.9, "seed": 2, "json_schema": SCHEMA},
    "a least length": {"temperature": 0.0, "min_new_tokens": 20},
    "its own end": {"temperature": 0.0, "stop": ["\n\n", "):"]},
}
TREES = [TreeSettings(size=8), TreeSettings(policy="none"), TreeSettings(policy="chain", draft_tokens=3, lookup=False)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(tree=TREES[0], dtype="float32", context_tokens=400, self_check=False) as found:
        yield found


def whole_of(engine: Engine, said: str, options: dict[str, Any], *, tokens: int = 28) -> Conversation:
    chat = engine.chat(max_new_tokens=tokens, **options)
    chat.send(said)
    return chat


def cut(chat: Conversation, said: str | None, pieces: int) -> str:
    """Ask, or go on, and stop after so many pieces; returns what was shown."""
    stream = chat.resume() if said is None else chat.stream(said)
    shown = "".join(chunk.text for chunk in itertools.islice(stream, pieces))
    stream.close()
    return shown


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.policy)
@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_on_as_if_it_had_not_been_cut(case: str, tree: TreeSettings, engine: Engine) -> None:
    options = CASES[case]
    engine.use_tree(tree)
    for said, counts in ((SAID[0], (1, 5)), (SAID[1], (2,))):
        whole = whole_of(engine, said, options)
        assert whole.last is not None
        for pieces in counts:
            engine.forget()
            chat = engine.chat(max_new_tokens=28, **options)
            shown = cut(chat, said, pieces)
            while chat.last is not None and chat.last.finish_reason == "interrupted":
                so_far = len(chat.messages[-1].token_ids)
                chat.options["max_new_tokens"] = 28 - so_far
                shown += cut(chat, None, 3)
                assert chat.last.cached_tokens == len(chat.prompt_ids(chat.messages[:1])) + so_far - 1
            assert chat.messages == whole.messages
            assert shown == whole.messages[-1].content
            assert chat.last.finish_reason == whole.last.finish_reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5", "falcon-h1"])
def test_every_family_goes_on_and_so_does_a_session_that_was_saved(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, make_model({**FAMILIES, **RECURRENT}[family]()))
    options: dict[str, Any] = {"context_tokens": 256, "self_check": False, "dtype": dtype, "tree": TREES[1]}
    with Engine.from_pretrained(folder, **options) as engine:
        engine.pair.tokenizer.chat_template = TEMPLATE
        whole = whole_of(engine, SAID[0], CASES["warm"])
        for keeps in (True, False):
            chat = engine.chat(max_new_tokens=28, **CASES["warm"])
            cut(chat, SAID[0], 9)
            (tmp_path / "session").unlink(missing_ok=True)
            chat.save(tmp_path / "session")
            if not keeps:
                engine.forget()
                chat = engine.chat(max_new_tokens=28, **CASES["warm"])
                chat.load(tmp_path / "session")
            chat.options["max_new_tokens"] = 19
            list(chat.resume())
            if keeps or dtype == "float32":  # in bf16 rows that are read at once may have other bits
                assert chat.messages == whole.messages
            assert chat.messages[-1].token_ids[:9] == whole.messages[-1].token_ids[:9]
            chat.send("and?")
            assert len(chat.messages) == 4


def test_a_character_that_was_cut_is_whole(engine: Engine) -> None:
    tokenizer = engine.pair.tokenizer
    ids = tokenizer.encode("s = 'h\u00e9\u20ac\U0001f600' # \u4e16\u754c", add_special_tokens=False)
    for count in range(1, len(ids)):
        chat = engine.chat(max_new_tokens=3, temperature=0.0)
        text = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        asked, begun = Message(role="user", content=SAID[0]), Message(role="assistant", content=text)
        chat.messages = (asked, Message(role="assistant", content=text, token_ids=tuple(ids[:count])))
        chunks = list(chat.resume())
        all_ids = list(chat.messages[-1].token_ids)
        assert all_ids[:count] == ids[:count]
        assert len(all_ids) == count + 3
        assert chat.messages[-1].content == tokenizer.decode(all_ids).rstrip("\ufffd")
        assert begun.content + "".join(chunk.text for chunk in chunks).rstrip("\ufffd") == chat.messages[-1].content


def test_a_bound_counts_anew_and_the_context_does_not(engine: Engine) -> None:
    whole = whole_of(engine, SAID[0], CASES["greedy"], tokens=18)
    chat = whole_of(engine, SAID[0], CASES["greedy"], tokens=6)
    assert chat.last.finish_reason == "length"
    for _ in range(2):
        list(chat.resume())
    assert chat.messages == whole.messages
    chat.options["max_new_tokens"] = -1
    list(chat.resume())
    assert chat.last.finish_reason == "context"
    before = chat.messages
    with pytest.raises(EdgespecError, match="the context holds 400"):
        chat.resume()
    assert chat.messages == before


def test_what_was_stopped_before_anything_came_is_as_it_was(engine: Engine) -> None:
    chat = engine.chat(max_new_tokens=28, temperature=0.0)
    cut(chat, SAID[0], 2)
    before = chat.messages
    chat.resume().close()
    assert chat.messages == before


def test_what_is_no_cut_answer_is_refused_by_name(engine: Engine) -> None:
    chat = engine.chat(max_new_tokens=8, temperature=0.0, stop=["\n"])
    with pytest.raises(EdgespecError, match="no answer to go on with"):
        chat.resume()
    chat.send(SAID[0])
    assert chat.last is not None
    if chat.last.finish_reason != "stop":
        chat.send("x = 1\n")
    assert chat.last.finish_reason == "stop"
    with pytest.raises(EdgespecError, match="is whole"):
        chat.resume()
    call = {"id": "a", "type": "function", "function": {"name": "rain", "arguments": "{}"}}
    for more, words in (({"tool_calls": [call]}, "calls tools"), ({"reasoning_content": "Hm."}, "no text")):
        chat.messages = (chat.messages[0], Message(role="assistant", content="", more=more))
        with pytest.raises(EdgespecError, match=words):
            chat.resume()


def test_with_tools_the_text_goes_on_and_a_call_behind_it_counts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of such answers keep no tokens: the text is read again."""
    monkeypatch.setattr(engine.pair.tokenizer, "chat_template", TEMPLATE)
    tool = {"type": "function", "function": {"name": "rain", "parameters": SCHEMA}}
    chat = engine.chat(max_new_tokens=12, temperature=0.0)
    chat.use_tools(read_tools([tool]))
    cut(chat, SAID[0], 2)
    text = chat.messages[-1].content
    prompt = chat.prompt_ids(chat.messages[:1])
    list(chat.resume())
    ids = [*prompt, *engine.pair.tokenizer.encode(text, add_special_tokens=False)]
    found = engine.generate(ids, max_new_tokens=12, temperature=0.0, skip_special_tokens=False)
    assert chat.messages[-1].content == text + found.text
    assert chat.last.text == found.text


def test_what_goes_on_draws_from_where_it_stands_and_not_what_its_beginning_has_drawn(engine: Engine) -> None:
    """Trees that are sampled, and rejection, have a generator in place of the noise of positions."""
    request = engine.request(SAID[0], max_new_tokens=6, sampling=WARM, seed=4)
    for count in range(3):
        handle = engine.submit(replace(request, begun=tuple(range(5, 5 + count))))
        handle.result()
        place = len(request.ids) + count
        own = generator_at(4, text_key(request.name), place, engine.device)
        assert handle.draws[0].initial_seed() == own.initial_seed()
