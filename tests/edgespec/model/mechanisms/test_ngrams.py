"""N-grams beside packed layers: tables stay in their files as they are, and texts are those of the rounded weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import PretrainedConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from offload.layouts.known import kernel_of
from offload.layouts.nf4_cpu import NF4_CPU
from offload.text_part import is_composite, language_model, model_from_config
from tests.offload.test_file_tables import NGRAMS, needs_qwen4
from tests.offload.test_quantize import with_rounded_weights
from tests.support.families import greedy_tokens, make_model, save_folder

PROMPTS = (list(b"def main(arguments):\n    return main(arguments)\n"), list(b"import os"))
NEW_TOKENS = 10
SIZES: dict[str, Any] = {  # as formats of four bits pack them
    **NGRAMS, "hidden_size": 128, "ple_embed_dim": 128, "hc_lowrank": 64, "head_dim": 32, "indexer_head_dim": 32,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 128,
    "num_position_embeddings": 16,
}  # fmt: skip
TREES = (TreeSettings(policy="none"), TreeSettings(policy="opt-tree", size=7))
Texts = list[list[int]]


def config_of(kind: str) -> PretrainedConfig:
    if kind == "text":
        return transformers.Qwen4ExpTextConfig(**SIZES)
    text = {**SIZES, "model_type": "qwen4_exp_text"}
    return transformers.Qwen4ExpConfig(text_config=text, vision_config=VISION)


def texts_of(folder: Path, tree: TreeSettings, *, quant: str, resident: int) -> tuple[Texts, Texts]:
    """Greedy and seeded texts, each pair of them decoded together; where trees need a draft, it is the model itself."""
    drafts = tree.needs_draft
    limits = MemoryLimits(max_resident_layers=resident)
    with Engine.from_pretrained(
        folder, draft=folder if drafts else None, tree=tree, limits=limits, dtype="float32", parallel=2,
        context_tokens=96, quant=quant, draft_quant=quant if drafts else None,
    ) as engine:  # fmt: skip

        def decoded(temperature: float) -> Texts:
            handles = [
                engine.submit(engine.request(prompt, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=3))
                for prompt in PROMPTS
            ]
            return [[token for chunk in handle for token in chunk.step.tokens] for handle in handles]

        return decoded(0.0), decoded(0.9)


def format_of(quant: str) -> str:
    """What a word stands for here, where layers are multiplied as they are packed."""
    has_kernel = kernel_of(NF4_CPU, (1024, 1024), torch.float32, torch.device("cpu")) is not None
    return "nf4-cpu" if quant == "nf4" and has_kernel else quant


@torch.no_grad()
def greedy_texts(folder: Path, quant: str | None) -> Texts:
    """What transformers' own decoding makes of the folder, or of the rounded weights of its layers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = type(model_from_config(config, dtype=torch.float32)).from_pretrained(folder, dtype=torch.float32).eval()
    if quant is not None:
        with_rounded_weights(model, quant)
    return [greedy_tokens(language_model(model), prompt, NEW_TOKENS, pad_token_id=0) for prompt in PROMPTS]


@needs_qwen4
@pytest.mark.parametrize(("kind", "quant"), [("text", "int4"), ("images", "nf4")])
def test_texts_of_packed_layers_are_those_of_their_rounded_weights(
    kind: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    config = config_of(kind)
    assert is_composite(config) == (kind == "images")
    folder = save_folder(tmp_path / "model", make_model(config, dtype=torch.bfloat16), shard="100KB")
    expected = greedy_texts(folder, format_of(quant))
    assert expected != greedy_texts(folder, None)  # rounding shows, or the comparison would say nothing
    found = [
        texts_of(folder, tree, quant=quant, resident=resident)
        for resident, tree in zip((0, 0, 3), (*TREES, TREES[1]), strict=True)
    ]
    assert [greedy for greedy, _ in found] == [expected] * len(found)
    assert [seeded for _, seeded in found] == [found[0][1]] * len(found)
    files = list((tmp_path / "cache" / "quantized").rglob("*.safetensors"))
    names = [name for file in files for name in load_file(file)]
    assert any("ple.key_proj.weight" in name for name in names)
    assert not any("ngram_embedding" in name for name in names)
