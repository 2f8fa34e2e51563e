"""Recurrent layers under trees: nodes continue their parents' states, and what was cut or dropped leaves no trace.

The reference is the same transformers model on each root-to-node path, without a cache.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.model.causal_model import CausalModel
from edgespec.model.recurrent_forms import Convolution, DeltaRule, Mamba2
from edgespec.model.state_cache import OPEN_ROWS, StateCache, StateRows
from edgespec.model.target import Target
from edgespec.model.text_cache import causal_mask
from edgespec.tree.token_tree import TokenTree
from tests.conftest import RECURRENT, VOCAB, make_model
from tests.edgespec.model.test_families import path_logits, path_of, random_tree

CPU = torch.device("cpu")
KINDS = ["lfm2", "qwen3-next", "mamba2", "falcon-h1"]  # a short convolution, delta rule, Mamba 2, attention beside it


class CutError(Exception):
    """Ends a pass from within."""


class Reader:
    """A target, and plain forwards over the text that it holds."""

    def __init__(self, model: PreTrainedModel, causal: CausalModel, seed: int) -> None:
        self.plain, self.causal = model, causal
        self.target = Target(causal)
        self.generator = torch.Generator().manual_seed(seed)
        self.text: list[int] = []

    def tokens(self, count: int) -> list[int]:
        return torch.randint(VOCAB - 1, (count,), generator=self.generator).tolist()

    def read_prompt(self, count: int) -> None:
        self.text = self.tokens(count)
        assert_same(self.target.prefill(torch.tensor(self.text)), self.plain_logits())

    def plain_logits(self) -> Tensor:
        return self.plain(input_ids=torch.tensor([self.text]), use_cache=False).logits[0, -1]

    def tree(self, nodes: int = 17) -> TokenTree:
        return random_tree(self.tokens(1)[0], self.generator, nodes=nodes)

    def check(self, tree: TokenTree, hidden: Tensor) -> None:
        assert_same(self.target.logits(hidden), path_logits(self.plain, self.text, tree))

    def commit(self, tree: TokenTree, node: int) -> None:
        """Accept the path to `node`."""
        path = path_of(tree, node)
        self.target.commit(tuple(path[1:]))
        self.text += [int(tree.tokens[node]) for node in path]

    def look(self, node: int | None, *, nodes: int = 17) -> None:
        """Read a tree, check it, and accept the path to a node: the deepest, unless told."""
        tree = self.tree(nodes)
        self.check(tree, self.target.look(tree))
        deepest = max(range(tree.num_nodes), key=lambda node: len(path_of(tree, node)))
        self.commit(tree, deepest if node is None else node)

    def cut(self, make: Callable[[], object], share: float) -> None:
        """Begin a pass, and end it after this share of its layers."""

        def watch(done: float) -> None:
            if done >= share:
                raise CutError

        self.causal.watch = watch
        with pytest.raises(CutError):
            make()
        self.causal.watch = None


def assert_same(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < 3e-5, error


def readers(family: str, count: int = 1, *, chunk_rows: int = 512) -> list[Reader]:
    model = make_model(RECURRENT[family]())
    causal = CausalModel(copy.deepcopy(model), device=CPU, chunk_rows=chunk_rows)
    return [Reader(model, causal, seed) for seed in range(count)]


@pytest.mark.parametrize("chunk_rows", [512, 7])
@pytest.mark.parametrize("family", RECURRENT)
def test_trees_are_paths_over_commits_of_all_lengths(family: str, chunk_rows: int) -> None:
    (reader,) = readers(family, chunk_rows=chunk_rows)
    reader.read_prompt(3 * OPEN_ROWS + 5)
    for node in (None, 0, 0, None, 3, 0, None):  # the root alone again and again: nothing was accepted
        reader.look(node)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("count", [1, 2, OPEN_ROWS, OPEN_ROWS + 1, 2 * OPEN_ROWS, 2 * OPEN_ROWS + 1, 100])
def test_prompts_of_any_length_are_read(family: str, count: int) -> None:
    (reader,) = readers(family, chunk_rows=40)
    reader.read_prompt(count)
    reader.look(None)
    reader.look(0)


@pytest.mark.parametrize("family", KINDS)
def test_a_prompt_may_be_read_in_several_passes(family: str) -> None:
    (reader,) = readers(family)
    reader.text = reader.tokens(90)
    reader.target.begin(reader.text)
    for count in (1, 50, 2, 33, 4):
        (hidden,) = reader.target.read([reader.target.text_rows(count)])
        reader.target.took_in(count)
    assert_same(reader.target.logits(hidden[-1:])[0], reader.plain_logits())
    reader.look(None)


@pytest.mark.parametrize("family", KINDS)
def test_large_trees_and_long_paths_are_read(family: str) -> None:
    """A draft that has learnt the text has most of a deep tree accepted."""
    (reader,) = readers(family, chunk_rows=24)
    reader.read_prompt(20)
    for _ in range(3):
        tree = reader.tree(60)
        near = [-1] + [max(0, node - 1 - node % 3) for node in range(1, 60)]
        tree = TokenTree(**{**vars_of(tree), "parents": torch.tensor(near)})
        reader.check(tree, reader.target.look(tree))
        reader.commit(tree, 59)
    assert len(reader.text) > 20 + 3 * 20


def vars_of(tree: TokenTree) -> dict[str, Any]:
    names = ("tokens", "parents", "ranks", "draw", "draft_rows")
    return {name: getattr(tree, name) for name in names}


@pytest.mark.parametrize("share", [0.1, 0.5])  # before the second layer, and before the last
@pytest.mark.parametrize("family", KINDS)
def test_a_pass_that_is_cut_and_made_again_counts_once(family: str, share: float) -> None:
    (reader,) = readers(family)
    reader.text = reader.tokens(60)
    reader.target.begin(reader.text)
    reader.target.read([reader.target.text_rows(50)])  # whole, and not taken in
    reader.cut(lambda: reader.target.prefill(torch.tensor(reader.text)), share)
    assert_same(reader.target.prefill(torch.tensor(reader.text)), reader.plain_logits())
    reader.look(None)
    for _ in range(2):
        tree = reader.tree()
        reader.cut(lambda tree=tree: reader.target.look(tree), share)  # type: ignore[misc]
        reader.look(None)
        reader.target.look(reader.tree())  # whole, and not accepted
        reader.look(0)


@pytest.mark.parametrize("form", [DeltaRule, Mamba2])
def test_a_pass_may_end_between_the_functions_of_a_mixer(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (reader,) = readers("qwen3-next" if form is DeltaRule else "mamba2")
    reader.read_prompt(40)
    reader.look(None)

    def fail(*_: Any) -> None:
        raise CutError

    with monkeypatch.context() as patch:
        patch.setattr(form, "beside", fail)
        with pytest.raises(CutError):
            reader.target.look(reader.tree())
    reader.look(None)


@pytest.mark.parametrize("chunk_rows", [512, 24])
@pytest.mark.parametrize("family", RECURRENT)
def test_texts_share_passes_each_with_its_own_state(family: str, chunk_rows: int) -> None:
    one, other, late = readers(family, 3, chunk_rows=chunk_rows)
    one.read_prompt(40)
    other.read_prompt(7)
    late.text = late.tokens(45)
    late.target.begin(late.text)
    for node in (4, 0, 9):
        trees = [one.tree(), other.tree()]
        parts = [reader.target.tree_rows(tree) for reader, tree in zip((one, other), trees, strict=True)]
        hidden = one.target.read([parts[0], late.target.text_rows(15), parts[1]])
        late.target.took_in(15)
        for reader, tree, states in ((one, trees[0], hidden[0]), (other, trees[1], hidden[2])):
            reader.check(tree, states)
            reader.commit(tree, node)
    assert_same(late.target.logits(hidden[1][-1:])[0], late.plain_logits())
    late.look(None)


@pytest.mark.parametrize("family", KINDS)
def test_rows_are_kept_as_far_as_states_reach_back(family: str) -> None:
    """A text goes on from its whole, or from the end of its last prompt; from before that it is read again."""
    (reader,) = readers(family)
    reader.read_prompt(60)
    prompt = list(reader.text)
    reader.look(None)
    reader.look(None)
    whole, length = list(reader.text), len(reader.text)
    cases = [
        (whole + reader.tokens(50), length),
        ([*whole[: 60 - 5], 1, 2, 3], 55),
        (prompt[:-OPEN_ROWS] + reader.tokens(2), 60 - OPEN_ROWS),
        (whole[:61] + reader.tokens(5), 60),
        (whole[:-1] + reader.tokens(5), length - 1),
        (prompt[:20] + reader.tokens(30), 0),
    ]
    for ids, kept in cases:
        again = Reader(reader.plain, reader.causal, seed=5)
        again.target = Target(reader.causal, reader.target.cache.copy(length))
        again.text = ids
        assert_same(again.target.prefill(torch.tensor(ids)), again.plain_logits())
        assert again.target.num_kept == kept
        again.look(None)
        again.look(0)
    reader.look(None)  # the copies have left it alone


@pytest.mark.parametrize("family", KINDS)
def test_copies_of_a_text_share_what_it_has_read(family: str) -> None:
    """Samples of one prompt begin on its rows, also when the first of them has gone on."""
    (reader,) = readers(family)
    reader.read_prompt(60)
    prompt = list(reader.text)
    reader.look(None)
    copied = reader.target.cache.copy(59)
    assert list(copied.ids) == prompt[:59]
    assert copied.length == 59
    sample = Reader(reader.plain, reader.causal, seed=9)
    sample.target, sample.text = Target(reader.causal, copied), prompt
    assert_same(sample.target.prefill(torch.tensor(prompt)), sample.plain_logits())
    assert sample.target.num_kept == 59
    sample.look(None)
    reader.look(None)
    sample.look(None)


def test_states_count_as_memory_once_where_they_are_shared() -> None:
    (reader,) = readers("qwen3-next")
    reader.read_prompt(60)
    before = reader.target.cache.num_bytes
    state_bytes = 2 * 4 * 8 * 16 * 4  # layers, heads, key and value dimensions, float32
    reader.target.cache.truncate()  # the state of the prompt is the text's, and is kept for the next turn
    assert reader.target.cache.num_bytes == before - state_bytes - 2 * 3 * (2 * 2 * 8 + 4 * 16) * 4


def test_features_of_texts_leave_no_state_behind() -> None:
    (reader,) = readers("qwen3-next")
    texts = [torch.tensor(reader.tokens(count)) for count in (50, 3, 20)]
    together = reader.causal.features_of_texts(texts)
    for text, features in zip(texts, together, strict=True):
        expected = reader.plain(input_ids=text[None], use_cache=False).logits[0]
        assert_same(reader.causal.logits(features), expected)


def test_outside_our_passes_transformers_functions_are_what_they_were() -> None:
    model = make_model(RECURRENT["qwen3.5"]())
    ids = torch.arange(40)[None]
    before = model(input_ids=ids).logits
    CausalModel(copy.deepcopy(model), device=CPU)
    assert torch.equal(model(input_ids=ids).logits, before)
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert generated.shape[1] == 44


SIGHTED = {form: form.beside for form in (Convolution, DeltaRule, Mamba2)}
TRUNCATE, KEEP, AT = StateCache.truncate, StateCache.keep, StateCache.at


def sees_siblings(self: Any, first: int, held: StateRows, visible: Tensor) -> Any:
    return SIGHTED[type(self)](self, first, held, causal_mask(*visible.shape, device=CPU))


def keeps_what_was_cut(self: StateCache, rows: int) -> None:
    if self._ahead is not None:
        self._kept, self._ahead = self._ahead.until(self._ahead.start), None


def forgets_the_root(self: StateCache, committed: int, rows: Tensor) -> None:
    KEEP(self, committed, rows[1:])


def keeps_other_rows(self: StateCache, committed: int, rows: Tensor) -> None:
    KEEP(self, committed, torch.arange(committed, committed + len(rows)))


def folds_again(self: StateCache, committed: int) -> StateRows:
    before = self._kept
    held = AT(self, committed)
    if self._kept is not before and before.num_open:
        state, _ = self._fold(self._kept.state, before.rows, committed - before.start)
        self._kept = StateRows(start=committed, state=state, rows=held.rows)
    return self._last


@pytest.mark.parametrize(
    ("place", "name", "wrong", "families"),
    [
        (Convolution, "beside", sees_siblings, KINDS),
        (DeltaRule, "beside", sees_siblings, ["qwen3-next"]),
        (Mamba2, "beside", sees_siblings, ["mamba2", "falcon-h1"]),
        (StateCache, "truncate", keeps_what_was_cut, KINDS),
        (StateCache, "keep", forgets_the_root, KINDS),
        (StateCache, "keep", keeps_other_rows, KINDS),
        (StateCache, "at", folds_again, KINDS),
    ],
    ids=["sibling-taps", "wrong-parent-delta", "wrong-parent-mamba2", "cut", "empty", "path", "twice"],
)
def test_wrong_versions_would_be_noticed(
    place: Any, name: str, wrong: Any, families: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong)
    for family in families:
        with pytest.raises((AssertionError, RuntimeError)):
            test_a_pass_that_is_cut_and_made_again_counts_once(family, 0.5)


@pytest.mark.parametrize("count", [3, 60])
@pytest.mark.parametrize("family", KINDS)
def test_the_last_token_of_a_prompt_may_become_a_root(family: str, count: int) -> None:
    (reader,) = readers(family)
    reader.read_prompt(count)
    reader.target.uncommit_last()
    tree = reader.tree()
    tree.tokens[0] = reader.text.pop()
    reader.check(tree, reader.target.look(tree))
    reader.commit(tree, 5)
    reader.look(None)
