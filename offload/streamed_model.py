"""A transformers model whose decoder layers read their weights from a stream.

`StreamedModel` loads what stays resident and hooks the streamed layers of a skeleton. transformers
keeps its own forward, so rope, norms and each family's quirks are its own.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from offload.adapters.forward import LoadedAdapters
from offload.device import CudaDevice
from offload.experts.expert_placement import with_pinned_experts
from offload.experts.expert_source import ExpertCounts, ExpertSource
from offload.experts.expert_use import ExpertUse
from offload.experts.in_layers import chooses_few, hook_experts_in_layers
from offload.experts.on_demand import hook_experts
from offload.file_tables import look_up_in_files
from offload.host_table import input_table, send_rows
from offload.layer_store import LayerRecord, LayerStore
from offload.layouts.onednn import has_onednn, hook_linear_layers, in_kernel_order, takes_kernel_order
from offload.loaders import CpuLoader, CudaLoader
from offload.packed_outside import PackedHead
from offload.packed_weight import PackedModule
from offload.pages import in_large_pages, large_blocks_apart
from offload.placement import OUTSIDE_INDEX, Placement, with_pinned_layers
from offload.skeleton import Skeleton
from offload.stream import LayerStream, SlotLoader
from offload.text_part import decoder_layers
from offload.unpacked_once import packed_for_others, packed_outside, unpack_for_others, unpack_now, unpacked_modules

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class StreamedModel:
    """A model that is ready to run: its resident weights are loaded, its streamed layers hooked.

    `model` is called like any transformers model. `close` ends the reader; the weights of streamed
    layers are valid only inside a forward. `placement` is where weights live, which is on disk where the system
    locked less memory than was planned. `copying` is a card as copies to it know it; None on a CPU.
    """

    @large_blocks_apart()
    def __init__(  # noqa: C901 -- one step after the other, in the order in which memory is taken
        self,
        skeleton: Skeleton,
        placement: Placement,
        *,
        device: torch.device,
        lends: bool = False,
        reorders: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """A model that `lends` table and head to others has them whole, and not as they are packed.

        With `reorders`, weights that stay are put in the order of torch's kernels; else layers' stay as they are.
        """
        self.model = skeleton.model
        self.layers = skeleton.layers
        self.device, self.reorders = device, reorders
        self.copying = CudaDevice(device) if device.type == "cuda" else None
        on_demand = placement.experts is not None
        records = skeleton.dense_records if on_demand else skeleton.records
        stored = (*skeleton.records, skeleton.outside, skeleton.tables)
        files = {entry.file for record in stored for entry in record.entries}
        self._store = LayerStore(sorted(files))
        self._parents = {name: _parent(self.model, name) for record in records for name in record.tensors}

        self._hooks = ExitStack()
        look_up_in_files(self.model, skeleton.tables, self._store, device, self._hooks)
        outside = skeleton.outside
        table = input_table(skeleton) if placement.has_table_on_host else None
        if table is not None:
            outside = outside.without(frozenset(table.tensors))
            self._bind_names(self._load_table(table))
            send_rows(self.model.get_input_embeddings(), device, self._hooks)
        streamed = [record for record in records if record.index not in placement.resident_layers]
        resident = [outside, *(record for record in records if record.index in placement.resident_layers)]
        dtype = self.model.dtype
        uses_onednn = device.type == "cpu" and has_onednn(dtype)
        total = sum(record.stored_bytes for record in resident)
        done = 0
        unpacked: set[PackedModule] = set()
        for record in resident:
            weights = self._load_resident(record)
            is_reordered = uses_onednn and (reorders or record.index == OUTSIDE_INDEX)
            self._bind_names(self._in_kernel_order(record, weights) if is_reordered else weights)
            if record.index in placement.unpacked:
                modules = unpacked_modules(skeleton, record, device)
                in_slow_layouts = record.index in placement.slow
                unpack_now(skeleton, modules, device, self._hooks, in_slow_layouts=in_slow_layouts)
                unpacked.update(modules)
                self._store.drop(record.mapped)
            done += record.stored_bytes
            if progress:
                progress(done, total)
        for name, source in skeleton.ties.items():
            if self.model.get_parameter(source).is_meta:
                continue  # packed: what it is unpacked as belongs to one of the two modules
            parent, attribute = _parent(self.model, name)
            parent._parameters[attribute] = self.model.get_parameter(source)
            if uses_onednn and source in skeleton.outside.mapped.tensors and takes_kernel_order(self.model, name):
                self._give_kernel_order(parent, self.model.get_parameter(source))
                self._store.drop(skeleton.outside.mapped)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

        self._stream: LayerStream | None = None
        self._is_sharing = False  # whether a layer stays until another is called
        self._held: int | None = None  # the layer that stays
        # Before weights are touched, and after the logits: a file that changes in a text's last pass is noticed too.
        decoder = self.model.get_submodule(decoder_layers(self.model)[0].rpartition(".")[0])
        self._hooks.callback(decoder.register_forward_pre_hook(self._check_files).remove)
        self._hooks.callback(self.model.register_forward_hook(self._check_files).remove)
        if lends:
            unpack_for_others(skeleton, device, self._hooks)
            unpacked.update(packed_for_others(skeleton))
        hooked = [packed for packed in skeleton.unpacked_whole(device, on_demand=on_demand) if packed not in unpacked]
        num_scratch = max((packed.num_unpacked(dtype, device) for packed in hooked), default=0)
        scratch = torch.empty(num_scratch, dtype=dtype, device=device)
        few = skeleton.few_singly(device, on_demand=on_demand)
        apart = {self.model.get_submodule(group.module_name) for group in few}
        for packed in packed_outside(skeleton):
            if isinstance(packed, PackedHead):
                packed.offer_rows(dtype, device, self._hooks)
        self.few_rows = skeleton.few_rows(dtype, device)
        for packed in hooked:
            module = packed.module
            is_apart = functools.partial(chooses_few, module) if module in apart else None
            packed.hook(scratch, self._hooks, is_apart=is_apart)
        if not on_demand:
            hook_experts_in_layers(self.model, skeleton.computed_singly(device), self._hooks, device=device)
            hook_experts_in_layers(self.model, few, self._hooks, device=device, few_only=True)
        if uses_onednn:
            hook_linear_layers(self.model, dtype, self._hooks)
        if streamed:
            loader: SlotLoader = (
                CudaLoader(
                    self._store,
                    streamed,
                    num_slots=placement.num_slots,
                    pinned_layers=placement.pinned_layers,
                    device=self.copying,
                )
                if self.copying is not None
                else CpuLoader(
                    self._store, streamed, num_slots=placement.num_slots, keeps_cached=placement.is_cacheable
                )
            )
            self._stream = LayerStream(streamed, loader, num_slots=placement.num_slots)
            placement = with_pinned_layers(placement, records, loader.pinned_layers)
            for record in streamed:
                self._watch_mapped(record)
                self._hook(skeleton.layers[record.index], record.index, self._stream)

        self._experts: ExpertSource | None = None
        if placement.experts is not None:
            self._experts = hook_experts(
                self.model,
                skeleton.expert_groups,
                placement.experts,
                self._store,
                self._hooks,
                device=device,
                keeps_cached=placement.is_cacheable,
            )
            placement = with_pinned_experts(placement, self._experts.num_pinned)
        self.placement = placement

    @property
    def expert_counts(self) -> ExpertCounts:
        """The experts that were requested since the model was loaded: none where they are parts of their layers."""
        return self._experts.counts if self._experts else ExpertCounts()

    @property
    def expert_use(self) -> ExpertUse | None:
        """The share of the passes so far that requested each expert; None where they are parts of their layers."""
        return self._experts.use if self._experts else None

    def work_meanwhile(self, work: Callable[[], bool]) -> bool:
        """Have a little of other work done, again and again, where a pass waits for a layer; return whether any does.

        `work` returns False where there is none.
        """
        if self._stream is None:
            return False
        self._stream.meanwhile = work
        return True

    @contextmanager
    def shared_layers(self) -> Iterator[None]:
        """Within this block a layer's weights stay until another layer is called, for calls that take turns."""
        self._is_sharing = True
        try:
            yield
        finally:
            self._is_sharing = False
            self._let_go()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._stream is not None:
            self._stream.release(held)

    def attach(self, adapters: LoadedAdapters) -> None:
        """Let the model's modules add adapters' parts to rows that are to have them."""
        adapters.attach(self.model, self._hooks)

    def close(self) -> None:
        """End the reader and unhook the layers, so that nothing keeps the weights alive."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._hooks.close()

    def _load_resident(self, record: LayerRecord) -> dict[str, Tensor]:
        """Return the record's weights on the device: the mapped file itself where nothing has to change."""
        self._store.populate(record, stays=self.device.type == "cpu")
        self._watch_mapped(record)
        mapped = self._store.views(record.mapped) if self.device.type == "cpu" else {}
        copied = record.copied if self.device.type == "cpu" else record
        # One buffer a layer: large enough for the allocator to return it whole when it is let go.
        flat = in_large_pages(torch.empty(copied.flat_bytes, dtype=torch.uint8, device=self.device))
        self._store.copy(copied, flat)
        self._store.drop(copied)
        return mapped | copied.flat_views(flat)

    def _in_kernel_order(self, record: LayerRecord, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give linear layers their weights in the order of oneDNN's kernel, and return what stays as it is.

        Copies that are not needed any more are let go; mapped weights stay where they lie, and their pages go. Outside
        the layers a weight may be lent, or looked up by rows, so that a copy stays.
        """
        is_layer = record.index >= 0
        ordered = [
            name
            for name, weight in weights.items()
            if (name in record.mapped.tensors or is_layer)
            and weight.dtype == self.model.dtype
            and takes_kernel_order(self.model, name)
        ]
        for name in ordered:
            self._give_kernel_order(_parent(self.model, name)[0], weights[name])
        let_go = [name for name in ordered if name not in record.mapped.tensors]
        if let_go:
            weights = {
                name: weight if name in record.mapped.tensors else weight.clone()
                for name, weight in weights.items()
                if name not in let_go
            }
        if len(let_go) < len(ordered):
            self._store.drop(record.mapped)
        return weights

    def _give_kernel_order(self, module: Any, weight: Tensor) -> None:
        module.kernel_order = [in_kernel_order(weight)]
        self._hooks.callback(delattr, module, "kernel_order")

    def _load_table(self, record: LayerRecord) -> dict[str, Tensor]:
        """Return the input embeddings in RAM: the mapped file itself where nothing has to change."""
        self._store.populate(record)
        if record.mapped.tensors:
            self._store.watch(record)
        flat = torch.empty(record.copied.flat_bytes, dtype=torch.uint8)
        self._store.copy(record.copied, flat)
        self._store.drop(record.copied)
        return self._store.views(record.mapped) | record.copied.flat_views(flat)

    def _bind_names(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            parent, attribute = self._parents.get(name) or _parent(self.model, name)
            if attribute in parent._buffers:
                parent._buffers[attribute] = weight
            else:
                parent._parameters[attribute] = nn.Parameter(weight, requires_grad=False)

    def _watch_mapped(self, record: LayerRecord) -> None:
        if self.device.type == "cpu" and record.mapped.tensors:
            self._store.watch(record)

    def _check_files(self, *_: Any) -> None:
        self._store.check_watched()

    def _hook(self, layer: nn.Module, index: int, stream: LayerStream) -> None:
        def fetch(_module: nn.Module, _arguments: Any) -> None:
            if self._held != index:
                self._let_go()
                self._bind_names(stream.acquire(index))

        def give_back(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            if self._is_sharing:
                self._held = index
            else:
                stream.release(index)

        self._hooks.callback(layer.register_forward_pre_hook(fetch).remove)
        self._hooks.callback(layer.register_forward_hook(give_back).remove)


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that owns a parameter, and the parameter's name in it."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
