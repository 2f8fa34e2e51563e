"""An adapter as a GGUF file, which llama.cpp's converter made: matrices under the names of the weights they change.

The converter sends an adapter's second matrix through what it does to the base's weight: where it puts the rows of a
head's two halves in turn, those of that matrix are in turn, too, and come back to their places here. What it joins or
splits has another adapter than it was trained as.

Source: `convert_lora_to_gguf.py` and `src/llama-adapter.cpp` of llama.cpp. Legend: r the rank, o a module's rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from offload.adapters.adapter import Adapter, Delta
from offload.adapters.settings import DAMAGED
from offload.adapters.use import refused
from offload.gguf.checkpoint import LAYER
from offload.gguf.entries import unpacked
from offload.gguf.family import EXPERTS, IN_LAYER, OUTSIDE, Family
from offload.gguf.header import GgufHeader, GgufTensor, read_gguf
from offload.gguf.parts import changed
from offload.gguf.settings import family_of

ALPHA, KIND, INVOCATION = "adapter.lora.alpha", "adapter.type", "adapter.alora.invocation_tokens"
ENDS = (".lora_a", ".lora_b")
TABLE = "token_embd"
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
AS_FOLDER = "Use the adapter's own folder, which peft saved."


def read_gguf_adapter(path: Path, config: Any) -> Adapter:
    """Return the adapter of a file; `config` is its base's, for the numbers of heads. Raises OffloadError.

    Without a config rows of heads stay in turn: that is for those who only ask what an adapter is of.
    """
    header = read_gguf(path)
    kind = header.settings.get(KIND, "lora")
    if kind != "lora" or not any(name.endswith(ENDS) for name in header.tensors):
        what = f"'{path}' holds no LoRA adapter" + (f": {KIND} is {kind!r}." if kind != "lora" else ".")
        raise refused(what, "Give the file that convert_lora_to_gguf.py wrote.")
    if INVOCATION in header.settings:
        what = f"'{path}' has {INVOCATION}, an adapter that begins at some of a text's tokens, which is not done here."
        raise refused(what, "Use an adapter of plain LoRA.")
    alpha = header.settings.get(ALPHA, 0.0)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise refused(f"'{path}' has {ALPHA} = {alpha!r}, which is no number.", DAMAGED)
    family, parts = family_of(header), defaultdict[str, dict[str, GgufTensor]](dict)
    for name, tensor in header.tensors.items():
        base, _, end = name.rpartition(".")
        if f".{end}" not in ENDS or len(tensor.shape) != 2:
            raise refused(f"'{path}' has a tensor '{name}', which is no matrix of an adapter.", AS_FOLDER)
        parts[base][end] = tensor
    deltas = {}
    for base, pair in parts.items():
        if len(pair) < len(ENDS):
            raise refused(f"'{path}' has no {'lora_a' if 'lora_b' in pair else 'lora_b'} of '{base}'.", DAMAGED)
        module, num_heads = _module(header, family, base, config)
        deltas[module] = _delta(path, module, pair, num_heads=num_heads, alpha=float(alpha), is_table=_is_table(base))
    stated = {"alpha": alpha, "architecture": header.architecture}
    named = header.settings.get("general.base_model.0.name")
    return Adapter(
        path=path,
        settings=json.dumps(stated),
        deltas=deltas,
        replaced={},
        tables={},
        base=named if isinstance(named, str) else None,
    )


def _is_table(base: str) -> bool:
    return base == f"{TABLE}.weight"


def _module(header: GgufHeader, family: Family, base: str, config: Any) -> tuple[str, int]:
    """Return the module that a tensor of llama.cpp's is the weight of, and its heads, if their rows are in turn."""
    path, _, leaf = base.rpartition(".")
    outside = {**OUTSIDE, **family.outside}
    if path in outside and leaf == "weight" and "{}" not in outside[path] and base not in family.parts:
        return outside[path], 0
    found = LAYER.fullmatch(base)
    names = {**IN_LAYER, **family.names}
    number, part, leaf = found.groups() if found is not None else ("", "", "")
    is_joined = f"{part}.{leaf}" in family.parts or part in EXPERTS or part in family.lacks
    if found is None or leaf != "weight" or is_joined or part not in names:
        what = f"'{header.path}' has an adapter of '{base}', which llama.cpp has in another form than transformers."
        raise refused(what, AS_FOLDER)
    is_in_turn = family.rotates_neighbours and part in HEADS and config is not None
    num_heads = getattr(config, HEADS[part], None) or config.num_attention_heads if is_in_turn else 0
    return f"{family.layers}.{number}.{names[part]}", int(num_heads)


def _delta(
    path: Path, module: str, pair: Mapping[str, GgufTensor], *, num_heads: int, alpha: float, is_table: bool
) -> Delta:
    down, up = pair["lora_a"], pair["lora_b"]
    rank = up.shape[1]
    is_turned = is_table and down.shape[0] != rank  # a table's first matrix stands for rows that are looked up
    if down.shape[1 if is_turned else 0] != rank:
        raise refused(f"'{path}' has ranks {down.shape[0]} and {rank} for '{module}'.", DAMAGED)
    if num_heads and up.shape[0] % (2 * num_heads):
        raise refused(f"'{path}' has {up.shape[0]} rows of '{module}' for {num_heads} heads.", DAMAGED)

    def in_halves(rows: Tensor) -> Tensor:  # [o, r]
        return rows.view(num_heads, -1, 2, rank).transpose(1, 2).reshape(up.shape)

    return Delta(
        down=changed(down.name, down, down.shape[::-1], _turned) if is_turned else unpacked(down.name, down),
        up=changed(up.name, up, up.shape, in_halves) if num_heads else unpacked(up.name, up),
        scale=alpha / rank if alpha else 1.0,  # as in llama.cpp
        is_embedding=is_table,
    )


def _turned(rows: Tensor) -> Tensor:
    return rows.t()
