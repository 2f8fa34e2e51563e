"""States of recurrent layers: what was cut or dropped leaves no trace, and texts go on from where states reach."""

from typing import Any

import pytest
import torch

from edgespec.model.mechanisms.delta_rule import DeltaRule
from edgespec.model.mechanisms.mamba import Mamba2
from edgespec.model.mechanisms.state_cache import OPEN_ROWS, Window
from edgespec.model.target import Target
from tests.edgespec.model.reader import KINDS, CutError, Reader, assert_same, readers


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
        reader.cut(lambda tree=tree: reader.target.look(tree), share)
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


def test_a_text_is_cut_to_a_length_that_a_state_or_the_last_turn_reaches() -> None:
    window = Window(start=70, turn_start=44, turn_end=60)
    assert [window.cut(rows) for rows in (80, 70, 69, 61, 60, 44, 43)] == [80, 70, 60, 60, 60, 44, 0]


def test_states_count_as_memory_once_where_they_are_shared() -> None:
    (reader,) = readers("qwen3-next")
    reader.read_prompt(60)
    before = reader.target.cache.num_bytes
    state_bytes = 2 * 4 * 8 * 16 * 4  # layers, heads, key and value dimensions, float32
    reader.target.cache.truncate()  # the state of the prompt is the text's, and is kept for the next turn
    assert reader.target.cache.num_bytes == before - state_bytes - 2 * 3 * (2 * 2 * 8 + 4 * 16) * 4
