"""An engine's texts in company: each is what it is alone, in any order, for families of all kinds."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FalconConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows
from edgespec.text.request import TextRequest
from tests.support.families import FAMILIES, RECURRENT, SMALL, make_model, save_folder

NUM_TEXTS = 8
TREES = {
    "plain": TreeSettings(policy="none"),
    "adaptive": TreeSettings(size=9),
    "sequoia": TreeSettings(policy="sequoia", size=9, draw="coupled"),
}
# One family for each way in which texts lie side by side. Falcon computes its own attention: each of its layers reads
# one text after the other.
ATTENDING = (
    "llama", "qwen3-moe", "mistral-window", "mixtral", "gemma2", "gemma3", "gemma4", "gemma4-shared", "llama4", "opt",
)  # fmt: skip
READERS = {
    **{family: FAMILIES[family] for family in ATTENDING},
    **{family: RECURRENT[family] for family in ("lfm2", "qwen3-next", "falcon-h1", "mamba2")},
    "falcon": lambda: FalconConfig(**{**SMALL, "num_attention_heads": 4}, alibi=False),
}


def requests_of(engine: Engine, *, count: int = NUM_TEXTS) -> list[TextRequest]:
    """Texts of unequal prompts, lengths and sampling; the third and the fifth have one prompt."""
    found = []
    for number in range(count):
        rng = random.Random(2 if number == 4 else number)
        prompt = [rng.randrange(256) for _ in range(rng.randint(3, 40))]
        sampling = {"temperature": (0.0, 0.8, 1.0)[number % 3], "top_p": (1.0, 0.9)[number % 2]}
        found.append(
            engine.request(prompt, max_new_tokens=rng.randint(4, 12), seed=7, name=f"row {number}", **sampling)
        )
    return found


def tokens_of(engine: Engine, requests: list[TextRequest], *, most: int, order: list[int]) -> list[tuple[int, ...]]:
    engine._texts.num_texts = most
    found: dict[int, tuple[int, ...]] = {}
    for place, result in engine.generate_many([requests[number] for number in order]):
        assert not isinstance(result, Exception)
        found[order[place]] = result.token_ids
    return [found[number] for number in range(len(requests))]


@pytest.mark.parametrize(
    ("family", "streams"),
    [(family, True) for family in READERS]
    + [(family, False) for family in ("llama", "gemma3", "mixtral", "qwen3-next", "falcon")],
)
def test_a_text_does_not_depend_on_its_company(family: str, streams: bool, draft: Path, tmp_path: Path) -> None:
    target = save_folder(tmp_path / "target", make_model(READERS[family]()))
    limits = MemoryLimits(max_resident_layers=0) if streams else None
    with Engine.from_pretrained(
        target, draft=draft, limits=limits, context_tokens=64, parallel=NUM_TEXTS, tree=TREES["adaptive"]
    ) as engine:
        requests = requests_of(engine)
        order = list(range(NUM_TEXTS))
        engine.use_tree(TREES["plain"])
        expected = tokens_of(engine, requests, most=1, order=order)
        assert len(set(expected)) > NUM_TEXTS // 2
        # Plain texts, and trees of a dynamic and of a static shape: families have these in turn where layers stream.
        in_turn = ("adaptive", "sequoia")[list(READERS).index(family) % 2]
        for name, most in (
            [("plain", 8), (in_turn, 8)] if streams else [("adaptive", 3), ("adaptive", 8), ("sequoia", 8)]
        ):
            engine.use_tree(TREES[name])
            random.Random(most).shuffle(order)
            assert tokens_of(engine, requests, most=most, order=order) == expected


def test_texts_with_trees_that_tune_themselves_are_those_alone() -> None:
    with Engine.from_pretrained(parallel=8) as engine:
        requests = requests_of(engine, count=8)
        order = list(range(8))
        assert tokens_of(engine, requests, most=8, order=order) == tokens_of(engine, requests, most=1, order=order)


def test_nothing_of_all_rows_and_all_keys_is_ever_made() -> None:
    """The largest tensor of a pass over eight texts is far smaller than a mask of all rows and all keys would be."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            nonlocal largest
            found = function(*arguments, **(named or {}))
            if isinstance(found, torch.Tensor) and found.device.type == "cpu" and found.dim():
                largest = max(largest, found.numel())
            return found

    model = CausalModel(make_model(FAMILIES["gemma3"]()), device=torch.device("cpu"))
    texts = [model.new_text() for _ in range(8)]
    for number, text in enumerate(texts):
        model.read_text(text, (torch.arange(200) + number) % 256)
    rows, keys = 60, 260
    visible = torch.ones(rows, rows, dtype=torch.bool).tril()
    parts = [
        PassRows(cache=text, ids=torch.arange(rows), positions=torch.arange(200, 200 + rows), visible=visible)
        for text in texts
    ]
    with Sizes():
        model.read(parts)
    assert 0 < largest < 8 * rows * 8 * keys / 3


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(parallel=4) as engine:
        yield engine


def test_a_prompt_is_read_once_for_all_samples_of_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    run = CausalModel._run

    def counted(self: CausalModel, parts: list[PassRows], chunks: object) -> object:
        if self is engine.target_model:
            rows.append(sum(part.count for part in parts))
        return run(self, parts, chunks)

    engine.use_tree(TreeSettings(policy="none"))
    prompt = list(range(5, 105))
    requests = [engine.request(prompt, max_new_tokens=6, temperature=1.0, seed=1, name=f"a#{n}") for n in range(4)]
    alone = [engine.submit(request).result().token_ids for request in requests]
    monkeypatch.setattr(CausalModel, "_run", counted)
    found = dict(engine.generate_many(requests))
    assert [found[number].token_ids for number in range(4)] == alone
    assert sum(rows) < 100 + 4 * 8
    assert len(set(alone)) > 1


def test_a_waiting_text_begins_when_another_has_ended(engine: Engine) -> None:
    most = 0
    handles = [engine.submit(request) for request in requests_of(engine, count=9)]
    while not all(handle.is_done for handle in handles):
        most = max(most, engine.advance())
    assert most == 4


def test_where_memory_runs_out_fewer_texts_are_under_way(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain passes of more than two texts do not fit: the others wait, and no text changes."""
    engine.use_tree(TreeSettings(policy="none"))
    requests = requests_of(engine, count=6)
    expected = [engine.submit(request).result().token_ids for request in requests]
    run = CausalModel._run

    def limited(self: CausalModel, parts: list[PassRows], chunks: object) -> object:
        if len(parts) > 2:
            raise MemoryError
        return run(self, parts, chunks)

    monkeypatch.setattr(CausalModel, "_run", limited)
    found = dict(engine.generate_many(requests))
    assert [found[number].token_ids for number in range(6)] == expected


def test_a_conversations_next_turn_starts_on_its_own_rows(engine: Engine) -> None:
    """Several conversations are under way; each keeps its rows, and none takes another's."""
    first = [engine.submit(request, reuse=True) for request in requests_of(engine, count=3)]
    texts = [[*handle.request.ids, *handle.result().token_ids] for handle in first]
    turns = [engine.request([*ids, 3, 4, 5], max_new_tokens=4, seed=1) for ids in texts]
    results = [handle.result() for handle in [engine.submit(turn, reuse=True) for turn in turns]]
    assert [result.cached_tokens for result in results] == [len(ids) - 1 for ids in texts]
    fresh = [engine.submit(turn).result() for turn in turns]
    assert [result.token_ids for result in results] == [result.token_ids for result in fresh]
