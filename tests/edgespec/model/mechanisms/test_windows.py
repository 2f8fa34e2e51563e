"""How far back rows see, written out."""

import pytest
import torch

from edgespec.model.mechanisms.windows import WHOLE, AttentionWindow

FIRST_SEEN = {  # of the positions 0 to 8
    WHOLE: [0, 0, 0, 0, 0, 0, 0, 0, 0],
    AttentionWindow(1): [0, 1, 2, 3, 4, 5, 6, 7, 8],
    AttentionWindow(3): [0, 0, 0, 1, 2, 3, 4, 5, 6],
    AttentionWindow(3, in_chunks=True): [0, 0, 0, 3, 3, 3, 6, 6, 6],
    AttentionWindow(4, in_chunks=True): [0, 0, 0, 0, 4, 4, 4, 4, 8],
    AttentionWindow(first=1): [0, 1, 1, 1, 1, 1, 1, 1, 1],
    AttentionWindow(3, first=1): [0, 1, 1, 1, 2, 3, 4, 5, 6],
    AttentionWindow(3, in_chunks=True, first=1): [0, 1, 1, 3, 3, 3, 6, 6, 6],
}


@pytest.mark.parametrize("window", FIRST_SEEN)
def test_rows_of_a_text_see_what_comes_before_them(window: AttentionWindow) -> None:
    keys = torch.arange(9)
    seen = (keys <= keys[:, None]) & window.sees(keys[:, None], keys)
    for position in keys.tolist():
        assert seen[position].nonzero().flatten().tolist() == list(range(FIRST_SEEN[window][position], position + 1))
        assert window.first_seen(position) == FIRST_SEEN[window][position]


def test_rows_that_are_in_no_order_see_by_their_positions() -> None:
    """As siblings and their children lie in a tree."""
    rows, keys = torch.tensor([5, 6, 5])[:, None], torch.tensor([2, 3, 5, 6, 5])
    assert AttentionWindow(3, in_chunks=True).sees(rows, keys).tolist() == [
        [False, True, True, False, True],
        [False, False, False, True, False],
        [False, True, True, False, True],
    ]


def test_a_limit_that_no_key_meets_is_none() -> None:
    assert AttentionWindow(9).within(9) == AttentionWindow(9, in_chunks=True).within(9) == WHOLE
    assert AttentionWindow(9).within(10) == AttentionWindow(9)
    assert AttentionWindow(9, first=1).within(9) == AttentionWindow(first=1) != WHOLE
