"""One seed, one text, in bf16 on a CPU: where a state is kept, a row has the bits of plain decoding in any tree."""

from contextlib import ExitStack

import pytest
import torch

from edgespec.model.causal_model import CausalModel
from offload.layouts.onednn import hook_linear_layers
from tests.conftest import RECURRENT, VOCAB, make_model
from tests.edgespec.model.reader import CPU
from tests.support.row_bits import compared, let_states_last

KINDS = ["lfm2", "qwen3-next", "falcon-h1", "mamba2"]


def rows_with_other_bits(family: str) -> int:
    model = make_model(RECURRENT[family](), dtype=torch.bfloat16)
    let_states_last(model)
    with ExitStack() as undo, torch.no_grad():
        hook_linear_layers(model, torch.bfloat16, undo)
        found = compared(CausalModel(model, device=CPU, keeps_row_bits=True), vocab=VOCAB - 1, tokens=16)
    return sum(rows - same for same, rows in found.values())


@pytest.mark.parametrize("family", KINDS)
def test_a_row_has_the_same_bits_in_any_tree_and_in_what_follows(family: str) -> None:
    assert rows_with_other_bits(family) == 0
