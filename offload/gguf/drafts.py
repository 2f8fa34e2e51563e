"""The lines of the table for drafts: heads and drafters that read a target's hidden states, which llama.cpp converts.

A file has its target's tokens. Its settings and tensors are given as the plain container's config.json and names have
them. Source: `conversion/llama.py` and `conversion/qwen.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from offload.checkpoint import TensorEntry
from offload.gguf.entries import entry
from offload.gguf.family import GEMMA, HEAD_DIM, HEAD_NORMS, Family
from offload.gguf.gemma import GEMMA_4
from offload.gguf.header import GgufHeader, GgufTensor
from offload.gguf.parts import module, named
from offload.gguf.refusal import not_read
from offload.gguf.rules import PATTERN, SEES_ALL, SEES_WINDOW, two_rotations, windows
from offload.gguf.storage_types import OffsetIds

WINDOW = "attention.sliding_window"
LAYERS = ("target_layers", "extract_layers")  # the latter of files of before July 2026
DFLASH = {
    **{name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")},
    "embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc")


def _map(_: str, tensor: GgufTensor, __: Mapping[str, Any]) -> Iterator[TensorEntry]:
    if tensor.block.name != "I64":
        raise ValueError("a map of ids holds no whole numbers")
    yield entry("d2t", tensor, (tensor.num_bytes,), computed=OffsetIds(shape=tensor.shape))


def _states(header: GgufHeader, own: dict[str, Any]) -> list[int]:
    """Return how many layers the stream has passed for each of the target's states that are read."""
    found = next((own.pop(key) for key in LAYERS if key in own), None)
    if not isinstance(found, list) or not found:
        raise not_read(header, f"states {header.architecture}.target_layers = {found}")
    return found


def eagle3(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take what an EAGLE-3 head states of its own."""
    fields |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": _states(header, own),
        **{name: own.pop(name) for name in ("target_hidden_size", *EAGLE3_FLAGS) if name in own},
    }


def dflash(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take what a drafter of blocks states of its own; its states count layers, and config.json numbers them."""
    inner = {
        "target_layer_ids": [layer - 1 for layer in _states(header, own)],
        "mask_token_id": header.settings.get("tokenizer.ggml.mask_token_id"),
        **{name: own.pop(key) for key, name in DFLASH.items() if key in own},
    }
    own.pop("rope.dimension_sections", None)  # of images: a text's positions are the same in all
    own.pop("has_confidence_head", None)
    rank = header.tensors["markov_w1.weight"].shape[-1] if "markov_w1.weight" in header.tensors else None
    if rank is not None:
        inner |= {"projector_type": "dspark", "markov_rank": rank, "markov_head_type": "vanilla"}
    is_causal, count = own.pop("attention.causal", None), own["block_count"]
    window, pattern = own.pop(WINDOW, 0), own.pop(PATTERN, None)
    if window and (not isinstance(pattern, list) or len(pattern) != count):
        raise not_read(header, f"states dflash.{PATTERN} = {pattern}")
    slides = [bool(window and each) for each in pattern or [False] * count]
    fields |= {
        "architectures": ["DFlash2DraftModel" if "selector_rank" in inner else "DFlashDraftModel"],
        "block_size": own.pop("block_size", None),
        "dflash_config": inner,
        "layer_types": [SEES_WINDOW if one else SEES_ALL for one in slides],
        "sliding_window": window if any(slides) else None,
        **({} if is_causal is None else {"is_causal": is_causal}),
        **({"sample_from_anchor": own.pop("sample_from_anchor")} if "sample_from_anchor" in own else {}),
    }


def assistant(header: GgufHeader, own: dict[str, Any], _: dict[str, Any]) -> None:
    """Take that all layers attend the target's keys, and none is one for a further token of another model."""
    for key in ("attention.shared_kv_layers", "nextn_predict_layers"):
        if (found := own.pop(key, own["block_count"])) != own["block_count"]:
            raise not_read(header, f"states {header.architecture}.{key} = {found} of {own['block_count']} layers")


def known_tokens(header: GgufHeader, _: dict[str, Any], fields: dict[str, Any]) -> None:
    """Find how many tokens the draft knows: all of its target's, or those that its head has rows for."""
    known = next((header.tensors[name] for name in ("d2t", "output.weight") if name in header.tensors), None)
    fields["draft_vocab_size"] = fields["vocab_size"] if known is None else known.shape[0]


ENDS = {
    "fc.weight": module("fc"),
    "token_embd.weight": module("embed_tokens"),
    "output_norm.weight": named("norm.weight"),
    "output.weight": module("lm_head"),
    "d2t": _map,
}
DRAFTS = {
    "eagle3": Family(
        model_type="llama",
        layers="layers",
        names={"attn_norm_2": "hidden_norm", "hidden_norm": "hidden_norm"},
        parts={**ENDS, "enc.output_norm.weight": named("input_norm.weight")},
        settings=HEAD_DIM,
        rotates_neighbours=True,
        scalings=("linear", "llama3", "yarn"),
        first=(eagle3,),
        rules=(known_tokens,),
    ),
    "dflash": Family(
        model_type="qwen3",
        layers="layers",
        names=HEAD_NORMS,
        parts={
            **ENDS,
            "enc.output_norm.weight": named("hidden_norm.weight"),
            "markov_w1.weight": module("markov_head.markov_w1"),
            "markov_w2.weight": module("markov_head.markov_w2"),
            "conf_proj.weight": named("confidence_head.proj.weight"),
            "conf_proj.bias": named("confidence_head.proj.bias"),
            "attn_conv_base": named("attention_conv.base_kernel"),
            "ffn_conv_base": named("mlp_conv.base_kernel"),
            "attn_conv_proj.weight": module("attention_conv.kernel_projection"),
            "ffn_conv_proj.weight": module("mlp_conv.kernel_projection"),
            "selector_hidden.weight": module("candidate_selector.hidden_projection"),
            "selector_predecessor.weight": module("candidate_selector.predecessor_codebook"),
            "selector_successor.weight": module("candidate_selector.successor_codebook"),
        },
        settings=HEAD_DIM,
        scalings=("linear", "yarn"),
        first=(dflash,),
        rules=(known_tokens,),
    ),
    "gemma4-assistant": replace(
        GEMMA_4,
        names={**HEAD_NORMS, **GEMMA, "layer_output_scale": "layer_scalar"},
        outside={},
        parts={f"nextn.{name}.weight": module(name) for name in ("pre_projection", "post_projection")},
        lacks=frozenset({"attn_k", "attn_v"}),
        settings={**GEMMA_4.settings, "embedding_length_out": "backbone_hidden_size"},
        needs=(GEMMA_4.needs - {"embedding_length_per_layer_input"}) | {"embedding_length_out"},
        first=(assistant, *GEMMA_4.first),
        rules=(windows(every=6), two_rotations),
    ),
}
