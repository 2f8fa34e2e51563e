"""Texts with looked up tokens in their trees are plain decoding's, alone and in company, with a draft or without."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.pair.pair import DEMO_FOLDER
from edgespec.text.request import TextRequest
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.lookup_choice import LookupChoice
from tests.edgespec.text.test_processed import alone, together
from tests.support.families import RECURRENT, make_model, save_folder

PLAIN = TreeSettings(policy="none")
TREES = {"lookup alone": TreeSettings(policy="lookup", size=12), "with a draft": TreeSettings(size=12)}
CLASS = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"
COPIED = CLASS + "        return self.items.pop()\n\n\n" + CLASS


def requests_of(engine: Engine) -> list[TextRequest]:
    """A copy at every temperature, another text, and one that a stop string ends."""
    found = [
        engine.request(COPIED, max_new_tokens=10, seed=7, name=f"copy {temperature}", temperature=temperature)
        for temperature in (0.0, 0.6, 1.0)
    ]
    return [
        *found,
        engine.request("x = [", max_new_tokens=8, seed=7, name="other", temperature=0.6),
        engine.request(COPIED, max_new_tokens=10, temperature=0.0, stop="pop("),
    ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.from_pretrained(dtype=request.param, context_tokens=256, parallel=4, tree=TreeSettings(size=12)) as one:
        yield one


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[tuple[int, ...]]:
    return alone(engine, requests_of(engine), PLAIN)


@pytest.mark.parametrize("name", [*TREES, "with a draft in every step"])
def test_a_text_is_plain_decodings_alone_and_in_company(
    engine: Engine, plain: list[tuple[int, ...]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in TREES:
        monkeypatch.setattr(DraftWorth, "is_known", False)
        name = "with a draft"
    assert alone(engine, requests_of(engine), TREES[name]) == plain
    assert together(engine, requests_of(engine), TREES[name]) == plain


def test_a_copy_is_read_many_tokens_a_pass_and_says_where_they_came_from(engine: Engine) -> None:
    engine.use_tree(TREES["lookup alone"])
    result = engine.submit(requests_of(engine)[0]).result()
    assert (result.tokens_per_pass or 0) > 1.5
    for step in result.passes:
        assert step.from_lookup == step.from_draft  # there is no draft
        assert step.num_looked_up == len(step.path)
    engine.use_tree(TreeSettings(size=12, lookup=False))
    assert sum(step.num_looked_up for step in engine.submit(requests_of(engine)[0]).result().steps) == 0


def test_a_draft_has_read_or_is_to_read_the_text_whether_it_had_a_part_in_a_step_or_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = itertools.cycle([True, True, False, False, False])
    monkeypatch.setattr(LookupChoice, "_needs_draft", lambda _choice, _looked_up: next(turns))
    engine.use_tree(TREES["with a draft"])
    request = engine.request(COPIED, max_new_tokens=40, temperature=0.0)
    handle = engine.submit(request)
    num_kept = 0  # tokens of paths whose rows stay
    for piece in handle:
        if handle.sequence is None or piece.finish_reason is not None:
            break
        drafter = handle.sequence.drafter
        assert isinstance(drafter, LanguageModelDrafter)
        assert [*drafter.cache.ids, *drafter._pending] == [*request.ids, *handle.added][:-1]
        if handle.sequence.has_drafted:
            num_kept += len(piece.step.path) - drafter.num_pending
        elif not piece.step.is_prefill:
            assert drafter.num_pending > len(piece.step.path)
    assert num_kept > 0


def test_a_text_that_begins_again_looks_up_what_it_has_and_nothing_else(engine: Engine) -> None:
    """A step that is torn in its middle may have added tokens that the text does not have."""
    engine.use_tree(TREES["lookup alone"])
    request = requests_of(engine)[0]
    expected = engine.submit(request).result().token_ids
    handle = engine.submit(request)
    pieces = iter(handle)
    next(pieces), next(pieces)
    handle.sequence.add((1, 2, 3))  # of no text
    engine._texts._is_torn = True
    next(pieces)
    lookup = handle.sequence.lookup.lookup
    lookup.candidates(1, depth=1, least=1.0)  # which reads what was added
    assert lookup._sources[0].automaton.num_tokens == len(request.ids) + len(handle.added)
    assert handle.result().token_ids == expected


@pytest.mark.parametrize("family", ["lfm2", "mamba2"])
def test_recurrent_targets_without_a_draft_copy_too(family: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, make_model(RECURRENT[family]()))
    prompt = [7 * number % 256 for number in range(25)] * 3
    with Engine.from_pretrained(folder, context_tokens=256, tree=TreeSettings(size=9)) as engine:
        assert engine.tree.policy == "lookup"
        texts = []
        for tree in (None, PLAIN):
            engine.use_tree(tree)
            texts.append([engine.generate(prompt, max_new_tokens=24, seed=3, temperature=t).token_ids for t in (0, 1)])
        assert texts[0] == texts[1]


def test_a_target_without_a_draft_grows_as_many_looked_up_nodes_as_pay() -> None:
    with Engine.from_pretrained(DEMO_FOLDER / "target", context_tokens=256, dtype=torch.float32) as engine:
        assert engine.is_tuned
        engine.generate(COPIED, max_new_tokens=8, temperature=0)  # first steps load kernels, and trees seem dear
        result = engine.generate(COPIED, max_new_tokens=96, temperature=0)
        engine.use_tree(PLAIN)
        assert engine.generate(COPIED, max_new_tokens=96, temperature=0).token_ids == result.token_ids
    assert sum(step.num_looked_up for step in result.steps) > 5


def test_turns_quote_earlier_ones_and_sampled_children_take_nothing_from_text(engine: Engine) -> None:
    engine.use_tree(TREES["lookup alone"])
    chat = engine.chat(temperature=0, max_new_tokens=12)
    chat.send(CLASS)
    answer = chat.send(CLASS)
    assert sum(step.num_drafted for step in answer.steps) > 0
    engine.use_tree(TreeSettings(policy="dyspec", size=12))
    result = engine.generate(COPIED, max_new_tokens=16, temperature=0.8, seed=1)
    assert sum(step.num_looked_up for step in result.steps) == 0
