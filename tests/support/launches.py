"""How many operations run, and the bytes that they read and write: counted without a card.

An operation that computes or copies is a launch; views are none.
"""

import math
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FREE = (
    "aten::empty",
    "aten::new_empty",
    "aten::_unsafe_view",
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::_local_scalar_dense",
)


class Launches(TorchDispatchMode):
    """Counts operations that are no views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        if not (func.is_view or name.startswith(FREE)):
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        """Return how many there were."""
        return self.by_name.total()


class Traffic(Launches):
    """Counts operations, and the bytes that each reads and writes, as if nothing stayed in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.count
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self.count > before:
            read = args[1:] if func.name().startswith("aten::copy_") else args
            self.num_bytes += sum(map(_num_bytes, (*read, output)))
        return output


def _num_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of those in a list; what repeats by a stride of 0 counts once."""
    if isinstance(value, list | tuple):
        return sum(map(_num_bytes, value))
    if not isinstance(value, Tensor):
        return 0
    return math.prod(size for size, stride in zip(value.shape, value.stride(), strict=True) if stride) * value.itemsize
