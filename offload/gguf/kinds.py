"""What a GGUF file holds: a model, or one of the other things that are kept in this format; and of which types."""

from collections import Counter

from offload.errors import CheckpointError
from offload.gguf.header import GgufHeader

PROJECTOR = "a projector, which makes images or sounds rows for a model, and no model"
IMATRIX = "an importance matrix, which is read when a model is quantised, and no model"
ADAPTER = "an adapter (LoRA), and no whole model"
VECTOR = "a control vector, which is added to a model's hidden states, and no model"
BY_TYPE = {"mmproj": PROJECTOR, "imatrix": IMATRIX, "adapter": ADAPTER}
BY_ARCHITECTURE = {"clip": PROJECTOR, "imatrix": IMATRIX, "controlvector": VECTOR}
SETTINGS = "rope_"  # begins the names of tensors whose numbers are read with the settings
# `general.file_type`: the recipe by which most tensors have their type
RECIPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip


def other_kind(header: GgufHeader) -> str | None:
    """Return what a file holds in place of a model, in words; None for a model."""
    kind = header.settings.get("general.type")
    found = BY_TYPE.get(str(kind)) or BY_ARCHITECTURE.get(header.architecture)
    if found is None and ("adapter.type" in header.settings or header.has_tensor(".lora_a")):
        return ADAPTER
    if found is None and not header.tensors:
        return "a vocabulary alone, without any weight"
    return found


def is_further_layer(header: GgufHeader) -> bool:
    """Return whether a file has a model's layer for a further token, and none of its other layers."""
    return header.has_tensor(".nextn.eh_proj.weight") and not any(name.startswith("blk.0.") for name in header.tensors)


def check_is_model(header: GgufHeader) -> None:
    """Raise CheckpointError for a file that holds something else than a model, or ends before its settings do."""
    kind = other_kind(header)
    if kind == ADAPTER:
        raise CheckpointError(
            "E_ADAPTER",
            f"'{header.path}' holds {kind}.",
            "Give its model as the target, and this file with `adapters`.",
        )
    if kind is not None:
        raise CheckpointError("E_MODEL_NOT_FOUND", f"'{header.path}' is {kind}.", "Give the model's own file.")
    for tensor in header.tensors.values():
        is_setting = tensor.name.startswith(SETTINGS)
        if is_setting and tensor.offset + tensor.num_bytes > tensor.file.stat().st_size:
            what = f"'{tensor.file}' is truncated before '{tensor.name}', whose numbers are settings."
            raise CheckpointError("E_SHARD_TRUNCATED", what, "Download the file again.")


def bytes_by_type(header: GgufHeader) -> dict[str, int]:
    """Return the bytes of the tensors of each type, the most first."""
    found: Counter[str] = Counter()
    for tensor in header.tensors.values():
        found[tensor.block.name] += tensor.num_bytes
    return dict(found.most_common())


def recipe(header: GgufHeader) -> str:
    """Return the name of the file's quantisation, as its setting or most of its bytes have it."""
    stated = header.settings.get("general.file_type")
    found = RECIPES.get(stated) if isinstance(stated, int) else None
    return found or next(iter(bytes_by_type(header)), "no weights")
