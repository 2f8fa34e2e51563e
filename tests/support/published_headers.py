"""GGUF headers of published models without their weights: settings, and tensors' names, shapes and types.

Sizes are those of the models' config.json, and the types are llama.cpp's recipe Q4_K_M (`llama_tensor_get_type`). That
a file has as many tensors as the published one says that none is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from offload.formats.gguf_blocks import TYPES
from tests.offload.gguf.files import ALIGNMENT, write_gguf
from tests.support.published_configs import GLM_AIR

PLAIN = ("norm.weight", ".bias", "ssm_a", "conv1d.weight", "ffn_gate_inp.weight")  # ends of names: never packed
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are no multiple of 256
NEXTN = {"eh_proj": 2, "enorm": 0, "hnorm": 0, "shared_head_norm": 0}  # parts of a layer for a further token

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Published:
    """A published file, by what it holds."""

    architecture: str
    settings: dict[str, Any]
    shapes: Shapes


def qwen36_27b() -> Published:
    """Qwen3.6-27B with its layer for a further token: 64 layers and one, of which every fourth sees the whole text."""
    h, inner, heads, keys, size = 5120, 17408, 24, 4, 256
    key_heads, value_heads, state = 16, 48, 128
    mixed, joined = value_heads * state, (2 * key_heads + value_heads) * state
    shapes: Shapes = {"output.weight": (248320, h), "token_embd.weight": (248320, h), "output_norm.weight": (h,)}
    for layer in range(65):
        own: Shapes = {
            "ffn_down.weight": (h, inner), "ffn_gate.weight": (inner, h), "ffn_up.weight": (inner, h),
            "attn_norm.weight": (h,), "post_attention_norm.weight": (h,),
        }  # fmt: skip
        if layer % 4 == 3 or layer == 64:
            own |= {
                "attn_q.weight": (2 * heads * size, h), "attn_k.weight": (keys * size, h),
                "attn_v.weight": (keys * size, h), "attn_output.weight": (h, heads * size),
                "attn_q_norm.weight": (size,), "attn_k_norm.weight": (size,),
            }  # fmt: skip
        else:
            own |= {
                "attn_qkv.weight": (joined, h), "attn_gate.weight": (mixed, h), "ssm_out.weight": (h, mixed),
                "ssm_alpha.weight": (value_heads, h), "ssm_beta.weight": (value_heads, h), "ssm_a": (value_heads,),
                "ssm_dt.bias": (value_heads,), "ssm_conv1d.weight": (joined, 4), "ssm_norm.weight": (state,),
            }  # fmt: skip
        own |= _further(h) if layer == 64 else {}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    settings = {
        "context_length": 262144, "embedding_length": h, "feed_forward_length": inner, "vocab_size": 248320,
        "attention.head_count": heads, "attention.head_count_kv": keys, "attention.key_length": size,
        "attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e7,
        "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4,
        "ssm.conv_kernel": 4, "ssm.state_size": state, "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads, "ssm.inner_size": mixed, "block_count": 65, "nextn_predict_layers": 1,
    }  # fmt: skip
    return Published("qwen35", settings, shapes)


def glm_air() -> Published:
    """GLM-4.5-Air with its layer for a further token, and that layer's copies of table and head."""
    c = GLM_AIR
    h, experts, inner, vocab = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"], c["vocab_size"]
    heads, keys, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    last = c["num_hidden_layers"]
    shapes: Shapes = {"output.weight": (vocab, h), "token_embd.weight": (vocab, h), "output_norm.weight": (h,)}
    for layer in range(last + 1):
        own: Shapes = {"attn_norm.weight": (h,), "post_attention_norm.weight": (h,)}
        for name, count in (("q", heads), ("k", keys), ("v", keys)):
            own |= {f"attn_{name}.weight": (count * size, h), f"attn_{name}.bias": (count * size,)}
        own["attn_output.weight"] = (h, heads * size)
        if layer < c["first_k_dense_replace"]:
            own |= _gated("", c["intermediate_size"], h)
        else:
            own |= _routed(experts, inner, h)
        if layer == last:
            own |= _further(h) | dict.fromkeys(
                ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"), (vocab, h)
            )
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    settings = {
        "context_length": 131072, "embedding_length": h, "feed_forward_length": c["intermediate_size"],
        "vocab_size": vocab, "attention.head_count": heads, "attention.head_count_kv": keys,
        "attention.key_length": size, "attention.value_length": size, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6, "rope.dimension_count": 64, "expert_count": experts, "expert_used_count": 8,
        "expert_group_count": 1, "expert_group_used_count": 1, "expert_feed_forward_length": inner,
        "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.0,
        "expert_weights_norm": True, "block_count": last + 1, "nextn_predict_layers": 1,
    }  # fmt: skip
    return Published("glm4moe", settings, shapes)


def indexed(architecture: str, model_type: str) -> Published:
    """DeepSeek-V3.2 or GLM-5, whose attention is indexed, in transformers' sizes.

    It has the dense layers, one with experts, and one for a further token.
    """
    c = CONFIG_MAPPING[model_type]()
    h, heads, rotated = c.hidden_size, c.num_attention_heads, c.qk_rope_head_dim
    queries, latents, plain, values = c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
    size, dense = c.index_head_dim, c.mlp_layer_types.index("sparse")
    last = dense + 1
    shapes: Shapes = {"output.weight": (c.vocab_size, h), "token_embd.weight": (c.vocab_size, h)}
    shapes["output_norm.weight"] = (h,)
    for layer in range(last + 1):
        own: Shapes = {
            "attn_norm.weight": (h,), "ffn_norm.weight": (h,), "attn_q_a.weight": (queries, h),
            "attn_q_a_norm.weight": (queries,), "attn_q_b.weight": (heads * (plain + rotated), queries),
            "attn_kv_a_mqa.weight": (latents + rotated, h), "attn_kv_a_norm.weight": (latents,),
            "attn_k_b.weight": (heads, latents, plain), "attn_v_b.weight": (heads, values, latents),
            "attn_output.weight": (h, heads * values), "indexer.k_norm.weight": (size,),
            "indexer.k_norm.bias": (size,), "indexer.proj.weight": (c.index_n_heads, h),
            "indexer.attn_k.weight": (size, h), "indexer.attn_q_b.weight": (c.index_n_heads * size, queries),
        }  # fmt: skip
        own |= (
            _gated("", c.intermediate_size, h)
            if layer < dense
            else _routed(c.n_routed_experts, c.moe_intermediate_size, h)
        )
        own |= _further(h) if layer == last else {}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    settings = {
        "context_length": c.max_position_embeddings, "embedding_length": h, "feed_forward_length": c.intermediate_size,
        "vocab_size": c.vocab_size, "attention.head_count": heads, "attention.head_count_kv": 1,
        "attention.key_length": latents + rotated, "attention.value_length": latents,
        "attention.key_length_mla": plain + rotated, "attention.value_length_mla": values,
        "attention.q_lora_rank": queries, "attention.kv_lora_rank": latents, "rope.dimension_count": rotated,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": 1e4, "leading_dense_block_count": dense,
        "expert_count": c.n_routed_experts, "expert_used_count": c.num_experts_per_tok, "expert_shared_count": 1,
        "expert_group_count": c.n_group, "expert_group_used_count": c.topk_group, "expert_weights_norm": True,
        "expert_feed_forward_length": c.moe_intermediate_size, "expert_weights_scale": c.routed_scaling_factor,
        "expert_gating_func": 2, "attention.indexer.head_count": c.index_n_heads, "attention.indexer.key_length": size,
        "attention.indexer.top_k": c.index_topk, "block_count": last + 1, "nextn_predict_layers": 1,
    }  # fmt: skip
    return Published(architecture, settings, shapes)


def _routed(experts: int, inner: int, h: int) -> Shapes:
    own = {name: (experts, *shape) for name, shape in _gated("_exps", inner, h).items()}
    return own | {"ffn_gate_inp.weight": (experts, h), "exp_probs_b.bias": (experts,), **_gated("_shexp", inner, h)}


def _gated(end: str, inner: int, h: int) -> Shapes:
    ways = {"down": (h, inner), "gate": (inner, h), "up": (inner, h)}
    return {f"ffn_{way}{end}.weight": shape for way, shape in ways.items()}


def _further(h: int) -> Shapes:
    return {f"nextn.{name}.weight": (h, times * h) if times else (h,) for name, times in NEXTN.items()}


def _types(shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Yield the type of each tensor by the recipe."""
    num_layers = sum("post_attention_norm" in name for name in shapes)
    num_values = 0
    for name, shape in shapes.items():
        kind = "Q6_K" if name == "output.weight" else "Q5_K" if "attn_qkv" in name else "Q4_K"
        if "attn_v.weight" in name or "ffn_down" in name:
            place = num_values if "attn_v" in name else int(name.split(".")[1])
            num_values += "attn_v" in name
            eighth = num_layers // 8
            is_better = place < eighth or place >= 7 * num_layers // 8 or (place - eighth) % 3 == 2
            kind = "Q6_K" if is_better else kind
        if len(shape) == 1 or name.endswith(PLAIN):
            kind = "F32"
        yield name, FALLBACK[kind] if kind in FALLBACK and shape[-1] % 256 else kind


def write_header(path: Path, published: Published) -> Path:
    """The first megabytes of a published file, as one who downloads it has them."""
    offsets, tensors, end = [], [], 0
    for name, kind in _types(published.shapes):
        shape, block = published.shapes[name], TYPES[kind]
        offsets.append(end)
        tensors.append((name, shape, block.number, b""))
        num_bytes = math.prod(shape) // block.weights * block.num_bytes
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    own = {f"{published.architecture}.{name}": value for name, value in published.settings.items()}
    settings = {"general.architecture": published.architecture, "general.type": "model", "general.file_type": 15, **own}
    return write_gguf(path, settings, tensors, offsets=offsets)
