"""Published checkpoints stream as they are: outputs are those of transformers on the weights that they mean."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.pair.folder import open_model
from offload.checkpoint import read_checkpoint
from offload.errors import CheckpointError
from offload.placement import place_layers
from offload.skeleton import build_skeleton
from offload.streamed_model import StreamedModel
from tests.conftest import VOCAB, make_model, save_folder
from tests.offload.formats.published_checkpoints import PUBLISHED, Published, publish, publish_gpt_oss, save

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
NUM_EXPERTS = 12  # more than ten, whose names sort otherwise than their numbers
MODELS = {
    "dense": lambda: LlamaConfig(**SIZES, intermediate_size=96, tie_word_embeddings=True),
    "experts": lambda: Qwen3MoeConfig(
        **SIZES, intermediate_size=96, moe_intermediate_size=32, num_experts=NUM_EXPERTS, num_experts_per_tok=3
    ),
    "mixtral": lambda: MixtralConfig(
        **SIZES, intermediate_size=32, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, sliding_window=None
    ),
    "gpt-oss": lambda: GptOssConfig(
        **SIZES, intermediate_size=32, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
CASES = [
    *((form, "dense") for form in PUBLISHED),
    *((form, "experts") for form in PUBLISHED),
    ("fp8-blocks", "mixtral"), ("awq", "mixtral"), ("mxfp4", "gpt-oss"),
]  # fmt: skip


def published(folder: Path, form: str, model: str) -> Path:
    """A checkpoint in `form` at `folder`; returns the plain one of the same weights."""
    save_folder(folder, make_model(MODELS[model]()))
    torch.manual_seed(1)
    return publish_gpt_oss(folder) if form == "mxfp4" else publish(folder, PUBLISHED[form])


def logits(model: torch.nn.Module) -> Tensor:
    ids = torch.arange(40)[None]
    with torch.no_grad():
        for _ in range(2):  # the second pass reads slots that were used before
            found: Tensor = model(input_ids=ids, position_ids=ids, use_cache=False).logits
    return found


def streamed_logits(folder: Path, *, resident: int) -> Tensor:
    skeleton = build_skeleton(AutoConfig.from_pretrained(folder), read_checkpoint(folder), dtype=torch.float32)
    placement = place_layers(skeleton.records, device_uses={}, device_budget_bytes=1 << 40, max_resident=resident)
    streamed = StreamedModel(skeleton, placement, device=torch.device("cpu"))
    try:
        return logits(streamed.model)
    finally:
        streamed.close()


@pytest.mark.parametrize(("form", "model"), CASES, ids="-".join)
def test_streamed_and_resident_logits_are_those_of_the_meant_weights(form: str, model: str, tmp_path: Path) -> None:
    plain = published(tmp_path / "model", form, model)
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval())
    for resident in (0, 2):
        found = streamed_logits(tmp_path / "model", resident=resident)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
