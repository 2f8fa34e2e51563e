"""config.json states the format of packed weights: whether we read it, and what else its runtime does."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from offload.errors import CheckpointError
from offload.formats.known import FORMATS, readable_formats

COMPRESSED = "compressed-tensors"
READABLE_COMPRESSED = {
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
}  # fmt: skip
ACTIVATIONS_FIELDS = {"fp8": "activation_scheme", "modelopt": "quant_algo"}  # method -> the field that says so


def stated_packing(config: PretrainedConfig) -> dict[str, Any]:
    """Return what config.json says of the packing; nothing where weights are not packed."""
    found: Any = getattr(config, "quantization_config", None)
    if not found:  # a composite's part, and what MLX writes, stand elsewhere
        text = config.get_text_config(decoder=True)
        found = getattr(text, "quantization_config", None) or getattr(config, "quantization", None)
    if not found:
        return {}
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def format_stated(stated: Mapping[str, Any]) -> str | None:
    """Return the format in a few words: 'gptq', 'compressed-tensors nvfp4-pack-quantized'; None of unpacked weights."""
    if not stated:
        return None
    method = stated.get("quant_method")
    if method is None:
        return "mlx" if "bits" in stated else "no quant_method"
    detail = stated.get("format") if method == COMPRESSED else stated.get("quant_algo")
    return f"{method} {detail}" if detail else str(method)


def check_readable(stated: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError for packed weights that are not read, by the format's name and before any is looked for."""
    if not stated:
        return
    named = format_stated(stated)
    method = stated.get("quant_method")
    if not any(method in known.methods for known in FORMATS):
        raise _not_read(folder, f"is quantised with {named}, which edgespec does not read")
    reason = next((reason for reason in _reasons(stated) if reason), None)
    if reason is not None:
        raise _not_read(folder, f"is quantised with {named}, and {reason}")


def quantises_activations(stated: Mapping[str, Any]) -> bool:
    """Return whether other programs also quantise activations."""
    method = stated.get("quant_method")
    if method == COMPRESSED:
        return any(group.get("input_activations") for group in compressed_groups(stated))
    return method == "fbgemm_fp8" or bool(stated.get(ACTIVATIONS_FIELDS.get(str(method), "")))


def compressed_groups(stated: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of modules that compressed-tensors packs alike."""
    groups = stated.get("config_groups") or {}
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _reasons(stated: Mapping[str, Any]) -> Iterable[str | None]:
    """Yield what keeps a checkpoint of a readable method from being read, or None."""
    method = stated.get("quant_method")
    yield from (known.refused(stated) for known in FORMATS if known.refused and method in known.methods)
    if method == COMPRESSED:
        formats = {stated.get("format"), *(group.get("format") for group in compressed_groups(stated))} - {None}
        odd = sorted(str(name) for name in formats if name not in READABLE_COMPRESSED)
        if odd:
            yield f"{odd[0]} is not read"
        if (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
            yield f"its sparse weights ({stated['sparsity_config']['format']}) are not read"
        if (stated.get("transform_config") or {}).get("config_groups"):
            yield "its weights are rotated (transform_config), which the model would have to undo"


def _not_read(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "E_QUANTIZED",
        f"'{folder}' {reason}.",
        "Use the model's bf16 or fp16 safetensors with `quant=nf4` or int8, or a checkpoint in one of these: "
        f"{readable_formats()}.",
    )
