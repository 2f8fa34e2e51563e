"""One seed, one text, in bf16 on a CPU: where a state is kept, a row has the bits of plain decoding in any tree."""

import pytest
import torch

from tests.conftest import RECURRENT, VOCAB, make_model
from tests.support.row_bits import let_states_last, num_with_other_bits

KINDS = ["lfm2", "qwen3-next", "falcon-h1", "mamba2"]


@pytest.mark.parametrize("family", KINDS)
def test_a_row_has_the_same_bits_in_any_tree_and_in_what_follows(family: str) -> None:
    model = make_model(RECURRENT[family](), dtype=torch.bfloat16)
    let_states_last(model)
    assert num_with_other_bits(model, vocab=VOCAB - 1, tokens=16) == 0
