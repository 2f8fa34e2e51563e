"""Tiny random DFlash and DSpark drafters in both published containers, and an independent forward of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.edgespec.draft.eagle3_head import random_weight

HEADS, KEY_HEADS, HEAD_DIM, INNER = 4, 2, 12, 40
EPS, THETA = 1e-5, 500.0
MASK = 200
RANK = 6
GROUP, CANDIDATES = 8, 12  # of convolutions' channels; of a place
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CANDIDATES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """What a drafter is to be."""

    container: str = "plain"
    width: int = 32
    vocab: int = 257
    draft_vocab: int = 257
    ids: tuple[int, ...] | None = (1, 3, 6)  # as the config states them; None: it does not
    read: tuple[int, ...] = (2, 4, 7)  # the states H[j] that are meant, for a target of eight layers
    num_layers: int = 3
    block: int = 5
    windows: tuple[int | None, ...] = (None, None, None)  # of each layer
    causal: tuple[bool, ...] = (False, False, False)  # of each layer, within the block
    keys: tuple[tuple[str, Any], ...] = ()  # further ones of the config
    inner: tuple[tuple[str, Any], ...] = ()  # and of its dflash_config
    from_anchor: bool = False
    owns_ends: bool = False  # an embedding and a head
    markov: str | None = None  # the form of a DSpark drafter's head
    prefix: str = "markov_head"  # of its tensors
    selector: bool = False  # a DFlash2 drafter: convolutions within the block, and candidates


def tensors_of(drafter: Drafter, *, seed: int = 6) -> dict[str, Tensor]:
    """Random tensors under the containers' names."""
    generator = torch.Generator().manual_seed(seed)
    random = partial(random_weight, generator)
    h = drafter.width
    found = {"fc.weight": random(h, len(drafter.read) * h), "hidden_norm.weight": random(h), "norm.weight": random(h)}
    for layer in range(drafter.num_layers):
        name = f"layers.{layer}"
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KEY_HEADS * HEAD_DIM, "v_proj": KEY_HEADS * HEAD_DIM}
        found |= {f"{name}.self_attn.{part}.weight": 2 * random(count, h) for part, count in rows.items()}
        found[f"{name}.self_attn.o_proj.weight"] = random(h, HEADS * HEAD_DIM)
        found |= {f"{name}.self_attn.{part}.weight": 2 * random(HEAD_DIM) for part in ("q_norm", "k_norm")}
        found |= {f"{name}.mlp.{part}.weight": random(INNER, h) for part in ("gate_proj", "up_proj")}
        found[f"{name}.mlp.down_proj.weight"] = random(h, INNER)
        found |= {f"{name}.{norm}.weight": random(h) for norm in ("input_layernorm", "post_attention_layernorm")}
    if drafter.selector:
        for layer in range(drafter.num_layers):
            for part in ("attention_conv", "mlp_conv"):
                found[f"layers.{layer}.{part}.base_kernel"] = 0.5 + 0.3 * torch.randn(2, 2, h, generator=generator)
                found[f"layers.{layer}.{part}.kernel_projection.weight"] = 0.5 * random(4 * h // GROUP, h)
        found["candidate_selector.hidden_projection.weight"] = 2 * random(RANK, h)
        for name in ("predecessor", "successor"):
            found[f"candidate_selector.{name}_codebook"] = 3 * random(drafter.vocab, RANK)
    if drafter.owns_ends:
        found["embed_tokens.weight"] = random(drafter.vocab, h)
        found["lm_head.weight"] = 3 * random(drafter.draft_vocab, h)
        found["verifier_lm_head.weight"] = random(4, h)
    if drafter.markov is not None:
        found[f"{drafter.prefix}.markov_w1.weight"] = 4 * random(drafter.vocab, RANK)
        found[f"{drafter.prefix}.markov_w2.weight"] = 3 * random(drafter.draft_vocab, RANK)
        found |= {"confidence_head.proj.weight": random(1, h + RANK), "confidence_head.proj.bias": random(1)}
        projections = {"gated": ("gate_proj", RANK, h + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + h)}
        if drafter.markov in projections:
            name, rows, columns = projections[drafter.markov]
            found[f"{drafter.prefix}.{name}.weight"] = 3 * random(rows, columns)
            found[f"{drafter.prefix}.{name}.bias"] = random(rows) - 1
    if drafter.draft_vocab != drafter.vocab:
        ids = torch.randperm(drafter.vocab, generator=generator)[: drafter.draft_vocab].sort().values
        found["d2t"] = ids - torch.arange(drafter.draft_vocab)
        found["t2d"] = torch.zeros(drafter.vocab, dtype=torch.bool).index_fill_(0, ids, value=True)
    return found


def config_of(drafter: Drafter) -> dict[str, Any]:
    """The config.json of the container."""
    layers: dict[str, Any] = {
        "model_type": "qwen3", "hidden_size": drafter.width, "intermediate_size": INNER, "vocab_size": drafter.vocab,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS,
        "rope_theta": THETA, "num_hidden_layers": drafter.num_layers, "max_position_embeddings": 512,
    }  # fmt: skip
    if any(drafter.windows):
        layers["layer_types"] = ["sliding_attention" if window else "full_attention" for window in drafter.windows]
        layers["sliding_window"] = next(filter(None, drafter.windows))
    if drafter.container == "plain":
        ids = {} if drafter.ids is None else {"target_layer_ids": list(drafter.ids)}
        inner = {"mask_token_id": MASK, **ids, **_markov_keys(drafter), **(SELECTOR if drafter.selector else {})}
        inner |= dict(drafter.inner)
        name = "DFlash2DraftModel" if drafter.selector else "DFlashDraftModel"
        return {
            "architectures": [name], "torch_dtype": "float32", **layers, "num_target_layers": 8,
            "block_size": drafter.block, "dflash_config": inner, **dict(drafter.keys),
        }  # fmt: skip
    kind = "dspark" if drafter.markov is not None else "dflash2" if drafter.selector else "dflash"
    own = (
        (SELECTOR if drafter.selector else {})
        if drafter.markov is None
        else {"markov_rank": RANK, "markov_head_type": drafter.markov}
    )
    return {
        "speculators_model_type": kind, "architectures": ["DFlashSpeculator"], "speculators_version": "0.4.0", **own,
        "transformer_layer_config": layers, "aux_hidden_state_layer_ids": list(drafter.read), "mask_token_id": MASK,
        "block_size": drafter.block, "sample_from_anchor": drafter.from_anchor, "draft_vocab_size": drafter.draft_vocab,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "target"}}, **dict(drafter.keys),
    }  # fmt: skip


def _markov_keys(drafter: Drafter) -> dict[str, Any]:
    if drafter.markov is None:
        return {}
    own = {"projector_type": "dspark", "markov_rank": RANK, "markov_head_type": drafter.markov}
    return {**own, "enable_confidence_head": True, "confidence_head_with_markov": True}


def write_drafter(folder: Path, drafter: Drafter) -> Path:
    """Write a drafter's folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(drafter)), encoding="utf-8")
    save_file(tensors_of(drafter), folder / "model.safetensors")
    return folder


def of_all_tokens(drafter: Drafter, t: dict[str, Tensor], known: Tensor) -> Tensor:
    """Logits [s, V] from those of the tokens that the drafter knows."""
    ids = torch.arange(drafter.draft_vocab) + t.get("d2t", 0)
    return known.new_full((len(known), drafter.vocab), -torch.inf).index_copy(1, ids, known)


def after(drafter: Drafter, t: dict[str, Tensor], hidden: Tensor, output: Tensor, path: list[int]) -> Tensor:
    """The page's DSpark: logits [1, V] after a path of tokens from the root on, from the places' states [s, h]."""
    state, latent = torch.zeros(RANK), torch.zeros(RANK)
    for place, token in enumerate(path):
        w = t[f"{drafter.prefix}.markov_w1.weight"][token]
        latent = w
        if drafter.markov == "gated":
            p = f"{drafter.prefix}.gate_proj"
            latent = (t[f"{p}.weight"] @ torch.cat([hidden[place], w]) + t[f"{p}.bias"]).sigmoid() * w
        if drafter.markov == "rnn":
            p = f"{drafter.prefix}.joint_proj"
            g, c, o = (t[f"{p}.weight"] @ torch.cat([state, w, hidden[place]]) + t[f"{p}.bias"]).chunk(3)
            state, latent = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), o.tanh()
    known = hidden[len(path) - 1] @ t.get("lm_head.weight", output).T + t[f"{drafter.prefix}.markov_w2.weight"] @ latent
    return of_all_tokens(drafter, t, known[None])


def selected(t: dict[str, Tensor], hidden: Tensor, known: Tensor, token: int) -> Tensor:
    """The page's DFlash2: logits [1, V] behind a token, of its place's state [h] and logits [V]."""
    found = torch.full_like(known, -torch.inf)
    weights = t["candidate_selector.predecessor_codebook"][token] * (
        t["candidate_selector.hidden_projection.weight"] @ hidden
    )
    for candidate in known.argsort(descending=True)[:CANDIDATES].tolist():
        found[candidate] = known[candidate] + weights @ t["candidate_selector.successor_codebook"][candidate]
    return found[None]


def places(drafter: Drafter, t: dict[str, Tensor], states: list[Tensor], embed: Tensor, root: int) -> Tensor:
    """The last states [s, h] of the places behind a root."""

    def rms(x: Tensor, name: str) -> Tensor:
        return t[f"{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()

    def project(x: Tensor, name: str, positions: Tensor) -> Tensor:
        found = (x @ t[f"{name}.weight"].T).unflatten(-1, (-1, HEAD_DIM))  # [rows, heads, d]
        if name.endswith("v_proj"):
            return found
        a, b = rms(found, name.replace("_proj", "_norm")).chunk(2, -1)
        angles = positions[:, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def mixed(side: int, rows: Tensor, normed: Tensor, name: str) -> Tensor:
        """A convolution, row by row and channel by channel."""
        if not drafter.selector:
            return rows
        own = (normed @ t[f"{name}.kernel_projection.weight"].T).view(len(rows), 2, 2, -1)  # [l, side, tap, group]
        found = torch.zeros_like(rows)
        for row in range(len(rows)):
            for tap in range(min(2, row + 1)):
                for c in range(drafter.width):
                    weight = t[f"{name}.base_kernel"][side, tap, c] + own[row, side, tap, c // GROUP]
                    found[row, c] += weight * rows[row - tap, c]
        return found

    c = rms(torch.cat([states[layer] for layer in drafter.read], -1) @ t["fc.weight"].T, "hidden_norm")
    text, block = torch.arange(len(c)), torch.arange(len(c), len(c) + drafter.block)
    y = t.get("embed_tokens.weight", embed)[[root, *[MASK] * (drafter.block - 1)]]
    y = y * dict(drafter.inner).get("input_embedding_scale", 1.0)
    for layer in range(drafter.num_layers):
        p = f"layers.{layer}"
        d = rms(y, f"{p}.input_layernorm")
        z = mixed(0, d, d, f"{p}.attention_conv")
        q = project(z, f"{p}.self_attn.q_proj", block)
        k, v = (
            torch.cat([project(c, f"{p}.self_attn.{one}_proj", text), project(z, f"{p}.self_attn.{one}_proj", block)])
            for one in "kv"
        )
        k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (k, v))
        behind = block[:, None] - torch.cat([text, block])  # [B, P + B], how far a key lies behind a row
        window = drafter.windows[layer]
        hidden = behind.abs() >= window if window else torch.zeros_like(behind, dtype=torch.bool)
        hidden = hidden | (behind < 0) if drafter.causal[layer] else hidden
        scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD_DIM**-0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        a = torch.einsum("hij,jhd->ihd", weights, v).flatten(1) @ t[f"{p}.self_attn.o_proj.weight"].T
        y = y + mixed(1, a, d, f"{p}.attention_conv")
        d = rms(y, f"{p}.post_attention_layernorm")
        x = mixed(0, d, d, f"{p}.mlp_conv")
        gate = torch.nn.functional.silu(x @ t[f"{p}.mlp.gate_proj.weight"].T)
        m = (gate * (x @ t[f"{p}.mlp.up_proj.weight"].T)) @ t[f"{p}.mlp.down_proj.weight"].T
        y = y + mixed(1, m, d, f"{p}.mlp_conv")
    return rms(y, "norm")[0 if drafter.from_anchor else 1 :]
