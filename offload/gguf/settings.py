"""What a GGUF file's settings are in a config.json. All of them are read, or the file is refused by name."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.gguf.families import FAMILIES, SETTINGS, Family
from offload.gguf.forms import UnpackedTensor
from offload.gguf.header import GgufHeader

SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
FACTORS = "rope_freqs.weight"  # by which the frequencies of a rotation are divided
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
READ_AS_SETTINGS = {"llama3": (FACTORS,), "longrope": (LONG_FACTORS, SHORT_FACTORS)}
# Llama 3.1 to 3.3 differ in `factor` alone; the file has the factors that come of these.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TOLERANCE = 1e-5  # of factors, which are float32


def family_of(header: GgufHeader) -> Family:
    """Return the line of the table; raises CheckpointError for an architecture that has none."""
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise not_read(header, f"is of the architecture '{header.architecture}'")
    return family


def not_read(header: GgufHeader, what: str) -> CheckpointError:
    """Return the error of a file that says something which is not understood."""
    return CheckpointError(
        "E_UNSUPPORTED_ARCHITECTURE",
        f"'{header.path}' {what}, which edgespec does not read in a GGUF file.",
        f"Use the model's safetensors; of GGUF these are read: {', '.join(FAMILIES)}.",
    )


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of a config.json; raises CheckpointError for a setting that is not understood."""
    family, own = family_of(header), _own_settings(header)
    known = {**SETTINGS, **family.settings}
    fields: dict[str, Any] = {"model_type": family.model_type, **family.fixed}
    for key, name in known.items():
        if key in own:
            fields[name] = _number(header, key, own.pop(key))
    missing = next((key for key, name in SETTINGS.items() if name not in fields and key not in _OPTIONAL), None)
    if missing is not None:
        raise not_read(header, f"lacks the setting {header.architecture}.{missing}")
    fields["num_key_value_heads"] = fields.get("num_key_value_heads", fields["num_attention_heads"])
    rotated = own.pop("rope.dimension_count", None)
    whole = fields["hidden_size"] // fields["num_attention_heads"]
    head_dim = fields.get("head_dim", rotated if rotated and family.rotates_neighbours else whole)
    if "head_dim" in known.values():
        fields["head_dim"] = head_dim
    _check_heads(header, family, own, head_dim, rotated)
    if rotated not in {None, head_dim}:
        fields["partial_rotary_factor"] = rotated / head_dim
    if family.norms_plus_one:  # of Gemma
        is_scaled_by_size = fields["num_hidden_layers"] == family.query_scale_layers
        fields["query_pre_attn_scalar"] = whole if is_scaled_by_size else head_dim
    vocab = header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else 0
    if own.pop("vocab_size", vocab) != vocab:
        raise not_read(header, f"has {vocab} rows of token_embd.weight and another {header.architecture}.vocab_size")
    fields |= {"vocab_size": vocab, "tie_word_embeddings": "output.weight" not in header.tensors}
    fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    fields |= {ours: header.settings.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in SPECIAL.items()}
    scaling = _scaling(header, family, own, fields)
    if scaling:
        fields["rope_scaling"] = scaling
    if own:
        key, value = next(iter(own.items()))
        raise not_read(header, f"states {header.architecture}.{key} = {value}")
    return fields


_OPTIONAL = {"attention.head_count_kv", "rope.freq_base"}


def _own_settings(header: GgufHeader) -> dict[str, Any]:
    start = f"{header.architecture}."
    return {key.removeprefix(start): value for key, value in header.settings.items() if key.startswith(start)}


def _number(header: GgufHeader, key: str, value: Any) -> int | float:
    if type(value) is int:
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        raise not_read(header, f"states {header.architecture}.{key} = {value}")
    return _shortest(value)


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is this one in float32, as config.json had it."""
    packed = struct.pack("<f", value)
    return next(short for digits in range(1, 10) if struct.pack("<f", short := float(f"{value:.{digits}g}")) == packed)


def _check_heads(header: GgufHeader, family: Family, own: dict[str, Any], head_dim: int, rotated: int | None) -> None:
    if rotated not in {None, head_dim} and not family.rotates_in_part:
        raise not_read(header, f"states {header.architecture}.rope.dimension_count = {rotated} of {head_dim}")
    for key in ("attention.key_length", "attention.value_length"):
        found = own.pop(key, head_dim)
        if found != head_dim:
            raise not_read(header, f"states {header.architecture}.{key} = {found}, with heads of {head_dim}")


def _scaling(header: GgufHeader, family: Family, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the rotation is scaled; what is read is taken from `own`."""
    if own.get("rope.scaling.type") == "none":
        own.pop("rope.scaling.type")
    if own.get("rope.scaling.type") == "linear" and "linear" in family.scalings:
        own.pop("rope.scaling.type")
        factor = _number(header, "rope.scaling.factor", own.pop("rope.scaling.factor", None))
        return {"rope_type": "linear", "factor": float(factor)}
    if "llama3" in family.scalings and FACTORS in header.tensors:
        return _llama3(header, fields)
    if "longrope" in family.scalings and LONG_FACTORS in header.tensors:
        return _longrope(header, own, fields)
    if "rope.scaling.type" not in own:
        own.pop("rope.scaling.original_context_length", None)  # without a scaling it says nothing
    return None


def _llama3(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the four numbers of Llama 3 from the factors that llama.cpp's converter made of them."""
    factors = _values(header, FACTORS)
    scaling = {"rope_type": "llama3", "factor": _shortest(max(factors)), **LLAMA3}
    if not _are_close(factors, _llama3_factors(scaling, fields.get("rope_theta", 10000.0), fields["head_dim"])):
        raise not_read(header, f"has '{FACTORS}' of other numbers than Llama 3's")
    return scaling


def _llama3_factors(scaling: dict[str, Any], base: float, head_dim: int) -> list[float]:
    low, high, old = (scaling[name] for name in LLAMA3)
    found = []
    for place in range(0, head_dim, 2):
        turns = old / (2 * math.pi * base ** (place / head_dim))  # in the context it was trained with
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return found


def _longrope(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    original = own.pop("rope.scaling.original_context_length", fields["max_position_embeddings"])
    if SHORT_FACTORS not in header.tensors:
        raise not_read(header, f"has '{LONG_FACTORS}' without '{SHORT_FACTORS}'")
    fields["original_max_position_embeddings"] = original
    scale = fields["max_position_embeddings"] / original
    attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    stated = own.pop("rope.scaling.attn_factor", attention)
    if not _are_close([stated], [attention]):
        raise not_read(header, f"states {header.architecture}.rope.scaling.attn_factor = {stated}, not {attention}")
    return {
        "rope_type": "longrope",
        "long_factor": [_shortest(value) for value in _values(header, LONG_FACTORS)],
        "short_factor": [_shortest(value) for value in _values(header, SHORT_FACTORS)],
        "original_max_position_embeddings": original,
    }


def _values(header: GgufHeader, name: str) -> list[float]:
    """Return the numbers of a small tensor."""
    tensor = header.tensors[name]
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        stored = torch.frombuffer(bytearray(file.read(tensor.num_bytes)), dtype=torch.uint8)
    out = torch.empty(math.prod(tensor.shape))
    UnpackedTensor(shape=tensor.shape, block=tensor.block).write(stored, out)
    if not bool(out.isfinite().all()) or bool((out <= 0).any()):
        raise not_read(header, f"has '{name}' with numbers that are no factors")
    return out.tolist()


def _are_close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        math.isclose(one, other, rel_tol=TOLERANCE) for one, other in zip(found, expected, strict=True)
    )
