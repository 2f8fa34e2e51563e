"""Tiny random Gemma 4 assistants as they are published, and an independent forward of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.draft.readings import AS_STATED, Reading
from tests.edgespec.draft.eagle3_head import random_weight
from tests.edgespec.draft.gguf_drafts import F32, Packing
from tests.offload.gguf.files import write_gguf
from tests.support.families import make_tokenizer

HEADS, HEAD_DIM, INNER = 4, 8, 40  # heads as those of `FAMILIES`' Gemma 4
EPS, THETA, GLOBAL_THETA, PART = 1e-6, 10000.0, 1e6, 0.25
SLIDES, SEES_ALL = "sliding_attention", "full_attention"
Lent = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """What an assistant is to be."""

    model_type: str = "gemma4_assistant"
    width: int = 20
    target_width: int = 32
    vocab: int = 257
    kinds: tuple[str, ...] = (SLIDES, SLIDES, SEES_ALL)
    window: int = 12
    global_dim: int = 24  # of a head in layers that see all
    centroids: int = 0  # of an ordered head; 0: a whole one
    computed: int = 0  # of these
    keys: tuple[tuple[str, Any], ...] = ()  # further ones of the config
    inner: tuple[tuple[str, Any], ...] = ()  # and of its text_config

    def dim_of(self, kind: str) -> int:
        """The numbers of a head."""
        return HEAD_DIM if kind == SLIDES else self.global_dim


def tensors_of(form: Assistant, *, seed: int = 4) -> dict[str, Tensor]:
    """Random tensors under the published names."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(random_weight, generator)
    h, h_t = form.width, form.target_width
    found = {
        "pre_projection.weight": random(h, 2 * h_t), "post_projection.weight": 0.5 * random(h_t, h),
        "model.norm.weight": random(h), "model.embed_tokens.weight": 1.5 * random(form.vocab, h),
    }  # fmt: skip
    found["pre_projection.weight"][:, :h_t] *= 8  # a tiny target's embeddings are small beside its hidden states
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for layer, kind in enumerate(form.kinds):
        name = f"model.layers.{layer}"
        rows = HEADS * form.dim_of(kind)
        # Layers add to the stream less than is there, as trained ones do: errors of rounding would grow with the depth
        found |= {f"{name}.{norm}.weight": (0.25 if "post" in norm else 1) * random(h) for norm in norms}
        found[f"{name}.self_attn.q_proj.weight"] = random(rows, h)
        found[f"{name}.self_attn.q_norm.weight"] = 0.5 * random(form.dim_of(kind))
        found[f"{name}.self_attn.o_proj.weight"] = random(h, rows)
        found |= {f"{name}.mlp.{part}.weight": random(INNER, h) for part in ("gate_proj", "up_proj")}
        found[f"{name}.mlp.down_proj.weight"] = random(h, INNER)
        found[f"{name}.layer_scalar"] = torch.tensor([0.7 + 0.1 * layer])
    if form.centroids:
        found["masked_embedding.centroids.weight"] = random(form.centroids, h)
        found["masked_embedding.token_ordering"] = torch.randperm(form.vocab, generator=generator)
    return found


def config_of(form: Assistant) -> dict[str, Any]:
    """The config.json."""
    text = {
        "model_type": form.model_type.replace("_assistant", "_text"), "hidden_size": form.width,
        "intermediate_size": INNER, "num_hidden_layers": len(form.kinds), "num_attention_heads": HEADS,
        "num_key_value_heads": 2, "head_dim": HEAD_DIM, "global_head_dim": form.global_dim,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "vocab_size": form.vocab,
        "sliding_window": form.window, "layer_types": list(form.kinds), "num_kv_shared_layers": len(form.kinds),
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 256, "pad_token_id": 0, "rms_norm_eps": EPS, "tie_word_embeddings": True,
        "rope_parameters": {
            SLIDES: {"rope_type": "default", "rope_theta": THETA},
            SEES_ALL: {"rope_type": "proportional", "partial_rotary_factor": PART, "rope_theta": GLOBAL_THETA},
        },
        **dict(form.inner),
    }  # fmt: skip
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": form.model_type, "text_config": text,
        "backbone_hidden_size": form.target_width, "use_ordered_embeddings": bool(form.centroids),
        "num_centroids": form.centroids or 2048, "centroid_intermediate_top_k": form.computed or 32,
        "tie_word_embeddings": True, "dtype": "float32", **dict(form.keys),
    }  # fmt: skip


def write_assistant(folder: Path, form: Assistant, *, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """Write an assistant, perhaps with other tensors, and return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(form)))
    save_file(dict(tensors or tensors_of(form)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def states_of(target: PreTrainedModel, text: Sequence[int], *, is_normed: bool = True) -> tuple[Lent, Tensor]:
    """What transformers' own target lends after a text: keys and values by kind, and its last hidden states [t, h_t].

    These are taken after the final norm, or before it.
    """
    decoder = getattr(target.model, "language_model", target.model)  # of a target with a tower for images
    seen: list[Tensor] = []
    handle = decoder.norm.register_forward_pre_hook(lambda _module, given: seen.append(given[0][0]))
    found = decoder(torch.tensor([list(text)]), return_shared_kv_states=True, use_cache=False)
    handle.remove()
    lent = {kind: found.shared_kv_states[kind] for kind in (SLIDES, SEES_ALL)}
    return lent, found.last_hidden_state[0] if is_normed else seen[0]


def _norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _rotated(query: Tensor, kind: str, place: int) -> Tensor:
    """A head [d] at a place: in layers that see all, a quarter of the pairs turns."""
    d = query.shape[-1]
    turning = d // 2 if kind == SLIDES else int(PART * d // 2)
    theta = THETA if kind == SLIDES else GLOBAL_THETA
    angles = torch.zeros(d // 2, dtype=torch.float64)
    angles[:turning] = place * theta ** -(2 * torch.arange(turning, dtype=torch.float64) / d)
    one, other = query[..., : d // 2], query[..., d // 2 :]
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


@torch.no_grad()
def node(
    form: Assistant,
    tensors: Mapping[str, Tensor],
    embedded: Tensor,
    feature: Tensor,
    lent: Lent,
    *,
    place: int,
    reading: Reading = AS_STATED,
) -> tuple[Tensor, Tensor]:
    """The page's forward of one node: its logits [V], and the feature [h_t] that it hands on."""
    halves = [embedded, feature]
    z = tensors["pre_projection.weight"] @ torch.cat(halves[::-1] if reading.swaps_inputs else halves)
    for layer, kind in enumerate(form.kinds):

        def own(name: str, layer: int = layer) -> Tensor:
            return tensors[f"model.layers.{layer}.{name}"]

        keys, values = (rows[0] for rows in lent[kind])
        first = max(0, keys.shape[1] - form.window - 1) if kind == SLIDES else 0
        d, group = form.dim_of(kind), HEADS // keys.shape[0]
        query = (own("self_attn.q_proj.weight") @ _norm(z, own("input_layernorm.weight"))).view(HEADS, d)
        query = _rotated(_norm(query, own("self_attn.q_norm.weight")), kind, place)
        heads = []
        for head in range(HEADS):
            weights = (keys[head // group, first:] @ query[head]).softmax(0)
            heads.append(weights @ values[head // group, first:])
        z = z + _norm(own("self_attn.o_proj.weight") @ torch.cat(heads), own("post_attention_layernorm.weight"))
        y = _norm(z, own("pre_feedforward_layernorm.weight"))
        gate = torch.nn.functional.gelu(own("mlp.gate_proj.weight") @ y, approximate="tanh")
        made = own("mlp.down_proj.weight") @ (gate * (own("mlp.up_proj.weight") @ y))
        z = (z + _norm(made, own("post_feedforward_layernorm.weight"))) * own("layer_scalar")
    y = _norm(z, tensors["model.norm.weight"])
    logits = tensors["model.embed_tokens.weight"] @ y
    if form.centroids:
        groups = tensors["masked_embedding.token_ordering"].view(form.centroids, -1)
        best = (tensors["masked_embedding.centroids.weight"] @ y).argsort(descending=True)[: form.computed]
        known = torch.zeros(form.vocab, dtype=torch.bool)
        known[groups[best].flatten()] = True
        logits = torch.where(known, logits, logits[known].min() - 1)
    return logits, tensors["post_projection.weight"] @ (z if reading.flips_output else y)


@torch.no_grad()
def of_paths(
    form: Assistant, tensors: Mapping[str, Tensor], target: PreTrainedModel, text: Sequence[int],
    paths: Sequence[Sequence[int]],
) -> Tensor:  # fmt: skip
    """The logits [nodes, V] of the ends of paths, whose first token is the root's, behind a text."""
    lent, hidden = states_of(target, text)
    table = target.get_input_embeddings().weight * form.target_width**0.5
    found = []
    for path in paths:
        feature = hidden[-1]
        for token in path:
            logits, feature = node(form, tensors, table[token], feature, lent, place=len(text))
        found.append(logits)
    return torch.stack(found)


IN_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "layer_scalar": "layer_output_scale",
}  # fmt: skip
OUTSIDE = {
    "pre_projection": "nextn.pre_projection", "post_projection": "nextn.post_projection",
    "model.norm": "output_norm", "model.embed_tokens": "token_embd",
}  # fmt: skip
NEVER = 1e30  # a factor by which a frequency is as good as none


def gguf_name(name: str) -> str:
    """The name of a folder's tensor in a file."""
    path = name.removesuffix(".weight")
    if not path.startswith("model.layers."):
        return f"{OUTSIDE[path]}.weight"
    layer, own = path.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{IN_LAYER[own]}.weight"


def gguf_settings(form: Assistant) -> dict[str, Any]:
    """What llama.cpp's converter states."""
    tokens = sorted((vocab := make_tokenizer().get_vocab()), key=lambda token: vocab[token])
    own: dict[str, Any] = {
        "block_count": len(form.kinds), "context_length": 256, "embedding_length": form.width,
        "embedding_length_out": form.target_width, "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": [2 if kind == SLIDES else 1 for kind in form.kinds],
        "attention.layer_norm_rms_epsilon": EPS, "rope.freq_base": GLOBAL_THETA, "rope.freq_base_swa": THETA,
        "attention.sliding_window": form.window, "embedding_length_per_layer_input": 0,
        "attention.sliding_window_pattern": [kind == SLIDES for kind in form.kinds],
        "attention.shared_kv_layers": len(form.kinds), "nextn_predict_layers": len(form.kinds),
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), form.global_dim),
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), HEAD_DIM
        ),
    }  # fmt: skip
    return {
        "general.architecture": "gemma4-assistant",
        **{f"gemma4-assistant.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3], "tokenizer.ggml.merges": ["! !"],
    }  # fmt: skip


def write_as_gguf(
    path: Path, form: Assistant, *, settings: Mapping[str, Any] | None = None, pack: Packing = lambda *_: None,
    change: Callable[[str, Tensor], tuple[str, Tensor] | None] = lambda name, tensor: (name, tensor),
) -> Path:  # fmt: skip
    """Write an assistant as a file with other settings and tensors, of which None is left out."""
    turning = int(PART * form.global_dim // 2)
    factors = torch.tensor([1.0] * turning + [NEVER] * (form.global_dim // 2 - turning))
    tensors = {gguf_name(name): one for name, one in tensors_of(form).items() if "masked_embedding" not in name}
    stored = []
    for pair in ({**tensors, "rope_freqs.weight": factors}).items():
        if (changed := change(*pair)) is not None:
            kind, content = pack(*changed) or (F32, changed[1].float().contiguous().numpy().tobytes())
            stored.append((changed[0], tuple(changed[1].shape), kind, content))
    every = {**gguf_settings(form), **(settings or {})}
    return write_gguf(path, {key: one for key, one in every.items() if one is not None}, stored)
