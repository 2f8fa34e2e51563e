"""The device and the number format to compute in: names from the user, checked against what is there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.model.cpu import chosen_by, read_cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UPS = 2  # passes before one is recorded


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; raises EdgespecError for a device that is not there.

    'auto' is CUDA where there is one.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EdgespecError("E_DEVICE", f"'{name}' is not a device.", "Use auto, cpu, cuda or cuda:1.") from error
    if device.type not in {"cpu", "cuda"}:
        raise EdgespecError("E_DEVICE", f"device '{name}' is not supported.", "Use auto, cpu or cuda.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EdgespecError(
            "E_DEVICE",
            f"there is no device '{name}': torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices.",
            "Use `device=cpu`, or install a CUDA build of torch and its driver.",
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def most_threads(threads: int | None, device: torch.device) -> int | None:
    """Return the most threads that steps are computed with where `threads` are asked for, or none; None without a CPU.

    What the user chose by the environment is torch's own number; who lowered that meant it, too.
    """
    if device.type != "cpu" or threads is not None:
        return threads if device.type == "cpu" else None
    own = torch.get_num_threads()
    return own if chosen_by(os.environ) else min(read_cpu().usable, own)


def planning_device(name: str) -> torch.device:
    """Return the device like `resolve_device`, but a CUDA device need not be there to plan for it."""
    if re.fullmatch(r"cuda(:\d+)?", name) and not torch.cuda.is_available():
        return torch.device(name if ":" in name else "cuda:0")
    return resolve_device(name)


def cuda_graph(read: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return what does the same as `read` again: on CUDA a graph of its launches, elsewhere `read` itself.

    A graph reads and writes the tensors that `read` did, so that they must stay where they are.
    """
    if device.type != "cuda":
        return read
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):  # libraries allocate what they need in their first calls
        for _ in range(WARM_UPS):
            read()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the target's reader goes on meanwhile
        output = read()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def release_memory(device: torch.device) -> None:
    """Give back what the allocator keeps for later, so that something else of another size fits."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def resolve_dtype(name: str | torch.dtype, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the number format of that name, or torch's own; raises EdgespecError for an unknown one.

    'auto' is float32 on a CPU, where rounding then flips no argmax, and the checkpoint's own on a GPU.
    """
    name = str(name).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise EdgespecError("E_SETTING", f"`dtype={name}` is unknown.", f"Use auto, {', '.join(DTYPES)}.")
    if device.type == "cpu":
        return torch.float32
    stored = getattr(config.get_text_config(decoder=True), "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16
