"""Adapters on a loaded model: logits are those of the unmerged forward, and each row is the one that it is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MiniCPM3Config

from edgespec import EdgespecError, Engine, MemoryLimits, TreeSettings
from edgespec.model.pass_rows import next_rows
from offload.packed_weight import weight_of
from tests.support.adapters import with_adapters, write_adapter
from tests.support.families import FAMILIES, LATENT, RECURRENT, SMALL, make_model, save_folder
from tests.support.tiny_checkpoints import make_model as tiny_model
from tests.support.tiny_configs import tiny_config

STREAMED, STAYING = MemoryLimits(max_resident_layers=0), MemoryLimits()
IDS = torch.arange(30, 70)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEAR, MOST = 2e-6, 4e-4  # of the largest logit

KINDS: dict[str, dict[str, Any]] = {
    "all linear layers": {},
    "by the root of the rank": {"use_rslora": True, "r": 8},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 8, "down_proj": 2},
        "alpha_pattern": {"layers.2.mlp.down_proj": 40, "down_proj": 3, "o_proj": 11},
    },
    "an embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "a bias of its own": {"lora_bias": True},
    "magnitudes": {"use_dora": True},
    "magnitudes of a table": {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]},
    "magnitudes of a head": {"use_dora": True, "target_modules": ["lm_head", "q_proj"]},
    "magnitudes of what is trained whole": {
        "use_dora": True,
        "target_modules": ["embed_tokens", "q_proj"],
        "replaced": [
            "model.embed_tokens.weight",
            *(f"model.layers.0.self_attn.q_proj.{end}" for end in ("weight", "bias")),
        ],
        "bias": "all",
    },
    "norms": {"replaced": ["model.layers.1.input_layernorm.weight", "model.norm.weight"], "modules_to_save": ["norm"]},
    "a whole layer": {"replaced": ["model.layers.0.mlp.up_proj.weight"], "target_modules": ["q_proj"]},
    "a head": {"replaced": ["lm_head.weight"], "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "a table": {"replaced": ["model.embed_tokens.weight"], "target_modules": ["q_proj"]},
}
# Modules of families that have others than Llama's
OWN_ENDS = {
    "gpt2": ("c_attn", "c_proj", "c_fc", "wte"),
    "qwen3-moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen3-next": ("q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert.up_proj"),
    "bamba": ("q_proj", "in_proj", "down_proj"),
    "mamba2": ("in_proj", "out_proj"),
}


def open_engine(folder: Path, *adapters: str | Path, limits: MemoryLimits = STREAMED, **options: Any) -> Engine:
    return Engine.from_pretrained(
        folder, draft="none", device="cpu", limits=limits, tree=TreeSettings(policy="none"), context_tokens=128,
        self_check=False, adapters=[str(path) for path in adapters], **{"dtype": "float32"} | options,
    )  # fmt: skip


def logits_of(engine: Engine, *use: tuple[str, float]) -> Tensor:
    return engine.target_model.read_text(engine.target_model.new_text(use), IDS)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
def last_logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS[None], use_cache=False).logits[0, -1]
    return found.float()


def check_near(engine: Engine, base: Any, use: list[tuple[str, float]], wanted: Tensor) -> None:
    """The adapter adds no difference to that of the base alone, which tiny models multiply; without it, all differs."""
    of_base = last_logits(base)
    allowed = max(NEAR, 4 * off(logits_of(engine), of_base))
    assert off(logits_of(engine, *use), wanted) < allowed < MOST < off(of_base, wanted)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    model = make_model(FAMILIES["llama-bias"]())
    return save_folder(tmp_path_factory.mktemp("llama"), model), model


@pytest.mark.parametrize("limits", [STREAMED, STAYING], ids=["streamed", "resident"])
@pytest.mark.parametrize("of", KINDS)
def test_logits_are_those_of_the_unmerged_forward(
    of: str, limits: MemoryLimits, llama: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    folder, model = llama
    adapter = write_adapter(tmp_path / "one", model, LINEAR, **KINDS[of])
    wanted = last_logits(with_adapters(model, (adapter, 0.7)))
    with open_engine(folder, adapter, limits=limits) as engine:
        check_near(engine, model, [("one", 0.7)], wanted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", *OWN_ENDS])
def test_every_mechanisms_modules_take_adapters(family: str, tmp_path: Path) -> None:
    """GPT-2's transposed layers, tables that are scaled, shared experts, and mixers of recurrent layers among them."""
    model = make_model({**FAMILIES, **RECURRENT}[family]())
    ends = OWN_ENDS.get(family, (*LINEAR, "qkv_proj", "gate_up_proj", "embed_tokens"))
    adapter = write_adapter(tmp_path / "one", model, ends)
    with open_engine(save_folder(tmp_path / "model", model), adapter, limits=STREAMED) as engine:
        check_near(engine, model, [("one", 1.0)], last_logits(with_adapters(model, (adapter, 1.0))))


@pytest.mark.parametrize("of", ["qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe_text"])
def test_all_that_peft_adapts_of_a_mixture_takes_adapters(of: str, tmp_path: Path) -> None:
    """Linear layers of attention, of the first dense layers, and of experts that all rows pass, with their gate.

    Routers and joined experts are parameters, which `target_parameters` would name.
    """
    model = tiny_model(tiny_config(of), is_image_text=False, seed=0)
    head = model.get_output_embeddings()
    ends = [name for name, one in model.named_modules() if type(one) is nn.Linear and one is not head]
    assert any("expert" in name for name in ends) or of == "gpt_oss"  # which has no experts that all rows pass
    adapter = write_adapter(tmp_path / "one", model, ends)
    with open_engine(save_folder(tmp_path / "model", model), adapter) as engine:
        check_near(engine, model, [("one", 1.0)], last_logits(with_adapters(model, (adapter, 1.0))))


@pytest.mark.parametrize("of", ["all linear layers", "magnitudes", "a whole layer"])
@pytest.mark.parametrize("quant", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("limits", [STREAMED, STAYING], ids=["streamed", "resident"])
def test_packed_layers_are_multiplied_as_they_are(quant: str, of: str, limits: MemoryLimits, tmp_path: Path) -> None:
    """The base is what the packed numbers mean: nothing is quantised anew."""
    model = make_model(FAMILIES["llama-bias"]())
    adapter = write_adapter(tmp_path / "one", model, LINEAR, **KINDS[of])
    folder = save_folder(tmp_path / "model", model)
    with open_engine(folder, adapter, limits=STAYING, quant=quant) as engine:
        for name, module in engine.target_model.model.named_modules():
            if "weight_packed" in module._modules:
                model.get_submodule(name).weight.data = weight_of(module).float().clone()
    wanted = last_logits(with_adapters(model, (adapter, 1.0)))
    with open_engine(folder, adapter, limits=limits, quant=quant) as engine:
        check_near(engine, model, [("one", 1.0)], wanted)


def test_two_adapters_are_summed_in_their_order(llama: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """Each with its scale; a scale of 0 is none. Of parameters of both the last one's stands."""
    folder, model = llama
    norm = ["model.norm.weight"]
    one = write_adapter(tmp_path / "one", model, ["q_proj", "up_proj"], seed=1, replaced=norm)
    two = write_adapter(tmp_path / "two", model, ["up_proj", "down_proj"], seed=2, replaced=norm, use_rslora=True)
    with open_engine(folder, one, f"{two}:0.5") as engine:
        wanted = last_logits(with_adapters(model, (two, -0.5), (one, 2.0)))
        assert off(logits_of(engine, ("two", -0.5), ("one", 2.0)), wanted) < NEAR
        given = last_logits(with_adapters(model, (one, 1.0), (two, 0.5)))
        target = engine.target_model
        assert off(target.read_text(target.new_text(), IDS), given) < NEAR, "texts that choose none have the given ones"


@pytest.mark.parametrize("family", ["llama-bias", "qwen3", "gemma3", "bamba"])
@pytest.mark.parametrize("limits", [STREAMED, STAYING], ids=["streamed", "resident"])
def test_rows_of_several_adapters_share_a_pass_with_the_bits_that_they_have_alone(
    family: str, limits: MemoryLimits, tmp_path: Path
) -> None:
    """Texts without an adapter have those of an engine that has none."""
    model = make_model({**FAMILIES, **RECURRENT}[family]())
    norms = [name for name, one in model.named_parameters() if name.endswith("norm.weight") and one.dim() == 1]
    norms = [name for name in norms if "mamba" not in name and "linear_attn" not in name]  # which are gated
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "table": {"target_modules": ["embed_tokens", "o_proj"]},
        "dora": {"use_dora": True}, "norms": {"replaced": norms},
        "head": {"replaced": ["lm_head.weight"], "target_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
    }  # fmt: skip
    adapters = [
        write_adapter(tmp_path / name, model, LINEAR, seed=seed, **options)
        for seed, (name, options) in enumerate(kinds.items())
    ]
    texts = [IDS[:7], IDS[3:12], IDS[:1], IDS[5:9], IDS[2:4], IDS[:7], IDS[8:9], IDS[4:8]]
    uses: list[tuple[tuple[str, float], ...]] = [
        (), (("plain", 1.0),), (("table", 1.0),), (("dora", 1.0),), (("norms", 1.0), ("plain", 0.5)),
        (("plain", 0.25),), (("head", 1.0),), (("plain", 1.0),),
    ]  # fmt: skip
    folder = save_folder(tmp_path / "model", model)

    def read(engine: Engine, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
        causal = engine.target_model
        caches = [causal.new_text(uses[number]) for number in numbers]
        hidden = causal.read([next_rows(cache, texts[n]) for cache, n in zip(caches, numbers, strict=True)])
        runs = [(cache.adapters, len(own)) for cache, own in zip(caches, hidden, strict=True)]
        logits = causal.logits(torch.cat(hidden), runs=runs).split([len(own) for own in hidden])
        return list(zip(hidden, logits, strict=True))

    with open_engine(folder, *adapters, limits=limits) as engine:
        together = read(engine, list(range(len(texts))))
        for number, found in enumerate(together):
            (alone,) = read(engine, [number])
            assert all(map(torch.equal, found, alone)), uses[number]
    with open_engine(folder, limits=limits) as engine:
        assert all(map(torch.equal, read(engine, [0])[0], together[0]))


@torch.no_grad()
def test_latents_are_expanded_and_read_as_they_are_with_a_texts_adapters(tmp_path: Path) -> None:
    """A prompt's rows have latents expanded, a single row is multiplied with what expands them: both have the sums."""
    model = make_model(MiniCPM3Config(**{**SMALL, "num_key_value_heads": 4}, **LATENT))
    ends = ["kv_b_proj", "o_proj"]
    one, two = (write_adapter(tmp_path / name, model, ends, seed=seed) for seed, name in enumerate(("one", "two")))
    use = (("two", 0.5), ("one", 1.0))
    with open_engine(save_folder(tmp_path / "model", model), f"{one}:0", f"{two}:0") as engine:
        causal, near = engine.target_model, last_logits(model)
        allowed = max(NEAR, 4 * off(causal.read_text(causal.new_text(()), IDS), near))
        cache = causal.new_text(use)
        causal.read_text(cache, IDS[:-1])
        found = causal.read_text(cache, IDS[-1:])
    wanted = last_logits(with_adapters(model, (two, 0.5), (one, 1.0)))
    assert off(found, wanted) < allowed < MOST < off(near, wanted)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=["magnitudes", "a bias"])
def test_what_expands_latents_takes_plain_matrices_alone(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(MiniCPM3Config(**{**SMALL, "num_key_value_heads": 4}, **LATENT))
    adapter = write_adapter(tmp_path / "one", model, ["kv_b_proj"], **options)
    with pytest.raises(EdgespecError, match="latent attention multiplies") as caught:
        open_engine(save_folder(tmp_path / "model", model), adapter)
    assert caught.value.code == "E_ADAPTER"
