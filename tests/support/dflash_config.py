"""The config.json of a small DFlash or DSpark drafter, in z-lab's container."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

LAYERS, BLOCK = 2, 8
RANK = 64  # of a DSpark drafter's bias


def config_of(target: PretrainedConfig, aux_layers: Sequence[int], *, is_dspark: bool) -> dict[str, Any]:
    """The config.json of a drafter whose layers are as wide as the target's."""
    bias = {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla"} if is_dspark else {}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "rms_norm_eps", "max_position_embeddings")  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **{name: getattr(target, name) for name in names},
        "rope_theta": target.rope_parameters["rope_theta"], "num_hidden_layers": LAYERS, "attention_bias": False,
        "num_target_layers": target.num_hidden_layers, "block_size": BLOCK, "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * LAYERS, "hidden_act": "silu", "torch_dtype": "float32",
        "dflash_config": {
            "mask_token_id": target.vocab_size - 1, "target_layer_ids": [layer - 1 for layer in aux_layers], **bias,
        },
    }  # fmt: skip
