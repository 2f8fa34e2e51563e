"""Recurrent layers under trees: nodes continue their parents' states, text by text.

The reference is the same transformers model on each root-to-node path, without a cache.
"""

from typing import Any

import pytest
import torch

from edgespec.model.mechanisms import by_depth
from edgespec.model.mechanisms.state_cache import OPEN_ROWS
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.model.reader import KINDS, LEVEL_KINDS, assert_same, readers


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


@pytest.mark.parametrize("family", LEVEL_KINDS)
def test_mixers_that_may_forget_their_state_are_given_rows_one_by_one(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are those of any family that we have not seen."""
    monkeypatch.setattr(by_depth, "CONTINUING", set())
    monkeypatch.setattr(by_depth, "continued", lambda _state, call: call())
    (reader,) = readers(family)
    reader.read_prompt(2 * OPEN_ROWS + 5)
    reader.look(None)
    reader.look(0)
    reader.look(None)


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
