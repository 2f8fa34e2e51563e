"""An adapter's folder as PEFT writes it: a config, and tensors whose names say to which modules they belong."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from offload.adapters.adapter import Adapter, Delta
from offload.adapters.settings import DAMAGED, FIX, LoraSettings, read_settings
from offload.adapters.use import refused
from offload.checkpoint import TensorEntry, read_header
from offload.errors import CheckpointError
from offload.file_names import ADAPTER_NAME

TENSORS_NAME, PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
PART = re.compile(r"(.+)\.(lora_embedding_A|lora_embedding_B|lora_A|lora_B|lora_magnitude_vector)(\.weight|\.bias)?")
OF_BASE = ".base_layer."
FLOATS = ("float32", "bfloat16", "float16", "float64")


def read_peft_folder(folder: Path) -> Adapter:
    """Return the adapter of a folder; raises OffloadError for what is not read, by its name."""
    if not (folder / ADAPTER_NAME).is_file():
        what = f"'{folder}' holds no adapter: there is no {ADAPTER_NAME}."
        raise refused(what, "Give the folder that peft saved, or a GGUF file of an adapter.")
    settings, stated = read_settings(folder)
    entries = _tensors(folder)
    parts: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    replaced: dict[str, TensorEntry] = {}
    tables: dict[str, TensorEntry] = {}
    for stored, entry in entries.items():
        if str(entry.dtype).removeprefix("torch.") not in FLOATS:
            raise refused(f"'{stored}' in '{folder}' has numbers of {entry.dtype}.", DAMAGED)
        name = stored.removeprefix(PREFIX)
        found = PART.fullmatch(name)
        if found is not None:
            parts[found[1]][found[2].replace("embedding_", "") + (found[3] or "").removesuffix(".weight")] = entry
            if "magnitude" not in found[2]:  # which both have
                parts[found[1]].setdefault("embedding" if "embedding" in found[2] else "linear", entry)
        elif "lora_" in name:
            raise refused(f"'{stored}' in '{folder}' is no part of an adapter that is known here.", DAMAGED)
        elif OF_BASE in name and name.endswith(".weight"):
            tables[name.replace(OF_BASE, ".")] = entry
        else:
            replaced[name.replace(OF_BASE, ".").replace(".modules_to_save.", ".")] = entry
    has_table = any("embedding" in one for one in parts.values())
    if settings.ties and (has_table or any(len(one.shape) > 1 for one in (*replaced.values(), *tables.values()))):
        what = f"'{folder}' has ensure_weight_tying and a table: a head is adapted as the table is, which is not done."
        raise refused(what, FIX)
    # PEFT stores a head beside an embedding's adapter, whether or not it was trained
    if tables or has_table:
        tables |= {name: replaced.pop(name) for name in ("lm_head.weight",) if name in replaced}
    if not parts and not replaced:
        raise refused(f"'{folder}' holds an adapter without any tensor.", DAMAGED)
    return Adapter(
        path=folder,
        settings=stated,
        deltas={module: _delta(folder, module, one, settings) for module, one in parts.items()},
        replaced=replaced,
        tables=tables,
        base=settings.base,
    )


def _tensors(folder: Path) -> dict[str, TensorEntry]:
    path = folder / TENSORS_NAME
    if path.is_file():
        try:
            return read_header(path)
        except CheckpointError as error:
            raise type(error)(error.code, error.what, DAMAGED) from error
    if (folder / PICKLE_NAME).exists():
        what = f"'{folder / PICKLE_NAME}' is a pickle, which may hold code, and is not opened."
        raise refused(what, "Save the adapter with peft as safetensors: model.save_pretrained(NEW_FOLDER).")
    raise refused(f"'{folder}' has no {TENSORS_NAME}.", DAMAGED)


def _delta(folder: Path, module: str, parts: dict[str, TensorEntry], settings: LoraSettings) -> Delta:
    """Return what is added to a module; raises OffloadError where a part is missing, or has another shape."""
    down, up = parts.get("lora_A"), parts.get("lora_B")
    if down is None or up is None:
        what = f"'{folder}' has no {'lora_A' if down is None else 'lora_B'} of '{module}'."
        raise refused(what, DAMAGED)
    if "embedding" in parts and "linear" in parts:
        raise refused(f"'{folder}' has parts of '{module}' as a linear layer and as an embedding.", DAMAGED)
    if len(down.shape) != 2 or len(up.shape) != 2:
        what = f"'{folder}' has an adapter of '{module}' with {len(down.shape)} dimensions: of a convolution."
        raise refused(what, "Train the adapter without it.")
    rank, stated = down.shape[0], settings.rank_of(module)
    if rank != stated or up.shape[1] != rank:
        what = f"'{folder}' has ranks {rank} and {up.shape[1]} for '{module}', and its config says {stated}."
        raise refused(what, DAMAGED)
    magnitude, up_bias = parts.get("lora_magnitude_vector"), parts.get("lora_B.bias")
    if settings.has_magnitudes != (magnitude is not None):
        are = "has no magnitudes" if magnitude is None else "has magnitudes"
        what = (
            f"'{folder}' {are} for '{module}', and its config says use_dora = {str(settings.has_magnitudes).lower()}."
        )
        raise refused(what, DAMAGED)
    for one in (magnitude, up_bias):
        if one is not None and one.shape != (up.shape[0],):
            raise refused(f"'{one.name}' in '{folder}' has shape {list(one.shape)}, not [{up.shape[0]}].", DAMAGED)
    return Delta(
        down=down,
        up=up,
        scale=settings.scale_of(module, rank),
        up_bias=up_bias,
        magnitude=magnitude,
        is_embedding="embedding" in parts,
    )
