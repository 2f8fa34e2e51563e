"""How a GGUF file's rotation is scaled, in the terms of config.json."""

import math
import struct
from typing import Any

import torch

from offload.gguf.family import Family
from offload.gguf.header import GgufHeader, read_gguf
from offload.gguf.numbers import is_same_float32, shortest, wrong_value
from offload.gguf.refusal import not_read, number
from offload.gguf.storage_types import UnpackedTensor

FACTORS = "rope_freqs.weight"  # by which the frequencies of a rotation are divided
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS_OF = {"llama3": (FACTORS,), "proportional": (FACTORS,), "longrope": (LONG_FACTORS, SHORT_FACTORS)}
READ_AS_SETTINGS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
# Llama 3.1 to 3.3 differ in `factor` alone; the file has the factors that come of these.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FACTOR, OLD_FACTOR = "rope.scaling.factor", "rope.scale_linear"  # the latter of files of 2023
EXT_FACTOR = "rope.scaling.yarn_ext_factor"
BETA_FAST, BETA_SLOW = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"
YARN = {
    FACTOR: "factor", "rope.scaling.yarn_attn_factor": "attention_factor",
    BETA_FAST: "beta_fast", BETA_SLOW: "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}  # fmt: skip
# What llama.cpp's converter writes for a HunYuan whose base grows by a constant
ALPHA = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 262144}
HUNYUAN_BASE = 10000.0
NEVER = struct.unpack("<f", struct.pack("<f", 1e30))[0]  # a factor by which a frequency is as good as none
TOLERANCE = 1e-5  # of factors, which are float32


def rotation_scaling(
    header: GgufHeader, family: Family, own: dict[str, Any], fields: dict[str, Any]
) -> dict[str, Any] | None:
    """Return how the rotation is scaled; what is read is taken from `own`. Factors of another scaling are refused."""
    scaling = _scaling(header, family, own, fields)
    read = FACTORS_OF.get(scaling["rope_type"], ()) if scaling else ()
    unread = next((name for name in READ_AS_SETTINGS if name in header.tensors and name not in read), None)
    if unread is not None:
        raise not_read(header, f"has a tensor '{unread}'")
    return scaling


def _scaling(header: GgufHeader, family: Family, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any] | None:
    if "alpha" in family.scalings and ALPHA.items() <= own.items() and fields["head_dim"] > 2 < fields["rope_theta"]:
        return _alpha(own, fields)
    old_name = own.pop(OLD_FACTOR, None)
    own.setdefault(FACTOR, old_name)
    if own[FACTOR] in (None, 0):  # which stands for none
        del own[FACTOR]
    kind = own.get("rope.scaling.type", "linear")
    if kind == "yarn":
        return _yarn(header, own, fields) if "yarn" in family.scalings else None
    if kind == "none" or own.get(FACTOR) == 1:
        own.pop(FACTOR, None)
    is_linear = FACTOR in own and kind == "linear" and "linear" in family.scalings
    scaling = None if is_linear else _by_factors(header, family, own, fields)
    if scaling is not None or kind in ("linear", "none"):
        own.pop("rope.scaling.type", None)
        own.pop("rope.scaling.original_context_length", None)  # of which it says nothing
    return {"rope_type": "linear", "factor": float(number(header, FACTOR, own.pop(FACTOR)))} if is_linear else scaling


def _by_factors(
    header: GgufHeader, family: Family, own: dict[str, Any], fields: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the scaling of which a file has a factor of each frequency."""
    if "llama3" in family.scalings and FACTORS in header.tensors:
        return _llama3(header, fields)
    if "proportional" in family.scalings and FACTORS in header.tensors:
        return _proportional(header, fields)
    if "longrope" in family.scalings and LONG_FACTORS in header.tensors:
        return _longrope(header, own, fields)
    return None


def _yarn(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    own.pop("rope.scaling.type")
    own["rope.scaling.factor"] = own.get("rope.scaling.factor")  # without which there is none
    original = _original_length(header, own, fields)
    scaling: dict[str, Any] = {"rope_type": "yarn", "original_max_position_embeddings": original}
    for key, name in YARN.items():
        if key in own:
            scaling[name] = float(number(header, key, own.pop(key)))
    if scaling.get("mscale_all_dim"):
        scaling["mscale"] = 1.0  # llama.cpp knows no other
    else:  # of 0, as of none, the usual factor is made
        scaling.pop("mscale_all_dim", None)
    if (part := own.pop(EXT_FACTOR, 1.0)) not in (1.0, -1.0):  # all of it
        raise not_read(header, f"states {header.architecture}.{EXT_FACTOR} = {part}")
    fast, slow = scaling.get("beta_fast", 32.0), scaling.get("beta_slow", 1.0)
    if fast <= slow:
        raise wrong_value(header, BETA_SLOW, slow, f"less than {BETA_FAST} = {fast}")
    return scaling


def _original_length(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> int:
    """Return the length before scaling."""
    found = own.pop("rope.scaling.original_context_length", fields["max_position_embeddings"])
    if type(found) is not int or found < 2:
        raise not_read(header, f"states {header.architecture}.rope.scaling.original_context_length = {found}")
    return found


def _alpha(own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return HunYuan's scaling, of which the file has the larger base alone."""
    for key in ALPHA:
        own.pop(key)
    head_dim, larger = fields["head_dim"], fields["rope_theta"]
    exact = (larger / HUNYUAN_BASE) ** ((head_dim - 2) / head_dim)
    rounded = (float(f"{exact:.{digits}g}") for digits in range(1, 10))
    alphas = (
        alpha for alpha in rounded if is_same_float32(HUNYUAN_BASE * alpha ** (head_dim / (head_dim - 2)), larger)
    )
    fields["rope_theta"] = HUNYUAN_BASE
    return {"rope_type": "dynamic", "factor": 1.0, "alpha": next(alphas, exact)}


def _llama3(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the four numbers of Llama 3 from the factors that llama.cpp's converter made of them."""
    factors = _values(header, FACTORS)
    scaling = {"rope_type": "llama3", "factor": shortest(max(factors)), **LLAMA3}
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


def _proportional(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return how much of a head rotates: the other frequencies are divided by a number that stops them."""
    factors = _values(header, FACTORS)
    rotated = factors.count(1.0)
    others = factors[rotated:]
    if 2 * len(factors) != fields.get("global_head_dim") or others != [NEVER] * len(others):
        raise not_read(header, f"has '{FACTORS}' of other numbers than Gemma 4's")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _longrope(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    original = _original_length(header, own, fields)
    if SHORT_FACTORS not in header.tensors:
        raise not_read(header, f"has '{LONG_FACTORS}' without '{SHORT_FACTORS}'")
    rotated = round(fields.get("partial_rotary_factor", 1) * (fields["hidden_size"] // fields["num_attention_heads"]))
    if 2 * math.prod(header.tensors[LONG_FACTORS].shape) != rotated:
        what = f"twice the factors of '{LONG_FACTORS}', of which there are {header.tensors[LONG_FACTORS].shape[0]}"
        raise wrong_value(header, "rope.dimension_count", rotated, what)
    fields["original_max_position_embeddings"] = original
    scale = fields["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    stated = number(header, "rope.scaling.attn_factor", own.pop("rope.scaling.attn_factor", 1.0))
    return {
        "rope_type": "longrope",
        "attention_factor": usual if _are_close([stated], [usual]) else float(stated),
        "long_factor": [shortest(value) for value in _values(header, LONG_FACTORS)],
        "short_factor": [shortest(value) for value in _values(header, SHORT_FACTORS)],
        "original_max_position_embeddings": original,
    }


def _values(header: GgufHeader, name: str) -> list[float]:
    """Return the numbers of a small tensor."""
    tensor = header.tensors[name]
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        content = file.read(tensor.num_bytes)
    if len(content) < tensor.num_bytes:
        read_gguf(header.path)  # which raises: they lie behind the end of a file whose header alone is there
    stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    out = torch.empty(math.prod(tensor.shape))
    UnpackedTensor(shape=tensor.shape, block=tensor.block).write(stored, out)
    if not bool(out.isfinite().all()) or bool((out <= 0).any()):
        raise not_read(header, f"has '{name}' with numbers that are no factors")
    return out.tolist()


def _are_close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        math.isclose(one, other, rel_tol=TOLERANCE) for one, other in zip(found, expected, strict=True)
    )
