"""Adapters in PEFT's file format, written by plain code, and the forward that they mean, one module at a time.

Legend: r the rank, i and o a module's columns and rows.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."
Tensors = dict[str, Tensor]


def sizes_of(module: Any) -> tuple[int, int]:
    """The columns and the rows of a module that adapters know."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def write_adapter(
    folder: Path, model: nn.Module, ends: Iterable[str], *, seed: int = 0, replaced: Iterable[str] = (),
    size: float = 0.2, **config: Any,
) -> Path:  # fmt: skip
    """Write a random adapter of all modules whose names end so, and of whole parameters with the names `replaced`.

    `size` is that of the numbers of second matrices, and of what changes others.
    """
    numbers = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float) -> Tensor:
        return torch.randn(*shape, generator=numbers) * size

    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": list(ends), **config}
    tensors: Tensors = {}
    for name, module in model.named_modules():
        if not name.endswith(tuple(fields["target_modules"])):
            continue
        columns, rows = sizes_of(module)
        rank = int(first_that_fits(fields.get("rank_pattern") or {}, name, fields["r"]))
        down, up = normal(rank, columns, size=columns**-0.5), normal(rows, rank, size=size)
        if isinstance(module, nn.Embedding):
            down = down * columns**0.5 * 0.3
            tensors |= {f"{name}.lora_embedding_A": down, f"{name}.lora_embedding_B": up}
            if fields.get("use_dora"):  # the numbers of a column of the table have a length
                lengths = whole_weight(module).norm(dim=0)
                tensors[f"{name}.lora_magnitude_vector"] = lengths * (1 + normal(rows, size=size))
            continue
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        if fields.get("lora_bias"):
            tensors[f"{name}.lora_B.bias"] = normal(rows, size=size)
        if fields.get("use_dora"):
            lengths = whole_weight(module).norm(dim=1)
            tensors[f"{name}.lora_magnitude_vector"] = lengths * (1 + normal(rows, size=size))
    for name in replaced:
        parameter = model.get_parameter(name).detach()
        changed = normal(*parameter.shape, size=size)
        tensors[name] = parameter * (1 + changed) if parameter.any() else changed  # as biases of random models
    return save_adapter(folder, fields, tensors)


def save_adapter(folder: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write an adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    stored = {PREFIX + name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors")
    return folder


def first_that_fits(patterns: Mapping[str, float], name: str, default: float) -> float:
    """The value of the first key that is the module's name, or the end of it after a dot."""
    return next((value for key, value in patterns.items() if name == key or name.endswith(f".{key}")), default)


def whole_weight(module: Any) -> Tensor:
    """A module's weight [o, i] in float32."""
    weight: Tensor = module.weight.detach().float()
    return weight.T if isinstance(module, Conv1D) else weight


@torch.no_grad()
def with_adapters(model: nn.Module, *used: tuple[Path, float]) -> Any:
    """A copy of a model that computes as PEFT's unmerged forward does with these adapters, in this order."""
    found = copy.deepcopy(model)
    parts: dict[str, list[Callable[[Tensor, Tensor], Tensor]]] = {}
    for folder, factor in used:
        fields = json.loads((folder / "adapter_config.json").read_text())
        stored = load_file(folder / "adapter_model.safetensors")
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
        modules = dict.fromkeys(name.partition(".lora_")[0] for name in tensors if ".lora_" in name)
        for name, tensor in tensors.items():
            if ".lora_" not in name:
                path, _, attribute = name.rpartition(".")
                own = nn.Parameter(tensor.to(found.get_submodule(path)._parameters[attribute].dtype))
                found.get_submodule(path)._parameters[attribute] = own
        for name in modules:
            parts.setdefault(name, []).append(_part(found.get_submodule(name), name, fields, tensors, factor))
    for name, adds in parts.items():
        found.get_submodule(name).register_forward_hook(_summing(adds))
    return found.eval()


def _summing(adds: list[Callable[[Tensor, Tensor], Tensor]]) -> Any:
    def hook(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        total = output
        for add in adds:
            total = total + add(arguments[0], output)
        return total.to(output.dtype)

    return hook


def _part(
    module: Any, name: str, fields: Mapping[str, Any], tensors: Tensors, factor: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """What an adapter adds to a module's output, of its input and that."""
    alpha = first_that_fits(fields.get("alpha_pattern") or {}, name, fields["lora_alpha"])
    if isinstance(module, nn.Embedding):
        down, up = tensors[f"{name}.lora_embedding_A"].float(), tensors[f"{name}.lora_embedding_B"].float()
        scale = factor * alpha / (math.sqrt(len(down)) if fields.get("use_rslora") else len(down))
        times = float(getattr(module, "embed_scale", 1.0))
        magnitude = tensors.get(f"{name}.lora_magnitude_vector")
        if magnitude is None:
            return lambda ids, _: (down.T[ids] @ up.T) * scale * times
        share = magnitude / (whole_weight(module) + scale * down.T @ up.T).norm(dim=0)
        return lambda ids, out: (share - 1) * out + share * (down.T[ids] @ up.T) * scale * times
    down, up = tensors[f"{name}.lora_A.weight"].float(), tensors[f"{name}.lora_B.weight"].float()
    scale = factor * alpha / (math.sqrt(len(down)) if fields.get("use_rslora") else len(down))
    up_bias = tensors.get(f"{name}.lora_B.bias", torch.zeros(len(up)))
    magnitude = tensors.get(f"{name}.lora_magnitude_vector")
    if magnitude is None:
        return lambda rows, _: (rows.float() @ down.T @ up.T + up_bias) * scale
    share = magnitude / (whole_weight(module) + scale * up @ down).norm(dim=1)
    bias = torch.zeros(len(up)) if module.bias is None else module.bias
    return lambda rows, out: (share - 1) * (out - bias) + share * (rows.float() @ down.T @ up.T) * scale
