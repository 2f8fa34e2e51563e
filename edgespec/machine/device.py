"""The device and the number format to compute in, by the user's names."""

import functools
import os
import re
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.machine.cpu import chosen_by, processor_share, read_cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AMPERE = (8, 0)  # the first compute capability with flash attention, and with bf16 in its arithmetic
WARM_UPS = 2  # passes before one is recorded


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; 'auto' is CUDA where there is one. Raises EdgespecError for a missing one."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EdgespecError("E_DEVICE", f"'{name}' is not a device.", "Use auto, cpu, cuda or cuda:1.") from error
    if device.type not in {"cpu", "cuda"}:
        raise EdgespecError("E_DEVICE", f"device '{name}' is not supported.", "Use auto, cpu or cuda.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        what = f"there is no device '{name}': torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices."
        raise EdgespecError("E_DEVICE", what, "Use `device=cpu`, or install a CUDA build of torch and its driver.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def is_before_ampere(device: torch.device) -> bool:
    """Return whether a card is of Turing or older; one that is only planned for is taken for a newer one."""
    is_card = device.type == "cuda" and torch.cuda.is_available()
    return is_card and torch.cuda.get_device_capability(device) < AMPERE


def most_threads(threads: int | None, device: torch.device) -> int | None:
    """Return the most threads to compute steps with, from the option `threads`; None where no CPU computes.

    Without the option, a number that the user set by the environment or in torch is kept.
    """
    if device.type != "cpu" or threads is not None:
        return threads if device.type == "cpu" else None
    own = torch.get_num_threads()
    return own if chosen_by(os.environ) else min(read_cpu().usable, own)


def core_share(device: torch.device) -> float:
    """Return the share of a core's time that other programs leave to what computes there; 1 on an accelerator."""
    return processor_share() if device.type == "cpu" else 1.0


def planning_device(name: str) -> torch.device:
    """Return the device like `resolve_device`; plans may also be for a CUDA device that is missing here."""
    if re.fullmatch(r"cuda(:\d+)?", name) and not torch.cuda.is_available():
        return torch.device(name if ":" in name else "cuda:0")
    return resolve_device(name)


@functools.cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device that passes are recorded on: cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Graphs of launches on a device, which are replayed one at a time and share the memory of their temporaries.

    What a replay returns is valid until the next one of any of these graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def record(self, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that repeats `read`: on CUDA a graph of its launches, elsewhere `read` itself.

        A graph reads and writes the tensors that `read` did, so they must stay in their places.
        """
        if self._device.type != "cuda":
            return read
        with torch.cuda.device(self._device):  # what is issued elsewhere is not recorded
            aside, current = _aside(self._device), torch.cuda.current_stream(self._device)
            aside.wait_stream(current)
            with torch.cuda.stream(aside):  # libraries allocate their workspaces in their first calls
                for _ in range(WARM_UPS):
                    read()
            current.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # The target's reader goes on meanwhile, in another thread.
            with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode="thread_local"):
                output = read()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def keeps_row_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a tree's rows are to have the bits of plain decoding, so that a seed has one text.

    Where a number has few bits the order of a sum decides near ties. A CPU can keep the order for little time.
    """
    return device.type == "cpu" and dtype != torch.float32


def release_memory(device: torch.device) -> None:
    """Free the memory that the allocator keeps for later, for blocks of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def resolve_dtype(name: str | torch.dtype, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the number format of that name, or of torch's; raises EdgespecError for an unknown one.

    'auto' is float32 on a CPU, where rounding then flips no argmax, and the checkpoint's own on a GPU; but float16 in
    place of bfloat16 before Ampere, which only emulates that.
    """
    name = str(name).removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise EdgespecError("E_SETTING", f"`dtype={name}` is unknown.", f"Use auto, {', '.join(DTYPES)}.")
    if device.type == "cpu":
        return torch.float32
    stored = getattr(config.get_text_config(decoder=True), "dtype", None)
    dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16
    return torch.float16 if dtype == torch.bfloat16 and is_before_ampere(device) else dtype
