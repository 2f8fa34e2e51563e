"""llama.cpp's converter and back: weights and logits are the original's by bits (`scripts.make.gguf_tiny`)."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

from edgespec.pair.folder import open_model
from tests.support.plain_weights import weights

TINY = Path(__file__).with_name("tiny")
NAMES = sorted(path.stem for path in TINY.glob("*.gguf"))
if not hasattr(Gemma4TextConfig, "kv_sharing_modes"):  # in the oldest transformers that we take
    NAMES = [name for name in NAMES if name not in {"gemma3n", "gemma4"}]
if not hasattr(transformers, "GlmMoeDsaConfig") or not hasattr(transformers, "DeepseekV32Config"):
    NAMES = [name for name in NAMES if name not in {"deepseek32-mtp", "glm-dsa-mtp"}]
IDS = torch.arange(3, 60).view(1, -1)  # longer than the windows


def without_multipliers(config: Any, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Falcon-H1, of whose multipliers llama.cpp's converter makes part of them."""
    factors: dict[str, Any] = {
        "embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier,
        "feed_forward.gate_proj": config.mlp_multipliers[0], "feed_forward.down_proj": config.mlp_multipliers[1],
        "q_proj": config.attention_in_multiplier, "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier, "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "mamba.in_proj": config.ssm_in_multiplier * compute_mup_vector(config).view(-1, 1),
    }  # fmt: skip
    of_each = {name: [by for key, by in factors.items() if name.endswith(f"{key}.weight")] for name in found}
    return {name: weight / of_each[name][0] if of_each[name] else weight for name, weight in found.items()}


def logits(config: Any, found: dict[str, Tensor]) -> Tensor:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(found)
    with torch.no_grad():
        return model(IDS).logits


def original_config(fields: dict[str, Any]) -> Any:
    limits = {"time_step_limit": (0.0, math.inf)} if "time_step_limit" in fields else {}
    return AutoConfig.for_model(**{**fields, **limits})


def projection(weight: Tensor) -> float:
    """A number that hardly changes where all weights are rounded, and does where they are exchanged."""
    numbers = weight.double().flatten()
    return float(numbers @ torch.arange(len(numbers), dtype=torch.float64).square().cos() / numbers.norm())


def compared(name: str) -> dict[str, list[str]]:
    """What of a tiny model is compared with the original one, and what differs."""
    about = json.loads((TINY / f"{name}.json").read_text())
    original, found = original_config(about["config"]), weights(TINY / f"{name}.gguf")
    published = without_multipliers(original, found) if name == "falcon-h1" else found
    differing: dict[str, list[str]] = {}
    if about.get("weights"):
        expected = about["weights"]
        digests = {key: hashlib.sha256(weight.contiguous().numpy().tobytes()).hexdigest()[:16]
                   for key, weight in published.items()}  # fmt: skip
        keys = sorted({*digests, *expected})
        differing[f"{len(expected)} weights by bits"] = [k for k in keys if digests.get(k) != expected.get(k)]
    elif "projections" in about:
        expected = about["projections"]
        projections = {key: projection(weight) for key, weight in found.items()}
        differing[f"{len(expected)} weights but for rounding"] = [
            key for key in sorted({*projections, *expected})
            if abs(projections.get(key, math.inf) - expected.get(key, math.inf)) > 0.03
        ]  # fmt: skip
    ours = open_model(TINY / f"{name}.gguf").config
    norms = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")  # which the file has in float32
    differing["epsilons"] = [key for key in norms if getattr(ours, key, None) != getattr(original, key, None)]
    is_equal = torch.equal(logits(ours, found), logits(original, published))
    differing["logits by bits"] = [] if is_equal else ["logits"]
    return differing


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_logits_are_the_original_models(name: str) -> None:
    differing = compared(name)
    assert not any(differing.values()), differing
