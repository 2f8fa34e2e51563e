"""Heads and drafters as GGUF files, as llama.cpp's converter writes them from their folders in the plain container."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from edgespec import Engine
from offload.formats.gguf_blocks import TYPES, UNPACKED
from offload.native.compiler import is_available
from tests.edgespec.draft.dflash_drafter import SELECTOR
from tests.offload.gguf.files import write_gguf
from tests.support.block_scales import HALVES
from tests.support.families import make_tokenizer

F32, I64 = 0, 27
DEVIATION = 0.02  # of random blocks' numbers
BOUND = {"rtol": 0.02, "atol": 1e-4}  # of chances, after some layers whose kernels round rows to 15 bits
KINDS = tuple(name for name, block in TYPES.items() if not block.is_unpacked)  # of blocks
IN_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "hidden_norm": "attn_norm_2",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.kernel_projection": "ffn_conv_proj",
    "attention_conv": "attn_conv", "mlp_conv": "ffn_conv", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj", "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor",
    "candidate_selector.successor_codebook": "selector_successor",
}  # fmt: skip
SCALES = {"embedding_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
          "final_logit_softcapping": "final_logit_softcapping"}  # fmt: skip
LEFT_OUT = ("t2d", "verifier_lm_head")


def gguf_name(name: str) -> str:
    """The name of a folder's tensor in a file."""
    name = f"{name}.weight" if name.endswith("_codebook") else name
    path, _, leaf = name.rpartition(".")
    if leaf == "base_kernel":
        return f"{gguf_name(f'{path}.weight').removesuffix('.weight')}_base"
    found = re.fullmatch(r"(?:midlayer|layers\.(\d+))\.(.+)", path)
    return f"blk.{found[1] or 0}.{IN_LAYER[found[2]]}.{leaf}" if found else f"{OUTSIDE[path]}.{leaf}"


def in_turn(rows: Tensor, heads: int) -> Tensor:
    """Rows of a rotation whose two halves lie in turn, as llama.cpp's Llama has them."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def random_blocks(kind: str, num_weights: int, *, seed: int) -> tuple[bytes, Tensor]:
    """Random blocks of a type, and the numbers that they hold [weights]."""
    block = TYPES[kind]
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (num_weights // block.weights, block.num_bytes), generator=generator).to(torch.uint8)
    numbers = torch.empty(len(bits), block.weights)
    if block.is_unpacked:
        numbers = torch.randn(num_weights, generator=generator).mul(DEVIATION).to(UNPACKED[kind])
        return numbers.view(torch.uint8).numpy().tobytes(), numbers.float()
    if kind == "MXFP4":
        bits[:, 0] = 127 - 8  # of 2^-8
    if kind == "NVFP4":
        bits[:, :4] &= 7  # of 7 * 2^-9 at most

    def unpacked(*scales: float) -> Tensor:
        halves = torch.tensor(scales, dtype=torch.half).view(torch.uint8).view(-1, 2)
        for place, scale in zip(HALVES[kind], halves, strict=False):
            bits[:, place : place + 2] = scale
        if kind == "IQ1_M":  # in the highest four bits of four words
            bits[:, 49::2] = bits[:, 49::2] & 15 | torch.stack((halves[0] << 4, halves[0] & 240), 1).flatten()
        block.unpack(bits, numbers)
        return numbers

    # Numbers of one sign would make all rows alike: where there are minima, they take the mean away
    minimum = -float(unpacked(1.0, 0.0).mean() / unpacked(0.0, 1.0).mean()) if len(HALVES[kind]) > 1 else 0.0
    scale = DEVIATION / float(unpacked(1.0, minimum).std())
    unpacked(scale, minimum * scale)
    return bits.numpy().tobytes(), numbers.view(-1)


def check_is_multiplied(engine: Engine) -> None:
    """No linear layer of the draft's unpacks what lies in blocks, where kernels can be compiled."""
    assert engine.draft_model is not None
    modules = engine.draft_model.model.named_modules()
    linear = {name: one for name, one in modules if type(one) is nn.Linear and "weight_packed" in one._modules}
    assert linear
    assert not is_available() or all("forward" in vars(one) for one in linear.values())


def settings_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the converter states."""
    tokens = sorted((vocab := make_tokenizer().get_vocab()), key=lambda token: vocab[token])
    own: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "rope.freq_base": float(config["rope_theta"]),
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"], "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }  # fmt: skip
    inner, further = config.get("dflash_config"), {}
    if inner is None:
        stated = {**config, **config.get("eagle_config", {})}
        own |= {
            "vocab_size": config["vocab_size"], "rope.dimension_count": config["head_dim"],
            "target_layers": stated.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5]),
            "target_hidden_size": config.get("target_hidden_size", config["hidden_size"]),
            **{name: stated.get(name, False) for name in ("norm_before_residual", "norm_before_fc")},
        }  # fmt: skip
    else:
        own |= {"block_size": config["block_size"], "target_layers": [one + 1 for one in inner["target_layer_ids"]]}
        if "layer_types" in config:
            slides = [kind == "sliding_attention" for kind in config["layer_types"]]
            own |= {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": slides}
        own |= {key: inner[key] for key in SELECTOR if key in inner}
        own |= {key: inner[name] for key, name in SCALES.items() if name in inner}
        own |= {"attention.causal": config["is_causal"]} if "is_causal" in config else {}
        if any("markov" in name for name in tensors):
            own |= {"sample_from_anchor": True, "has_confidence_head": True}
        further = {"tokenizer.ggml.mask_token_id": inner["mask_token_id"]}
    arch = "eagle3" if inner is None else "dflash"
    return {
        "general.architecture": arch, **{f"{arch}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3], "tokenizer.ggml.merges": ["! !"], **further,
    }  # fmt: skip


Packing = Callable[[str, Tensor], "tuple[int, bytes] | None"]  # of a tensor -> GGML's type and bytes; None: as it is


def write_as_gguf(
    folder: Path, path: Path, *, settings: Mapping[str, Any] | None = None, pack: Packing = lambda *_: None,
    change: Callable[[str, Tensor], tuple[str, Tensor]] = lambda name, tensor: (name, tensor),
) -> Path:  # fmt: skip
    """Write a folder's draft as a file with other settings, of which None is left out, and other tensors."""
    config, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    every = {**settings_of(config, stored), **(settings or {})}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = []
    for name, tensor in stored.items():
        if name.startswith(LEFT_OUT):
            continue
        if name == "d2t":
            ids = tensor.long() + torch.arange(len(tensor))
            tensors.append(("d2t", tuple(ids.shape), I64, ids.numpy().tobytes()))
            continue
        own = gguf_name(name)
        if own.rpartition(".")[0].rpartition(".")[2] in heads and "dflash_config" not in config:
            tensor = in_turn(tensor, heads[own.rpartition(".")[0].rpartition(".")[2]])
        own, tensor = change(own, tensor)
        kind, content = pack(own, tensor) or (F32, tensor.float().contiguous().numpy().tobytes())
        tensors.append((own, tuple(tensor.shape), kind, content))
    return write_gguf(path, {key: one for key, one in every.items() if one is not None}, tensors)
