"""A model's tower for images: all weights that words do not pass through, which are read when a picture comes.

Lists of blocks may be read one block at a time, just before it runs, and dropped before the next: then pictures take
one pass over the tower, with the memory of one block beside what stands outside of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.layer_store import LayerRecord, LayerStore, StoredTensor
from offload.pages import give_back_heap, large_blocks_apart
from offload.placement import OUTSIDE_INDEX


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRecord:
    """Where a tower's weights are to be found."""

    outside: LayerRecord  # what stands in no list of blocks
    blocks: Mapping[str, LayerRecord]  # by the path of their module

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights, as they are computed with."""
        return self.outside.flat_bytes + sum(block.flat_bytes for block in self.blocks.values())

    @property
    def streamed_bytes(self) -> int:
        """The bytes that are there at once where blocks are read one by one."""
        return self.outside.flat_bytes + max((block.flat_bytes for block in self.blocks.values()), default=0)


def tower_record(model: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> TowerRecord:
    """Return the record of these tensors of a model: blocks are the items of the outermost lists that hold them."""
    stacks = [
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(name.startswith(f"{path}.") for name in tensors)
    ]
    outermost = [path for path in stacks if not any(path != other and path.startswith(other) for other in stacks)]
    outside: dict[str, StoredTensor] = {}
    blocks: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        stack = next((path for path in outermost if name.startswith(path)), None)
        if stack is None:
            outside[name] = tensor
        else:
            blocks.setdefault(stack + name[len(stack) :].partition(".")[0], {})[name] = tensor
    return TowerRecord(
        outside=LayerRecord(index=OUTSIDE_INDEX, tensors=outside),
        blocks={path: LayerRecord(index=index, tensors=of) for index, (path, of) in enumerate(blocks.items())},
    )


class Tower:
    """The weights of a tower at work, in the modules of a model that was built without memory."""

    def __init__(
        self,
        model: PreTrainedModel,
        record: TowerRecord,
        device: torch.device,
        *,
        is_resident: bool,
        on_block: Callable[[], object] = lambda: None,
    ) -> None:
        """With `is_resident` all weights stay from the first `loaded` on, until `drop`.

        Else `on_block` is called before each block, whose weights then stay until another block is called.
        """
        self.record, self.is_resident = record, is_resident
        self.num_read_bytes = 0  # so far
        self._model, self._device = model, device
        self._store: LayerStore | None = None
        self._present: set[str] = set()  # parameters that have memory
        self._lock = threading.Lock()  # several pictures may come to a block at once
        self._on_block, self._block = on_block, LayerRecord(index=OUTSIDE_INDEX, tensors={})
        for path, block in record.blocks.items():
            model.get_submodule(path).register_forward_pre_hook(self._before(block))

    @property
    def is_present(self) -> bool:
        """Whether some weights are in memory."""
        return bool(self._present)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within this block the tower may run."""
        give_back_heap()  # which passes of words left
        try:
            self._put(self.record.outside)
            for block in self.record.blocks.values() if self.is_resident else ():
                self._put(block)
            yield
        finally:
            if not self.is_resident:
                self.drop()
            give_back_heap()  # threads of pictures have heaps of their own

    def drop(self) -> None:
        """Let all weights go."""
        for record in (self.record.outside, *self.record.blocks.values()):
            self._take(record)
        self._store = None

    def _before(self, block: LayerRecord) -> Callable[..., None]:
        def put(*_: Any) -> None:
            self._on_block()
            if self.is_resident:
                return
            with self._lock:
                if self._block is not block:
                    self._take(self._block)
                self._block = block
                self._put(block)

        return put

    def _put(self, record: LayerRecord) -> None:
        if self._store is None:
            records = (self.record.outside, *self.record.blocks.values())
            self._store = LayerStore({entry.file for one in records for entry in one.entries})
        missing = {name: tensor for name, tensor in record.tensors.items() if name not in self._present}
        with large_blocks_apart() if missing else nullcontext():  # else blocks that went leave holes in the heap
            for name, tensor in missing.items():
                self._set(name, self._store.assembled(tensor, tensor.dtype).to(self._device))
                self._present.add(name)
                self.num_read_bytes += tensor.num_bytes
        if missing:
            self._store.drop(record)  # the file's pages: the numbers have memory of their own

    def _take(self, record: LayerRecord) -> None:
        for name, tensor in record.tensors.items():
            if name in self._present:
                self._set(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
                self._present.discard(name)

    def _set(self, name: str, value: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        module: Any = self._model.get_submodule(path)
        if attribute in module._parameters:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[attribute] = value
