"""Conversations: what is reused changes no token, and what fails loses nothing."""

import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec import EdgespecError, Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.chat.chat_template import Message, plain_ids
from edgespec.chat.conversation import Conversation
from edgespec.chat.session_file import read_session
from edgespec.model.causal_model import CausalModel
from edgespec.model.layer_major import Watch
from edgespec.model.pass_rows import next_rows
from edgespec.model.target import Target
from edgespec.text.results import GenerationResult
from tests.support.families import FAMILIES, VOCAB, make_model, make_tokenizer

GREEDY = SamplingSettings()
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NODES = 12
# Whose draft grows in every step: beside looked up text, the clock may leave it out
DRAFTED = TreeSettings(size=NODES, lookup=False)
KINDS = {
    "tree": (DRAFTED, None),
    "tree-streamed": (DRAFTED, 0),
    "looked-up-tree": (TreeSettings(size=NODES), None),
    "sampled-tree-streamed": (TreeSettings(policy="dyspec", size=NODES), 1),
    "chain": (TreeSettings(policy="chain", draft_tokens=3), None),
    "none-streamed": (TreeSettings(policy="none"), 0),
    "target-initialised": (TreeSettings(policy="mcsd", branching=(2, 2), target_width=2), None),
}
CONTEXT = 240
ANSWER_TOKENS = 6
OpenEngine = Callable[[str], Engine]


@pytest.fixture(scope="module")
def open_engine() -> Iterator[OpenEngine]:
    """An engine of each kind on the built-in pair, loaded once: what it writes depends on what it has read."""
    engines: dict[str, Engine] = {}

    def open_kind(kind: str) -> Engine:
        if kind not in engines:
            tree, resident = KINDS[kind]
            engines[kind] = Engine.from_pretrained(
                tree=tree,
                dtype="float32",
                context_tokens=CONTEXT,
                limits=MemoryLimits(max_resident_layers=resident),
                self_check=False,
            )
        return engines[kind]

    yield open_kind
    for engine in engines.values():
        engine.close()


def assert_as_fresh(conversation: Conversation, engine: Engine) -> None:
    """The last answer is that of an engine that has read nothing before."""
    prompt = conversation.prompt_ids(conversation.messages[:-1])
    fresh = engine.generate(prompt, max_new_tokens=len(conversation.last.token_ids), sampling=GREEDY)
    assert fresh.cached_tokens == 0
    assert fresh.token_ids == conversation.last.token_ids


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def some_turns(engine: Engine) -> list[GenerationResult]:
    """Turns of every kind; what each found cached is counted, and its tokens compared with a fresh start."""
    engine.forget()
    chat = engine.chat(sampling=GREEDY, max_new_tokens=ANSWER_TOKENS)
    results: list[GenerationResult] = []
    prompts: list[list[int]] = []

    def note() -> None:
        assert chat.last is not None
        results.append(chat.last)
        prompts.append(chat.prompt_ids(chat.messages[:-1]))

    for said in ("def main(", "import os", "x = 1\ny = 2"):
        chat.send(said)
        note()
    chat.undo()
    chat.send("other words")
    note()
    list(chat.regenerate())
    note()
    list(chat.edit("other options"))
    note()
    chat.options["max_new_tokens"] = 2 * (1 + NODES) + 1  # more than two steps yield, whatever is drawn
    stream = chat.stream("print")
    list(itertools.islice(stream, 2))
    stream.close()
    chat.options["max_new_tokens"] = ANSWER_TOKENS
    assert chat.messages[-1].is_interrupted
    note()
    chat.send("go on")
    note()
    chat.system = "be brief"
    chat.send("after another system's message")
    note()
    assert chat.clear() == 6
    chat.send("def main(")
    note()
    held: list[int] = []  # all that was read and written has rows, but for the last token
    for result, prompt, before in zip(results, prompts, [[], *prompts], strict=False):
        cleared, must_read = prompt is prompts[-1], len(prompt) - (prompt != before)
        assert result.cached_tokens == (0 if cleared else min(num_common(held, prompt), must_read))
        held = [*prompt, *result.token_ids[:-1]]
        fresh = engine.generate(prompt, max_new_tokens=len(result.token_ids), sampling=GREEDY)
        assert (fresh.token_ids, fresh.cached_tokens) == (result.token_ids, 0)
        if engine.tree == DRAFTED and result.finish_reason != "interrupted":
            # The draft goes on as it would have started, too: chosen children, so the same trees.
            assert [len(step.tokens) for step in result.steps] == [len(step.tokens) for step in fresh.steps]
    return results


@pytest.mark.parametrize("kind", list(KINDS))
def test_reuse_changes_no_token_and_reads_only_what_is_new(kind: str, open_engine: OpenEngine) -> None:
    """Lossy trees among them: at temperature 0 they have one branch, and the target's own text."""
    results = some_turns(open_engine(kind))
    for last, result in itertools.pairwise(results[:3]):
        assert result.cached_tokens == last.usage.total_tokens - 1
    assert len({result.text for result in results}) >= 4


def test_reuse_under_a_chat_template(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("tree-streamed")
    monkeypatch.setattr(engine.pair.tokenizer, "chat_template", TEMPLATE)
    some_turns(engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("resident", [None, 0], ids=["resident", "streamed"])
def test_reuse_on_a_gpu(resident: int | None) -> None:
    with Engine.from_pretrained(
        tree=DRAFTED,
        device="cuda",
        dtype="float32",
        context_tokens=CONTEXT,
        limits=MemoryLimits(max_resident_layers=resident),
    ) as engine:
        some_turns(engine)
        abandon_everywhere(engine)


def test_a_turn_of_a_streamed_target_is_one_pass(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long new parts too, behind rows that are there already: every layer is read once."""
    engine = open_engine("tree-streamed")
    model = engine.target_model
    monkeypatch.setattr(model, "_chunk_rows", 16)
    monkeypatch.setattr(model, "layer_rows", 16)
    chat = engine.chat(sampling=GREEDY, max_new_tokens=4)
    chat.send("def")
    said = "one two three " * 16
    passes: list[tuple[int, int]] = []
    chat.send(said, on_prefill=lambda done, total: passes.append((done, total)))
    assert passes == sorted(passes)
    new = chat.last.prompt_tokens - chat.last.cached_tokens
    assert new > 40
    assert {total for _, total in passes} == {new}
    assert len(passes) == 8 * -(-new // 16)  # layers, and chunks of 16 rows
    assert_as_fresh(chat, engine)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_prompts_that_share_none_some_or_all(data: st.DataObject, open_engine: OpenEngine) -> None:
    """Any two prompts in turn: the second is decoded as if it were the first."""
    engine = open_engine(data.draw(st.sampled_from(["tree", "none-streamed"])))
    engine.forget()
    first = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=24))
    whole = [*first, *engine.generate(first, max_new_tokens=8, sampling=GREEDY, reuse=True).token_ids]
    shared = data.draw(st.integers(0, len(whole)))
    second = [*whole[:shared], *data.draw(st.lists(st.integers(0, 5), min_size=shared == 0, max_size=24))]
    reused = engine.generate(second, max_new_tokens=8, sampling=GREEDY, reuse=True)
    assert reused.cached_tokens == min(num_common(whole[:-1], second), len(second) - (second != first))
    assert engine.generate(second, max_new_tokens=8, sampling=GREEDY).token_ids == reused.token_ids


def test_rows_that_were_looked_at_are_no_text() -> None:
    """Text goes on behind text, whatever lies behind it: rows of a tree, of all layers or of some."""
    model = make_model(FAMILIES["llama"]())
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=torch.device("cpu"))
    cache = causal.new_text()
    text = torch.randint(VOCAB - 1, (30,), generator=torch.Generator().manual_seed(3))
    causal.read_text(cache, text[:20])
    causal.read([next_rows(cache, text[:3])])
    cache.layers[2].length = 20
    found = causal.read_text(cache, text[20:])
    torch.testing.assert_close(found, plain(input_ids=text[None]).logits[0, -1], rtol=1e-4, atol=2e-5)
    assert list(cache.ids) == text.tolist()


def test_the_draft_catches_up_after_turns_without_it(open_engine: OpenEngine) -> None:
    """Trees off and on again: both caches hold different texts, and each keeps what it can."""
    engine = open_engine("tree")
    tree = engine.tree
    chat = engine.chat(sampling=GREEDY, max_new_tokens=9)
    chat.send("def main(")
    engine.use_tree(tree.plain())
    chat.send("plainly")
    assert all(step.num_drafted == 0 for step in chat.last.steps)
    assert_as_fresh(chat, engine)
    engine.use_tree(TreeSettings(policy="chain", draft_tokens=2))
    chat.send("by chains")
    assert_as_fresh(chat, engine)
    engine.use_tree(tree)
    chat.send("by trees")
    assert any(step.num_drafted > 2 for step in chat.last.steps)
    assert_as_fresh(chat, engine)
    with pytest.raises(EdgespecError, match="room for 12"):
        engine.use_tree(TreeSettings(size=13))
    with pytest.raises(EdgespecError, match="room for 6"):
        engine.use_tree(TreeSettings(policy="opt-tree", size=12))
    assert engine.tree == tree


@pytest.mark.parametrize("kind", ["tree-streamed", "none-streamed"])
def test_cancelling_ends_after_the_pass_and_keeps_the_answer(kind: str, open_engine: OpenEngine) -> None:
    engine = open_engine(kind)
    chat = engine.chat(sampling=GREEDY, max_new_tokens=60)
    received = []
    for chunk in chat.stream("def main("):
        received += chunk.token_ids
        if len(received) >= 5:
            threading.Thread(target=engine.cancel).start()
            threading.Event().wait(0.05)
    assert chat.last.finish_reason == "interrupted"
    assert chat.messages[-1].is_interrupted
    assert chat.messages[-1].token_ids == tuple(received)
    assert len(received) < 30
    chat.options["max_new_tokens"] = 9
    chat.send("go on")
    assert chat.last.cached_tokens > len(received)
    assert_as_fresh(chat, engine)


@pytest.mark.parametrize("kind", ["tree-streamed", "none-streamed", "chain"])
def test_an_abandoned_pass_leaves_usable_caches(kind: str, open_engine: OpenEngine) -> None:
    """Left between any two layers, while the prompt is read or later, in the target or in the draft."""
    abandon_everywhere(open_engine(kind))


@contextmanager
def abandoning(engine: Engine, calls: Iterator[int], *, after: int) -> Iterator[None]:
    """Within this block, somebody asks for the end of the pass before the layer of that number."""

    def counted(self: CausalModel, watch: Watch | None) -> None:
        def count(share: float) -> None:
            if next(calls) == after:
                engine.cancel(abandon=True)
            watch(share)

        vars(self)["watch"] = count if watch else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CausalModel, "watch", property(lambda self: vars(self)["watch"], counted), raising=False)
        yield


def abandon_everywhere(engine: Engine) -> None:
    whole = engine.generate("def main(", max_new_tokens=12, sampling=GREEDY)
    for after in (1, 9, 30):
        chat = engine.chat(sampling=GREEDY, max_new_tokens=12)
        chat.send("hello")
        before = chat.messages
        with abandoning(engine, itertools.count(1), after=after):
            text = "".join(chunk.text for chunk in chat.stream("def main("))
        assert chat.last is not None
        if not chat.last.steps:
            assert chat.messages == before  # nothing was answered: it was never said
        elif chat.last.finish_reason == "interrupted":
            assert chat.messages[-1].content == text
        chat.send("again")
        assert_as_fresh(chat, engine)
    assert engine.generate("def main(", max_new_tokens=12, sampling=GREEDY).token_ids == whole.token_ids


def test_a_failing_read_keeps_the_answer_so_far(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("none-streamed")
    engine.forget()
    chat = engine.chat(sampling=GREEDY, max_new_tokens=9)
    read, reads = Target.read, itertools.count(1)

    def fail_fourth(self: Target, parts: object) -> object:
        if next(reads) == 4:  # the prompt's pass is the first
            raise EdgespecError("E_READ_FAILED", "reading failed.", "Restore the file.")
        return read(self, parts)

    monkeypatch.setattr(Target, "read", fail_fourth)
    with pytest.raises(EdgespecError, match="reading failed"):
        chat.send("def main(")
    assert (len(chat.messages[-1].token_ids), chat.messages[-1].is_interrupted) == (3, True)
    chat.send("again")
    assert_as_fresh(chat, engine)


def test_two_hundred_turns_until_the_context_is_full() -> None:
    """Then a turn is refused with numbers, nothing is lost, and there is a way back."""
    with Engine.from_pretrained(
        tree=TreeSettings(policy="none"), dtype="float32", context_tokens=700, self_check=False
    ) as engine:
        chat = engine.chat(sampling=GREEDY, max_new_tokens=1)
        while chat.num_tokens + 2 < 700:
            chat.send("x")
            assert chat.last.prompt_tokens - chat.last.cached_tokens <= 4
        before = chat.messages
        assert chat.num_turns >= 200
        with pytest.raises(EdgespecError) as caught:
            chat.send("x")
        assert caught.value.code == "E_CONTEXT"
        assert f"would have {chat.num_tokens + 2} tokens" in caught.value.what
        assert f"({chat.num_tokens} without it)" in caught.value.what
        assert "holds 700" in caught.value.what
        assert chat.messages == before
        with pytest.raises(EdgespecError, match="conversation would have"):
            chat.edit("abc " * 800)
        assert chat.messages == before
        assert_as_fresh(chat, engine)
        chat.undo()
        chat.undo()
        chat.send("y")
        assert_as_fresh(chat, engine)
        assert chat.clear() >= 199


def test_a_conversation_goes_on_without_its_oldest_turns_as_one_that_never_had_them(open_engine: OpenEngine) -> None:
    engine = open_engine("tree")
    chat = engine.chat(system="# a file", sampling=GREEDY, max_new_tokens=4)
    for text in ("def main(", "import os", "x = ", "y = "):
        chat.send(text * (CONTEXT // 90))
    before = chat.messages
    dropped = chat.compact()
    assert dropped
    assert dropped + chat.messages == before
    assert chat.messages[0].role == "user"
    assert 2 * chat.num_tokens <= CONTEXT or chat.num_turns == 1
    assert (chat.system, chat.num_turns) == ("# a file", 4 - len(dropped) // 2)
    chat.send("z = ")
    assert_as_fresh(chat, engine)


def test_an_answer_that_fills_the_context_says_so(open_engine: OpenEngine) -> None:
    chat = open_engine("tree").chat(temperature=1.0, seed=3)
    result = chat.send("def main(")
    assert result.finish_reason in {"context", "stop"}
    if result.finish_reason == "context":
        assert result.usage.total_tokens == CONTEXT
        with pytest.raises(EdgespecError, match=f"context holds {CONTEXT}"):
            chat.send("x")


def test_seeds_repeat_and_regenerating_draws_anew(open_engine: OpenEngine) -> None:
    engine = open_engine("tree")

    def answers() -> list[str]:
        chat = engine.chat(temperature=1.0, seed=11, max_new_tokens=12)
        chat.send("def")
        first = chat.messages[-1].content
        list(chat.regenerate())
        second = chat.messages[-1].content
        list(chat.regenerate())
        return [first, second, chat.messages[-1].content]

    assert answers() == answers()
    assert len(set(answers())) == 3


def test_plain_texts_are_joined_by_tokens() -> None:
    tokenizer = make_tokenizer()
    messages = [
        Message(role="user", content="ab"),
        Message(role="assistant", content="c", token_ids=(7, 8)),
        Message(role="user", content="d"),
        Message(role="assistant", content="e\n"),
        Message(role="user", content="f"),
    ]
    ids = plain_ids(tokenizer, messages)
    assert ids == [
        *tokenizer.encode("ab"),
        7,
        8,
        *tokenizer.encode("\nd"),
        *tokenizer.encode("e\n"),
        *tokenizer.encode("f"),
    ]


def test_a_saved_session_goes_on_with_the_same_tokens(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine("tree")
    chat = engine.chat(system="s", sampling=GREEDY, max_new_tokens=9)
    chat.send("def main(")
    chat.send("import os")
    path = tmp_path / "new folder" / "a.json"
    chat.save(path, settings={"seed": 1}, stats={"turns": 2})
    with pytest.raises(EdgespecError, match="exists"):
        chat.save(path)
    chat.save(path, overwrite=True, settings={"seed": 2})
    other = engine.chat(sampling=GREEDY, max_new_tokens=9)
    session = other.load(path)
    assert (other.messages, other.system, session.settings) == (chat.messages, "s", {"seed": 2})
    assert chat.send("go on").token_ids == other.send("go on").token_ids
    chat.save(tmp_path / "a.md")
    assert "## user\n\ngo on" in (tmp_path / "a.md").read_text()
    document = json.loads(path.read_text())
    assert document["schema"] == "edgespec.session/1"
    assert [message["role"] for message in document["messages"]] == ["user", "assistant"] * 2
    # A text can be spelled with other tokens than it is encoded with: those that were written count.
    tokenizer = engine.pair.tokenizer
    spelled = tuple(tokenizer.convert_tokens_to_ids(list("def")))
    assert list(spelled) != tokenizer.encode("def")
    chat.messages = (Message(role="user", content="x"), Message(role="assistant", content="def", token_ids=spelled))
    chat.save(tmp_path / "spelled.json")
    other.load(tmp_path / "spelled.json")
    assert other.messages == chat.messages
    # An answer edited by hand is read as it is written there.
    document["messages"][1]["content"] = "edited"
    path.write_text(json.dumps(document))
    other.load(path)
    assert other.messages[1].token_ids == ()


def test_a_session_that_cannot_be_written_or_found_says_so(open_engine: OpenEngine, tmp_path: Path) -> None:
    chat = open_engine("tree").chat()
    (tmp_path / "file").write_text("x")
    for path, code in ((tmp_path, "E_OUTPUT"), (tmp_path / "file/below", "E_OUTPUT")):
        with pytest.raises(EdgespecError) as caught:
            chat.save(path)
        assert caught.value.code == code
    for path, code in (
        (tmp_path / "no", "E_FILE_NOT_FOUND"),
        (tmp_path, "E_FILE_NOT_FOUND"),
        (tmp_path / "file", "E_SESSION"),
    ):
        with pytest.raises(EdgespecError) as caught:
            chat.load(path)
        assert caught.value.code == code
    with pytest.raises(EdgespecError, match="nothing was said"):
        chat.undo()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "x"]) | JSON, "content": JSON}
)
SESSION = st.fixed_dictionaries(
    {},
    optional={
        "schema": st.just("edgespec.session/1") | JSON,
        "messages": st.lists(MESSAGE | JSON, max_size=3) | JSON,
        "token_ids": st.lists(st.lists(st.integers(-1, 300), max_size=3) | JSON, max_size=3) | JSON,
        "interrupted": st.lists(st.integers(-1, 3), max_size=3) | JSON,
        "system": JSON,
        "model": JSON,
        "settings": JSON,
        "stats": JSON,
    },
)


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=80)
    | SESSION.map(lambda value: json.dumps(value).encode())
    | JSON.map(lambda value: json.dumps(value).encode())
)
def test_no_file_brings_the_session_reader_down(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "session.json"
    path.write_bytes(content)
    tokenizer = _tokenizer()
    try:
        session = read_session(path, tokenizer)
    except EdgespecError:
        return
    assert plain_ids(tokenizer, session.messages) is not None
    json.loads(session.document())


_TOKENIZERS = []


def _tokenizer() -> object:
    if not _TOKENIZERS:
        _TOKENIZERS.append(make_tokenizer())
    return _TOKENIZERS[0]
