"""The config.json of a small DFlash, DSpark or DFlash2 drafter, in z-lab's container."""

from collections.abc import Sequence
from typing import Any, Literal

from transformers import PretrainedConfig

LAYERS, BLOCK = 2, 8
RANK = 64  # of what the token before a place adds, by a bias or by a selector
Kind = Literal["dflash", "dspark", "dflash2"]
OWN: dict[Kind, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla"},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 16},
}


def config_of(target: PretrainedConfig, aux_layers: Sequence[int], kind: Kind, **inner: Any) -> dict[str, Any]:
    """The config.json of a drafter whose layers are as wide as the target's; `inner` changes what is its own."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "rms_norm_eps", "max_position_embeddings")  # fmt: skip
    return {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"], "model_type": "qwen3",
        **{name: getattr(target, name) for name in names},
        "rope_theta": target.rope_parameters.get("rope_theta", 10_000.0), "num_hidden_layers": LAYERS,
        "attention_bias": False,
        "num_target_layers": target.num_hidden_layers, "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * LAYERS, "hidden_act": "silu", "torch_dtype": "float32",
        "dflash_config": {
            "block_size": BLOCK, "mask_token_id": target.vocab_size - 1,
            "target_layer_ids": [layer - 1 for layer in aux_layers], **OWN[kind], **inner,
        },
    }  # fmt: skip
