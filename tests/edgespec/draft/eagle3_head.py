"""Tiny random EAGLE-3 heads in both published containers, and an independent forward of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from edgespec.model.family_logits import decoder_of
from offload.text_part import decoder_layers
from tests.support.families import GROUPED

HEADS, KEY_HEADS, HEAD_DIM, INNER = 4, 2, 12, 40  # heads are wider than h / HEADS
EPS, THETA = 1e-5, 500.0
TARGET = LlamaConfig(**{**GROUPED, "num_hidden_layers": 8})  # in `target` of the room's tests
ALL_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a head is to be."""

    container: str = "plain"
    family: str = "llama"
    width: int = 32
    target_width: int = 32
    vocab: int = 257
    draft_vocab: int = 100
    layers: tuple[int, ...] | None = None  # as the config states them
    read: tuple[int, ...] = (2, 4, 5)  # the states H[j] that are meant, for a target of eight layers
    num_layers: int = 1
    flags: frozenset[str] = frozenset()
    has_bias: bool = False
    owns_embedding: bool = False
    owns_head: bool = True
    use_aux: bool = True


def random_weight(generator: torch.Generator, *shape: int) -> Tensor:
    """A norm's weight, or a matrix that keeps the size of what it reads."""
    if len(shape) == 1:
        return 1 + 0.3 * torch.randn(*shape, generator=generator)
    return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


def tensors_of(head: Head, *, seed: int = 5) -> dict[str, Tensor]:
    """Random tensors under the container's names."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(random_weight, generator)
    h, n = head.width, len(head.read)
    found = {"norm.weight": random(h)}
    if head.use_aux:
        found["fc.weight"] = random(h, n * head.target_width)
    if "norm_before_fc" in head.flags:
        found["input_norm.weight"] = random(n * head.target_width)
    if "fc_norm" in head.flags:
        found |= {f"fc_norm.{index}.weight": random(head.target_width) for index in range(n)}
    for layer in range(head.num_layers):
        first = "midlayer" if head.container == "plain" else "layers.0"
        name, width = (first, 2 * h) if layer == 0 else (f"layers.{layer}", h)
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KEY_HEADS * HEAD_DIM, "v_proj": KEY_HEADS * HEAD_DIM}
        for part, count in rows.items():
            found[f"{name}.self_attn.{part}.weight"] = 2 * random(count, width)
            if head.has_bias:
                found[f"{name}.self_attn.{part}.bias"] = random(count) - 1
        found[f"{name}.self_attn.o_proj.weight"] = random(h, HEADS * HEAD_DIM)
        if head.family == "qwen3":
            found |= {f"{name}.self_attn.{part}.weight": random(HEAD_DIM) for part in ("q_norm", "k_norm")}
        found |= {f"{name}.mlp.{part}.weight": random(INNER, h) for part in ("gate_proj", "up_proj")}
        found[f"{name}.mlp.down_proj.weight"] = random(h, INNER)
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if layer == 0 else [])]
        found |= {f"{name}.{norm}.weight": random(h) for norm in norms}
    if head.owns_head:
        found["lm_head.weight"] = 3 * random(head.draft_vocab, h)
    if head.draft_vocab != head.vocab:
        ids = torch.randperm(head.vocab, generator=generator)[: head.draft_vocab].sort().values
        found["d2t"] = ids - torch.arange(head.draft_vocab)
        found["t2d"] = torch.zeros(head.vocab, dtype=torch.bool).index_fill_(0, ids, value=True)
    if head.owns_embedding:
        found["embed_tokens.weight"] = 0.05 * random(head.vocab, h) * h**0.5
    return found


def config_of(head: Head) -> dict[str, Any]:
    """The config.json of the container."""
    layer: dict[str, Any] = {
        "model_type": head.family, "hidden_size": head.width, "intermediate_size": INNER, "vocab_size": head.vocab,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS,
        "rope_theta": THETA, "num_hidden_layers": head.num_layers, "attention_bias": head.has_bias,
        "max_position_embeddings": 512,
    }  # fmt: skip
    own: dict[str, Any] = {"draft_vocab_size": head.draft_vocab} | dict.fromkeys(head.flags, True)
    if head.target_width != head.width:
        own["target_hidden_size"] = head.target_width
    aux = {} if head.layers is None else {"eagle_aux_hidden_state_layer_ids": list(head.layers)}
    if head.container == "plain":
        if head.layers is not None or not head.use_aux:
            own["eagle_config"] = {**aux, "use_aux_hidden_state": head.use_aux}
        return {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", **layer, **own}
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    return {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "speculators_version": "0.3.0",
        "norm_before_residual": False, **own, **aux, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": verifier,
                               "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
    }  # fmt: skip


def write_head(folder: Path, head: Head, *, is_torch_file: bool = False) -> Path:
    """Write a head's folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(head)), encoding="utf-8")
    if is_torch_file:
        torch.save(tensors_of(head), folder / "pytorch_model.bin")
    else:
        save_file(tensors_of(head), folder / "model.safetensors")
    return folder


def in_doubles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A page's tensors, for a forward whose own rounding does not count."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def states_of(target: PreTrainedModel, ids: list[int]) -> list[Tensor]:
    """H[j] [t, h_t]: what goes into each layer, what leaves the last one, and last the output of the final norm."""
    found: list[Tensor] = []
    layers = decoder_layers(target)[1]

    def before(_module: nn.Module, arguments: Any, named: Any) -> None:
        found.append((arguments[0] if arguments else named["hidden_states"])[0])

    def after(_module: nn.Module, _arguments: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0])

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(after))
    last = decoder_of(target)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return [*found, last]


def reference(
    head: Head, t: dict[str, Tensor], states: list[Tensor], embed: Tensor, output: Tensor, text: list[int],
    path: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The page's forward, row by row: what is recycled [path, h] and logits [path, V] of a root and nodes below it."""

    def rms(x: Tensor, name: str) -> Tensor:
        return t[f"{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()

    def project(x: Tensor, name: str) -> Tensor:
        found = x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)
        found = found.unflatten(-1, (-1, HEAD_DIM))  # [rows, heads, d]
        if name.endswith("v_proj"):
            return found
        found = rms(found, name.replace("_proj", "_norm")) if head.family == "qwen3" else found
        angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        a, b = found.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    parts = [states[layer] for layer in head.read]
    if "norm_before_fc" in head.flags:
        parts = list(rms(torch.cat(parts, -1), "input_norm").chunk(len(parts), -1))
    if "fc_norm" in head.flags:
        parts = [rms(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
    features = torch.cat(parts, -1) @ t["fc.weight"].T if head.use_aux else states[-1]  # G of each token of the text
    tokens, logits = [*text[1:], *path], []
    for count in range(len(text), len(text) + len(path)):  # one more row each time
        e = t.get("embed_tokens.weight", embed)[tokens[:count]]
        x = features
        for layer in range(head.num_layers):
            p = f"layers.{layer}" if layer or head.container != "plain" else "midlayer"
            n = rms(x, f"{p}.hidden_norm") if layer == 0 else rms(x, f"{p}.input_layernorm")
            inputs = torch.cat([rms(e, f"{p}.input_layernorm"), n], -1) if layer == 0 else n
            x = n if layer == 0 and "norm_before_residual" in head.flags else x
            q, k, v = (project(inputs, f"{p}.self_attn.{one}_proj") for one in "qkv")
            k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD_DIM**-0.5
            weights = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf).softmax(-1)
            x = x + torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ t[f"{p}.self_attn.o_proj.weight"].T
            y = rms(x, f"{p}.post_attention_layernorm")
            gate = torch.nn.functional.silu(y @ t[f"{p}.mlp.gate_proj.weight"].T)
            x = x + (gate * (y @ t[f"{p}.mlp.up_proj.weight"].T)) @ t[f"{p}.mlp.down_proj.weight"].T
        known = rms(x[-1], "norm") @ t.get("lm_head.weight", output).T
        ids = torch.arange(len(known)) + t.get("d2t", 0)
        logits.append(known.new_full((head.vocab,), -torch.inf).index_put((ids,), known))
        features = torch.cat([features, (rms(x[-1:], "norm") if "norm_output" in head.flags else x[-1:])])
    return features[len(text) :], torch.stack(logits)
