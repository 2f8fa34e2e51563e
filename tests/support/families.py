"""Tiny models of any family, a tiny tokenizer, and folders of both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.kimi_linear import modeling_kimi_linear

from offload.text_part import model_from_config

VOCAB = 257  # 256 bytes and an end-of-text token
WINDOW = 12  # shorter than the tests' prompts, so that a missing window shows
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                          "v_head_dim": 8}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}  # two query heads read one key/value head
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS: dict[str, Any] = {**GROUPED, "num_experts_per_tok": 2}
TWO_SIZES: dict[str, Any] = {
    "head_dim": 8, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": WINDOW, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
}  # fmt: skip
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8, "model_type": "siglip_vision_model"}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama-bias": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, layer_types=MIXED
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=16),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, head_dim=8, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**GROUPED, head_dim=8, sliding_window=WINDOW),
    "mixtral": lambda: transformers.MixtralConfig(**EXPERTS, num_local_experts=4, sliding_window=None),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=MIXED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=MIXED),
    # As many layers in the tower for images as in the text part
    "gemma3-images": lambda: transformers.Gemma3Config(
        text_config=FAMILIES["gemma3"](), vision_config=IMAGES, image_token_index=255, mm_tokens_per_image=4
    ),
    # Two sizes of heads, and layers that read the keys of earlier ones
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **{**GROUPED, "num_hidden_layers": 4}, **TWO_SIZES, layer_types=MIXED[:2] * 2
    ),
    "gemma4-shared": lambda: transformers.Gemma4TextConfig(
        **{**GROUPED, "num_hidden_layers": 5}, **TWO_SIZES, layer_types=[*MIXED, *MIXED[:2]], num_kv_shared_layers=2
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **EXPERTS,
        head_dim=8,
        num_local_experts=4,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=64,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        interleave_moe_layer_step=2,
        floor_scale=4,
        attn_scale=0.3,
    ),
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "phi3-window": lambda: transformers.Phi3Config(**GROUPED, sliding_window=WINDOW),
    "opt": lambda: transformers.OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32),
    "gpt2": lambda: transformers.GPT2Config(**SMALL, n_inner=64),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL),
}
CONVOLUTIONS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
SHARED_EXPERT: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
RECURRENT: dict[str, Callable[[], PretrainedConfig]] = {
    "lfm2": lambda: transformers.Lfm2Config(**GROUPED, **CONVOLUTIONS, block_auto_adjust_ff_dim=False),
    "lfm2-moe": lambda: transformers.Lfm2MoeConfig(
        **EXPERTS, **CONVOLUTIONS, num_experts=4, moe_intermediate_size=16, num_dense_layers=1
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**EXPERTS, **DELTA, **SHARED_EXPERT, head_dim=8),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**GROUPED, **DELTA, head_dim=8),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(**EXPERTS, **DELTA, **SHARED_EXPERT, head_dim=8),
    "olmo-hybrid": lambda: transformers.OlmoHybridConfig(**GROUPED, **{**DELTA, "linear_num_key_heads": 4}),
    "bamba": lambda: transformers.BambaConfig(**GROUPED, **MAMBA, attn_layer_indices=[1]),
    "granite-hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **EXPERTS, **MAMBA, layer_types=DELTA["layer_types"], num_local_experts=4, shared_intermediate_size=32
    ),
    "falcon-h1": lambda: transformers.FalconH1Config(**GROUPED, **MAMBA, mamba_d_ssm=64, head_dim=8),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **EXPERTS,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        head_dim=8,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        **SMALL, num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=16
    ),
}
# Mixers whose functions we do not know, which are read level by level
BY_LEVELS: dict[str, Callable[[], PretrainedConfig]] = {
    "jamba": lambda: transformers.JambaConfig(
        **EXPERTS, num_experts=4, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1
    ),
    "mamba": lambda: transformers.MambaConfig(**SMALL, state_size=8, time_step_rank=4),
    "falcon-mamba": lambda: transformers.FalconMambaConfig(**SMALL, state_size=8, time_step_rank=4),
    "zaya": lambda: transformers.ZayaConfig(
        **{**GROUPED, "num_hidden_layers": 4},
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        sliding_window=WINDOW,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        router_hidden_size=16,
    ),
    "kimi-linear": lambda: transformers.KimiLinearConfig(
        **{**SMALL, "num_key_value_heads": 4},
        layer_types=DELTA["layer_types"],
        linear_head_dim=8,
        linear_num_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
}
if not hasattr(modeling_kimi_linear, "causal_conv1d_fn"):  # of the oldest transformers that we take
    del BY_LEVELS["kimi-linear"]
RECURRENT |= BY_LEVELS
if hasattr(transformers, "Lfm3Config"):  # not in the oldest transformers that we take
    RECURRENT["lfm3"] = lambda: transformers.Lfm3Config(**GROUPED, **CONVOLUTIONS)
if not hasattr(transformers.Gemma4TextConfig, "kv_sharing_modes"):  # in the oldest transformers that we take
    del FAMILIES["gemma4-shared"]
# Soft-capped scores, and no attention at all: transformers refuses sdpa for them
EAGER_ONLY = {"gemma2", "mamba", "mamba2", "falcon-mamba"}


def make_model(config: PretrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose logits are spread enough for argmaxes to be clear."""
    torch.manual_seed(seed)
    model = model_from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def greedy_tokens(model: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """What transformers' own greedy decoding adds to a prompt."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **options)
    return found[0, len(prompt) :].tolist()


def make_tokenizer(*, swapped: bool = False) -> PreTrainedTokenizerFast:
    """Bytes and an end-of-text token; `swapped` exchanges the ids of the first two bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swapped:
        alphabet[0], alphabet[1] = alphabet[1], alphabet[0]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def save_folder(
    folder: Path, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerFast | None = None, shard: str = "5GB"
) -> Path:
    """A Hugging Face folder of the model, sharded when `shard` is small."""
    model.generation_config.eos_token_id = 256
    model.save_pretrained(folder, max_shard_size=shard)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder
