"""An inflated mixture computes the source's function whatever its router says, and its rows spread as asked."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec.pair.folder import ModelFolder, open_model
from scripts.make import inflate_experts
from scripts.make.inflate_experts import Mixture, make_router, routed, slow_directions, spread_of

TOLERANCE = 1e-4


@pytest.fixture
def source(pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> ModelFolder:
    ids = torch.randint(0, 256, (6, 40), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(inflate_experts, "calibration_ids", lambda _source: ids)
    return open_model(pair_folders[0])


def written(source: ModelFolder, folder: Path, *options: str) -> Path:
    assert inflate_experts.main([
        str(folder), "--source", str(source.folder), "--experts", "8", "--chosen", "2", "--dtype", "float32", *options
    ]) == 0  # fmt: skip
    return folder


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
    return logits


@pytest.mark.parametrize("options", [[], ["--separate"], ["--hidden", "128", "--inner", "96"]])
def test_logits_are_those_of_the_source(source: ModelFolder, tmp_path: Path, options: list[str]) -> None:
    folder = written(source, tmp_path / "moe", *options)
    assert open_model(folder).config.model_type == "mixtral"
    assert float((logits_of(folder) - logits_of(source.folder)).abs().max()) < TOLERANCE


def correlated_states() -> torch.Tensor:
    """Texts whose directions change at rates from token by token to hardly ever [texts, tokens, hidden]."""
    generator = torch.Generator().manual_seed(3)
    keep = torch.linspace(0, 0.95, 24)
    states = [torch.randn(24, 24, generator=generator)]
    for _ in range(127):
        fresh = torch.randn(24, 24, generator=generator)
        states.append(keep * states[-1] + (1 - keep.square()).sqrt() * fresh)
    return torch.stack(states, 1) + 2.0


@pytest.mark.parametrize("spread", [0.6, 0.7, 0.8])
def test_rows_spread_as_asked(spread: float) -> None:
    states = correlated_states()
    mixture = Mixture(num_experts=64, chosen=4, spread=spread, skew=0.0)
    router, found = routed(states, mixture, seed=0)
    assert found == pytest.approx(spread, abs=0.03)
    assert spread_of(router, states, mixture) == found


def test_slow_directions_are_uncorrelated_of_unit_variance_and_in_order() -> None:
    states = correlated_states()
    directions, correlations, mean = slow_directions(states)
    seen = ((states.double() - mean) @ directions).flatten(0, 1)
    assert torch.allclose(torch.cov(seen.T), torch.eye(24, dtype=torch.float64), atol=1e-6)
    assert (correlations.diff() >= 0).all()
    assert correlations[-1] > 0.8 > 0.2 > correlations[0]


def test_a_skew_makes_some_experts_popular() -> None:
    states = correlated_states()

    def busiest(skew: float) -> float:
        mixture = Mixture(num_experts=64, chosen=4, spread=0.75, skew=skew)
        router = make_router(states, mixture, slowness=0.0, seed=0)
        counts = (states.double() @ router.T).topk(4, dim=-1).indices.flatten().bincount(minlength=64)
        return float(counts.sort(descending=True).values[:8].sum() / counts.sum())

    even, skewed = busiest(0.0), busiest(1.0)
    assert even < 0.25, "eight of 64 experts have an eighth of the rows, and what chance gives"
    assert skewed > 0.5


def test_a_random_one_is_a_qwen3_moe_with_the_sources_vocabulary(source: ModelFolder, tmp_path: Path) -> None:
    command = ["--random", "--hidden", "64", "--inner", "32"]
    folder = open_model(written(source, tmp_path / "random", *command))
    assert (folder.config.model_type, folder.config.num_experts, folder.config.vocab_size) == ("qwen3_moe", 8, 257)
