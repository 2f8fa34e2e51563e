"""Of equal scores the first are chosen, whatever lies among them: a tree's row takes the keys of plain decoding."""

from typing import Any

import pytest
import torch

from edgespec.model.mechanisms.first_of_equal import best_of
from edgespec.model.self_check import check_tree_reading
from tests.edgespec.model.reader import CPU
from tests.support.families import make_model
from tests.support.row_bits import num_with_other_bits
from tests.support.tiny_configs import VOCAB, tiny_config

HIDDEN = torch.finfo(torch.float32).min


def tied_config(model_type: str) -> Any:
    """An indexer of two heads, which likes few keys."""
    config = tiny_config(model_type)
    config.index_n_heads, config.index_topk = 2, 6
    return config


def test_the_first_of_equal_scores_are_chosen_among_any_others() -> None:
    torch.manual_seed(0)
    for count in (8, 40, 300):
        scores = torch.randint(0, 4, (50, count)).float()
        scores[:, ::3] = HIDDEN  # of which none is chosen while there are others
        best = best_of(scores, 5)
        expected = scores.sort(stable=True, dim=-1, descending=True)
        assert torch.equal(best.values.sort(-1).values, expected.values[:, :5].sort(-1).values)
        is_sure = expected.values[:, 4] > HIDDEN
        assert torch.equal(best.indices.sort(-1).values[is_sure], expected.indices[:, :5].sort(-1).values[is_sure])
        assert torch.equal(scores.gather(-1, best.indices), best.values)


def test_scores_without_equals_come_as_torch_has_them() -> None:
    scores = torch.randperm(600).view(2, 3, 100).float()
    assert torch.equal(best_of(scores, 7).indices, scores.topk(7).indices)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_trees_choose_the_keys_of_plain_decoding(model_type: str) -> None:
    check_tree_reading(tied_config(model_type), device=CPU)
    assert (
        num_with_other_bits(make_model(tied_config(model_type), dtype=torch.bfloat16), vocab=VOCAB - 1, tokens=10) == 0
    )
