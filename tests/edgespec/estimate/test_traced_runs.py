"""Four runs on an RTX 4090 whose launches, bytes and waits were counted by hand: the estimate says the same."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import run
from edgespec.estimate.speed import open_hardware
from edgespec.placement.step_seconds import StepSeconds
from profiles.roofline import achieved_rates, noise_s
from tests.support.published_configs import MODELS

QWEN3 = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **MODELS,
    "qwen3-32b": {
        **QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_experts": 128,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A run, and the seconds that were reckoned for it: between which bounds the estimate has to lie."""

    target: str
    draft: str | None = None
    options: list[str] = field(default_factory=list)
    plain_s: tuple[float, float]
    step_s: tuple[float, float] | None = None


TRACED = {
    "70B nf4 streams": Traced(
        target="llama3-70b", draft="llama3-1b", options=["--quant", "nf4", "--tree-size", "256"], plain_s=(0.65, 0.88),
        step_s=(0.88, 1.05),
    ),
    "gpt-oss-120b": Traced(target="gpt-oss-120b", plain_s=(0.03, 0.07)),
    "8B in chat": Traced(
        target="llama3-8b", draft="llama3-1b", plain_s=(0.018, 0.026), step_s=(0.035, 0.05),
        options=["--acceptance", "0.75", "--tree-size", "64", "--tree-depth", "4"],
    ),
    "32B nf4 is resident": Traced(
        target="qwen3-32b", draft="qwen3-0.6b",
        options=["--quant", "nf4", "--acceptance", "0.79", "--tree-size", "63"], plain_s=(0.025, 0.05),
        step_s=(0.05, 0.09),
    ),
    "30B of experts in nf4": Traced(target="qwen3-30b-a3b", options=["--quant", "nf4"], plain_s=(0.03, 0.08)),
}  # fmt: skip


def speed_of(traced: Traced, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    for name in filter(None, (traced.target, traced.draft)):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps({**CONFIGS[name], "dtype": "bfloat16"}))
    pair = ["-m", str(folder / traced.target), *(["-md", str(folder / traced.draft)] if traced.draft else [])]
    assert run(["estimate", *pair, "--hardware", "rtx-4090", "-c", "2048", *traced.options, *more, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["speed"]
    return found


@pytest.mark.parametrize("name", TRACED)
def test_the_estimate_of_a_traced_run_is_what_was_reckoned_by_hand(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = TRACED[name]
    found = speed_of(traced, tmp_path, capsys)
    for kind, bounds in (("plain", traced.plain_s), ("tree", traced.step_s)):
        if bounds is not None:
            assert bounds[0] <= found[kind]["step_s"]["likely"] <= bounds[1], kind


def test_noise_is_made_beside_the_pass_and_takes_the_rest_of_its_time() -> None:
    """Sixteen texts, five positions each, of 128,256 numbers."""
    card, assumptions = open_hardware("rtx-4090")
    rates = achieved_rates(card, assumptions.likely, assumptions, half=True)
    made_s = noise_s(rates, vocab=128256, positions=80)
    assert made_s == pytest.approx(80 * 128256 * 5e-9)
    step = StepSeconds(
        num_texts=16, tokens=4.0, draft_s=0.01, noise_s=made_s, stream_s=0.0, compute_s=0.02, experts=None, pass_s=0.02
    )
    assert step.step_s == pytest.approx(0.01 + made_s)
    assert replace(step, pass_s=0.5).step_s == pytest.approx(0.51)
