"""The rows of a prompt that pass a layer of a mixture together."""

from pathlib import Path

import pytest
import torch

from edgespec.model import causal_model
from edgespec.model.pass_rows import ALL_PROMPT_ROWS
from edgespec.placement.memory import CHUNK_ROWS, MIXTURE_ROWS_SHARE, PassShape, layer_rows, pass_bytes
from offload.skeleton import Skeleton
from tests.offload.experts.mixtures import save_mixture
from tests.offload.streaming import skeleton_of
from tests.support.families import FAMILIES, make_model, save_folder

MIB = 1 << 20
DTYPE = torch.bfloat16


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    """Also one whose attention reads each text by itself."""
    return skeleton_of(save_mixture(tmp_path_factory.mktemp("mixture"), request.param), DTYPE)


def test_they_are_as_many_as_a_share_of_the_budget_holds(mixture: Skeleton) -> None:
    """And no more than a pass has rows of prompts; a large budget holds all of these."""
    assert layer_rows(mixture, DTYPE, 0) == CHUNK_ROWS
    assert layer_rows(mixture, DTYPE, 1 << 50) == ALL_PROMPT_ROWS == 8192
    config = mixture.model.config
    found = {budget: layer_rows(mixture, DTYPE, budget) for budget in range(8 * MIB, 256 * MIB, 8 * MIB)}
    assert len({rows for rows in found.values() if CHUNK_ROWS < rows < ALL_PROMPT_ROWS}) > 1
    for budget, rows in found.items():
        assert rows % CHUNK_ROWS == 0
        if rows > CHUNK_ROWS:
            each = {
                count: pass_bytes(
                    config,
                    PassShape(prompt_rows=16384, tree_rows=0, keys=0, prompt_keys=1, layer_rows=count),
                    dtype=DTYPE,
                )
                for count in (CHUNK_ROWS, rows)
            }
            assert each[rows] - each[CHUNK_ROWS] <= 1.5 * budget / MIXTURE_ROWS_SHARE


def test_dense_models_pass_in_chunks(tmp_path: Path) -> None:
    """They share nothing among chunks."""
    folder = save_folder(tmp_path, make_model(FAMILIES["qwen3"]()))
    assert layer_rows(skeleton_of(folder, DTYPE), DTYPE, 1 << 50) == CHUNK_ROWS


def test_layers_whose_attention_is_not_found_pass_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = skeleton_of(save_mixture(tmp_path, "deepseek-v3"), DTYPE)
    monkeypatch.setattr(causal_model, "attention_modules", lambda *_: {})
    assert layer_rows(skeleton, DTYPE, 1 << 50) == CHUNK_ROWS
