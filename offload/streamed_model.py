"""A transformers model whose decoder layers read their weights from a stream.

`build_skeleton` makes the module graph on the meta device and matches it with the checkpoint's
headers: no weight is read. `StreamedModel` then loads what stays resident and hooks the streamed
layers. transformers keeps its own forward, so rope, norms and each family's quirks are its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from offload.checkpoint import Checkpoint, TensorEntry
from offload.errors import CheckpointError
from offload.layer_store import LayerRecord, LayerStore
from offload.loaders import CpuLoader, CudaLoader, copy_layer
from offload.placement import Placement
from offload.stream import LayerStream, SlotLoader

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without weights, and where its weights are to be found."""

    model: PreTrainedModel  # every parameter on the meta device
    layers: nn.ModuleList
    records: tuple[LayerRecord, ...]  # the decoder layers
    outside: LayerRecord  # everything else: embeddings, norms, head, stored buffers
    ties: dict[str, str]  # parameter -> the parameter that it is


def build_skeleton(config: PretrainedConfig, checkpoint: Checkpoint, *, dtype: torch.dtype) -> Skeleton:
    """The module graph on the meta device, matched with the checkpoint's tensors.

    Raises CheckpointError when the family has no single list of decoder layers, or when names or
    shapes differ from the checkpoint's.
    """
    model = _build_on_meta(config, checkpoint, dtype=dtype)
    prefix, layers = _decoder_layers(model)
    stored = _stored_by_parameter_name(checkpoint, model)
    ties = _ties(model, stored)
    layer_pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    layer_entries: list[dict[str, TensorEntry]] = [{} for _ in layers]
    outside_entries: dict[str, TensorEntry] = {}
    dtypes: dict[str, torch.dtype] = {}
    missing = []
    persistent_buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *persistent_buffers.items()]:
        entry = stored.get(name)
        if name in ties:
            continue
        if entry is None:
            missing.append(name)
            continue
        if entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                "E_SHAPE_MISMATCH",
                f"'{name}' has shape {list(entry.shape)} in '{entry.file.name}', "
                f"but config.json makes it {list(tensor.shape)}.",
                "Use the config.json that belongs to these weights.",
            )
        dtypes[name] = tensor.dtype
        match = layer_pattern.match(name)
        # Buffers are small and stay: they need no place in the stream.
        entries = layer_entries[int(match[1])] if match and name not in persistent_buffers else outside_entries
        entries[name] = entry
    if missing:
        raise CheckpointError(
            "E_TENSOR_MISSING",
            f"'{checkpoint.folder}' lacks {len(missing)} tensors of {type(model).__name__}, '{missing[0]}' first.",
            "Download the model again; quantised checkpoints and fused expert layouts are not supported yet.",
        )
    records = tuple(
        LayerRecord(index=index, entries=entries, dtypes={name: dtypes[name] for name in entries})
        for index, entries in enumerate(layer_entries)
    )
    outside = LayerRecord(index=-1, entries=outside_entries, dtypes={name: dtypes[name] for name in outside_entries})
    return Skeleton(model=model, layers=layers, records=records, outside=outside, ties=ties)


def _build_on_meta(config: PretrainedConfig, checkpoint: Checkpoint, *, dtype: torch.dtype) -> PreTrainedModel:
    """The family's module with parameters on the meta device."""
    try:
        # Buffers stay real: rotary frequencies are computed, not stored, and must stay float32.
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()  # registering on the meta device made separate objects of tied parameters
    except Exception as error:  # a value that a family cannot use shows in many ways
        raise CheckpointError(
            "E_CONFIG_INVALID",
            f"transformers cannot build the model of '{checkpoint.folder}' ({type(error).__name__}: {error}).",
            "Download its config.json again.",
        ) from error
    model.eval().requires_grad_(False)
    return model


def _ties(model: PreTrainedModel, stored: dict[str, TensorEntry]) -> dict[str, str]:
    """Parameters that are another one's: name -> that one's name.

    A tied parameter that is stored beside the other one is a weight of its own, whatever the config
    says; where only one of the two is stored, that one is the other's.
    """
    first_name: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(parameter), name)
        if first == name or (name in stored and first in stored):
            continue
        if first in stored:
            ties[name] = first
        else:
            ties[first] = name
    return ties


def _decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The one ModuleList that holds the decoder layers, with its name."""
    text_config = model.config.get_text_config(decoder=True)
    num_layers = text_config.num_hidden_layers
    if num_layers < 1:
        raise CheckpointError(
            "E_CONFIG_INVALID", f"num_hidden_layers is {num_layers}.", "Download the model's config.json again."
        )
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and "." in name
    ]
    outermost = [item for item in found if not any(item[0].startswith(f"{other}.") for other, _ in found)]
    if len(outermost) != 1:
        raise CheckpointError(
            "E_UNSUPPORTED_ARCHITECTURE",
            f"{type(model).__name__} has no single list of {num_layers} decoder layers.",
            "Use a decoder-only model such as Llama, Qwen, Mistral, Gemma, Phi-3 or GPT-NeoX.",
        )
    return outermost[0]


def _stored_by_parameter_name(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, TensorEntry]:
    """The checkpoint's tensors under the names that the installed transformers uses.

    It has renamed modules over time and knows how; a checkpoint of the bare body lacks its prefix.
    """
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    prefix = f"{model.base_model_prefix}."
    body_parameters = {name for name, _ in getattr(model, model.base_model_prefix).named_parameters()}
    stored = {}
    for name, entry in checkpoint.tensors.items():
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        stored[prefix + renamed if renamed in body_parameters else renamed] = entry
    return stored


class StreamedModel:
    """A model ready to run: resident weights loaded, streamed layers hooked.

    `model` is called like any transformers model. `close` ends the reader; the weights of streamed
    layers are valid only inside a forward.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        placement: Placement,
        *,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self.model = skeleton.model
        self.device = device
        self.placement = placement
        records = skeleton.records
        files = {entry.file for record in (*records, skeleton.outside) for entry in record.entries.values()}
        self._store = LayerStore(sorted(files))
        self._parents = {name: _parent(self.model, name) for record in records for name in record.entries}

        resident = [skeleton.outside, *records[: placement.num_resident]]
        total = sum(record.stored_bytes for record in resident)
        done = 0
        for record in resident:
            self._bind_names(self._load_resident(record))
            done += record.stored_bytes
            if progress:
                progress(done, total)
        for name, source in skeleton.ties.items():
            parent, attribute = _parent(self.model, name)
            parent._parameters[attribute] = self.model.get_parameter(source)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

        self._stream: LayerStream | None = None
        self._hooks: list[RemovableHandle] = []
        streamed = records[placement.num_resident :]
        if streamed:
            loader: SlotLoader = (
                CudaLoader(
                    self._store,
                    streamed,
                    num_slots=placement.num_slots,
                    pinned_layers=placement.pinned_layers,
                    device=device,
                )
                if device.type == "cuda"
                else CpuLoader(self._store, streamed, num_slots=placement.num_slots)
            )
            self._stream = LayerStream(streamed, loader, num_slots=placement.num_slots)
            for record in streamed:
                self._hook(skeleton.layers[record.index], record.index, self._stream)

    def close(self) -> None:
        """End the reader and unhook the layers, so that nothing keeps the weights alive."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _load_resident(self, record: LayerRecord) -> dict[str, Tensor]:
        """The record's weights on the device: the mapped file itself where nothing has to change."""
        self._store.populate(record.entries.values())
        if self.device.type == "cpu" and not record.is_converted:
            return self._store.views(record)
        # One buffer a layer: large enough for the allocator to return it whole when it is let go.
        flat = torch.empty(record.flat_bytes, dtype=torch.uint8, device=self.device)
        copy_layer(self._store, record, flat)
        self._store.drop(record.entries.values())
        return record.flat_views(flat)

    def _bind_names(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            parent, attribute = self._parents.get(name) or _parent(self.model, name)
            if attribute in parent._buffers:
                parent._buffers[attribute] = weight
            else:
                parent._parameters[attribute] = nn.Parameter(weight, requires_grad=False)

    def _hook(self, layer: nn.Module, index: int, stream: LayerStream) -> None:
        def fetch(_module: nn.Module, _arguments: Any) -> None:
            self._bind_names(stream.acquire(index))

        def give_back(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            stream.release(index)

        self._hooks += [layer.register_forward_pre_hook(fetch), layer.register_forward_hook(give_back)]


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns a parameter, and the parameter's name in it."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
