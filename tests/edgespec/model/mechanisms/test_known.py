"""The records of what layers keep: new families that keep what is known need no line."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from edgespec import Engine
from edgespec.model.mechanisms.known import keeps_states
from edgespec.model.self_check import check_tree_reading
from edgespec.model.supported import no_tree_reason
from edgespec.placement.cache_memory import cache_bytes
from tests.support.families import greedy_tokens, make_model, save_folder
from tests.support.tiny_configs import tiny_config

MODELING = Path(transformers.__file__).parent / "models"

# Types whose layers keep what the records know, and how transformers begins the names of their classes
KNOWN = {
    "gemma2": "Gemma2", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32", "glm5_next": "Glm5Next",
    "minimax_m3_vl": "MiniMaxM3VL", "qwen4_exp": "Qwen4Exp", "deepseek_v4": "DeepseekV4", "qwen3_next": "Qwen3Next",
    "mamba2": "Mamba2", "lfm2": "Lfm2", "jamba": "Jamba", "zaya": "Zaya",
}  # fmt: skip


def theirs_of(model_type: str) -> tuple[PretrainedConfig, str]:
    """A tiny configuration of a family, of its text part where that has a model, and the name of the model's class."""
    whole = tiny_config(model_type)
    for config in (whole.get_text_config(decoder=True), whole):
        for known in (AutoModelForCausalLM, AutoModelForImageTextToText):
            if type(config) in known._model_mapping:
                return config, known._model_mapping[type(config)].__name__
    raise KeyError(model_type)


def renamed_family(model_type: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> PretrainedConfig:
    """A tiny configuration of a family that is another's code under a new name, as transformers writes its families."""
    new, theirs, causal = f"new_{model_type}", *theirs_of(model_type)
    for kind in ("configuration", "modeling"):
        code = (MODELING / model_type / f"{kind}_{model_type}.py").read_text("utf-8")
        code = re.sub(rf"\b{KNOWN[model_type]}", f"New{KNOWN[model_type]}", code)
        path = folder / f"{kind}_{new}.py"
        path.write_text(re.sub(rf"\b((configuration_|modeling_)?){model_type}", rf"\1{new}", code), "utf-8")
        spec = spec_from_file_location(f"transformers.models.{new}.{kind}_{new}", path)
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    config = getattr(sys.modules[f"transformers.models.{new}.configuration_{new}"], f"New{type(theirs).__name__}")
    for mapping in (CONFIG_MAPPING, AutoModelForCausalLM._model_mapping):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, getattr(module, f"New{causal}"), exist_ok=True)
    made: PretrainedConfig = config(
        **{name: value for name, value in theirs.to_dict().items() if name not in ("model_type", "architectures")}
    )
    return made


@pytest.mark.parametrize("model_type", KNOWN)
def test_a_new_family_with_known_mechanisms_needs_no_line(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = renamed_family(model_type, tmp_path, monkeypatch)
    assert config.model_type.startswith("new_")
    assert no_tree_reason(config) is None
    texts = [whole.get_text_config(decoder=True) for whole in (config, tiny_config(model_type))]
    assert len({cache_bytes(text, rows=7, dtype=torch.float32) for text in texts}) == 1
    check_tree_reading(config, device=torch.device("cpu"))


def test_an_engine_opens_a_family_that_was_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(renamed_family("qwen3_next", tmp_path, monkeypatch))
    folder = save_folder(tmp_path / "model", model)
    with Engine.from_pretrained(folder, draft=folder, context_tokens=64, dtype="float32") as engine:
        (result,) = (
            each for _, each in engine.generate_many([engine.request([1, 2], max_new_tokens=9, temperature=0)])
        )
    assert list(result.token_ids) == greedy_tokens(model, [1, 2], 9, eos_token_id=None)


@pytest.mark.parametrize("model_type", ["llama", "blt", "mamba2", "gemma4_text", "qwen4_exp"])
def test_every_record_answers_for_every_configuration(model_type: str) -> None:
    config = tiny_config(model_type).get_text_config(decoder=True)
    assert keeps_states(config) == (model_type in {"mamba2", "qwen4_exp"})
