"""A model without weights, matched with a checkpoint's headers.

The module graph is on the meta device, and every parameter is found in the checkpoint: no weight is read.
"""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from offload.attached_weights import attach_packed_weights, detach_packed_weights
from offload.checkpoint import Checkpoint, Pieces, TensorEntry
from offload.device import has_grouped_products
from offload.errors import CheckpointError
from offload.experts.expert_group import ExpertGroup, find_experts, scratch_weights
from offload.file_tables import take_tables
from offload.formats.known import readable_formats
from offload.formats.published import temporary_bytes
from offload.formats.stated import stated_packing
from offload.gguf.checkpoint import GGUF, check_all_read
from offload.layer_store import LayerRecord, StoredTensor
from offload.layouts.known import kernel_of
from offload.layouts.layout import TREE_ROWS, Kernel
from offload.packed_weight import PackedModule, PackedWeight
from offload.placement import OUTSIDE_INDEX
from offload.stored_names import is_stored, pieces_by_parameter, surplus_weights
from offload.text_part import decoder_layers, drop_parameters, layer_by_name, model_from_config, unread_names
from offload.tower import TowerRecord, tower_record

OF_SOUNDS = ("audio", "speech")  # in the names of modules
LARGE_NUMBERS = 1 << 28  # of one tensor: systems may refuse its memory, even if nothing is written there


class NoInitialValues(TorchFunctionMode):
    """Leaves tensors without memory as they are: drawing values for them draws none, and takes time all the same.

    Weights are without memory from the start where they are so large that a system may refuse it.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is torch.empty and named.get("device") is None:
            sizes = arguments[0] if arguments and not isinstance(arguments[0], int) else arguments
            if math.prod(named.get("size", sizes)) >= LARGE_NUMBERS:
                named = {**named, "device": "meta"}
        if getattr(function, "__name__", "") in _DRAWING:
            tensor = arguments[0] if arguments else named["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*arguments, **named)


_DRAWING = {"normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_", "kaiming_normal_"}


PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # numbers that are weights as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model without weights, and where its weights are to be found."""

    model: PreTrainedModel  # every parameter on the meta device
    layers: nn.ModuleList
    records: tuple[LayerRecord, ...]  # the decoder layers
    outside: LayerRecord  # everything else: embeddings, norms, head, stored buffers
    ties: dict[str, str]  # parameter -> the parameter that it is
    packed: tuple[PackedModule, ...]  # modules with quantised weights
    num_unread: int = 0  # weights of towers for images and sounds, which are left out
    tower: TowerRecord | None = None  # those for images; None where the files have none that could be read
    surplus: tuple[str, ...] = ()  # stored weights that are no part of the model
    lent: frozenset[str] = frozenset()  # parameters and stored buffers that another model lends
    tables: LayerRecord  # parameters that stay in their files, where few rows are looked up
    expert_groups: tuple[ExpertGroup, ...] = ()  # of layers whose experts can be taken out of their records
    may_repack: bool = True  # packed weights may be put in a layout when they are loaded, in which scales are bf16

    @property
    def dense_records(self) -> tuple[LayerRecord, ...]:
        """The decoder layers without those experts."""
        names = frozenset(name for group in self.expert_groups for name in group.names)
        return tuple(record.without(names) for record in self.records)

    def computed_singly(self, device: torch.device, *, on_demand: bool = False) -> tuple[ExpertGroup, ...]:
        """Return the experts that are computed one by one: those on demand, and all on a CPU.

        There it costs nothing to wait for the router, packed ones need not be unpacked, and torch's product of all of
        them gives one row of an expert other bits than several.
        """
        return self.expert_groups if on_demand or device.type == "cpu" else ()

    def few_singly(self, device: torch.device, *, on_demand: bool = False) -> tuple[ExpertGroup, ...]:
        """Return the experts in layers of a card that are computed one by one where rows choose few of a layer's.

        Those that are not packed only where the card has no grouped product: torch then loops over all of them.
        """
        if on_demand or device.type == "cpu":
            return ()
        return tuple(group for group in self.expert_groups if group.is_packed or not has_grouped_products(device))

    def unpacked_whole(self, device: torch.device, *, on_demand: bool = False) -> tuple[PackedModule, ...]:
        """Return the modules whose weights are unpacked before they run: not those of experts one by one."""
        groups = self.computed_singly(device, on_demand=on_demand)
        apart = {self.model.get_submodule(group.module_name) for group in groups}
        return tuple(packed for packed in self.packed if packed.module not in apart)

    def num_scratch(self, dtype: torch.dtype, device: torch.device, *, on_demand: bool = False) -> int:
        """Return the number of weights that have to be unpacked at once, those of single experts aside."""
        modules = self.unpacked_whole(device, on_demand=on_demand)
        return max((module.num_unpacked(dtype, device) for module in modules), default=0)

    def unpack_bytes(self, dtype: torch.dtype, device: torch.device, *, on_demand: bool = False) -> int:
        """Return the bytes of the weights that are unpacked at once, and of the temporaries."""
        groups = (*self.computed_singly(device, on_demand=on_demand), *self.few_singly(device, on_demand=on_demand))
        num_weights = self.num_scratch(dtype, device, on_demand=on_demand) + scratch_weights(groups)
        return num_weights * dtype.itemsize + (temporary_bytes(device) if self.packed else 0)

    def expert_unpack_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of an expert's weights that are unpacked or converted at once."""
        return scratch_weights(self.expert_groups) * dtype.itemsize

    def multiplied_share(self, dtype: torch.dtype, device: torch.device) -> float:
        """Return the share of the layers' weights that rows of this dtype are multiplied with as they are packed."""
        tensors = itertools.chain.from_iterable(record.tensors.items() for record in self.records)
        num_unpacked = sum(math.prod(tensor.shape) for name, tensor in tensors if "_packed." not in name)
        num_packed = num_multiplied = 0
        for weight, kernel in self._kernels(dtype, device):
            num_packed += math.prod(weight.shape)
            num_multiplied += 0 if kernel is None else math.prod(weight.shape)
        return num_multiplied / (num_unpacked + num_packed)

    def few_rows(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many rows of a text are multiplied with packed weights as they are; 0 where no text is cut so.

        On a processor a row's bits then hang on no company: more rows are those of a prompt.
        """
        if not self.packed or device.type != "cpu":
            return 0
        limits = {kernel.max_rows for _, kernel in self._kernels(dtype, device) if kernel is not None}
        return max(limits - {sys.maxsize}, default=TREE_ROWS)

    def _kernels(self, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[PackedWeight, Kernel | None]]:
        """Yield the packed weights of the layers, and what multiplies each as it is."""
        inside = {module for layer in self.layers for module in layer.modules()}
        for owner in (packed for packed in self.packed if packed.module in inside):
            for _, weight in owner.weights:
                has_form = type(owner.module) is nn.Linear or len(weight.shape) > 2  # of experts each by itself
                yield weight, kernel_of(weight.packing, weight.shape[-2:], dtype, device) if has_form else None

    @property
    def packed_formats(self) -> tuple[str, ...]:
        """The formats of quantised weights, each named once."""
        return tuple(dict.fromkeys(packed.packing.name for module in self.packed for _, packed in module.weights))


def build_skeleton(
    config: PretrainedConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    attach: Callable[[PreTrainedModel], None] | None = None,
    own_modules: tuple[str, ...] | None = None,
) -> Skeleton:
    """Return the module graph on the meta device, matched with the checkpoint's tensors.

    `attach` may add modules to the family's own. With `own_modules` the checkpoint holds the decoder layers
    and those modules alone: all other parameters stay on the meta device until another model lends its own.
    Raises CheckpointError where there is no single list of decoder layers, or where names or shapes differ.
    """
    model = build_on_meta(config, checkpoint.folder, dtype=dtype)
    if attach:
        attach(model)
    return _matched(model, config, checkpoint, own_modules)


def match_again(
    skeleton: Skeleton, config: PretrainedConfig, checkpoint: Checkpoint, *, own_modules: tuple[str, ...] | None = None
) -> Skeleton:
    """Match a skeleton's module graph with another form of its checkpoint; the skeleton cannot be loaded any more."""
    detach_packed_weights(skeleton.packed)
    matched = _matched(skeleton.model, config, checkpoint, own_modules)
    # The weights of towers were dropped when they were counted.
    return replace(matched, num_unread=skeleton.num_unread, tower=skeleton.tower, surplus=skeleton.surplus)


def _matched(
    model: PreTrainedModel, config: PretrainedConfig, checkpoint: Checkpoint, own_modules: tuple[str, ...] | None
) -> Skeleton:
    layers = decoder_layers(model)[1]
    lent = frozenset() if own_modules is None else lent_names(model, own_modules)
    unread = unread_names(model)
    stored = pieces_by_parameter(checkpoint, model)
    ties = _ties(model, stored)
    packed, packed_names = attach_packed_weights(model, stored, ties, stated_packing(config), unread)
    layer_of = layer_by_name(model)  # and of the packed parts, which have names by now
    common = {source for name, source in ties.items() if name in layer_of and source in layer_of}
    layer_tensors: list[dict[str, StoredTensor]] = [{} for _ in layers]
    outside: dict[str, StoredTensor] = {}
    missing = []
    buffers = stored_buffers(model)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers.items()]:
        if name in ties or name in packed_names or name in lent or name in unread:
            continue
        pieces = stored.get(name)
        if pieces is None:
            missing.append(name)
            continue
        is_inside = name in layer_of and name not in buffers and name not in common
        place = layer_tensors[layer_of[name]] if is_inside else outside
        place[name] = _stored_tensor(name, pieces, tensor)
    if missing:
        what = f"'{checkpoint.folder}' lacks {len(missing)} tensors of {type(model).__name__}, '{missing[0]}' first."
        fix = f"Download the model again; of quantised checkpoints, these are read: {readable_formats()}."
        raise CheckpointError("E_TENSOR_MISSING", what, fix)
    groups = (
        find_experts(layer_of[name], name, module, layer_tensors[layer_of[name]])
        for name, module in model.named_modules()
        if name in layer_of
    )
    read = {*outside, *(name for tensors in layer_tensors for name in tensors), *ties, *packed_names, *lent, *unread}
    is_gguf = stated_packing(config).get("quant_method") == GGUF
    if is_gguf:
        check_all_read(checkpoint, stored, read, len(layers))
    surplus = () if is_gguf else surplus_weights(model, stored, read)
    num_unread = sum(tensor.numel() for name, tensor in model.state_dict().items() if name in unread)
    tower = _tower(model, unread, stored)
    drop_parameters(model, unread)
    tables = take_tables(model, [*layer_tensors, outside])
    return Skeleton(
        model=model,
        layers=layers,
        records=tuple(LayerRecord(index=index, tensors=tensors) for index, tensors in enumerate(layer_tensors)),
        outside=LayerRecord(index=OUTSIDE_INDEX, tensors=outside),
        tables=tables,
        ties={name: source for name, source in ties.items() if name not in lent and name not in unread},
        packed=packed,
        num_unread=num_unread,
        tower=tower,
        surplus=surplus,
        lent=lent,
        expert_groups=tuple(group for group in groups if group is not None),
    )


def _tower(model: PreTrainedModel, unread: frozenset[str], stored: dict[str, Pieces]) -> TowerRecord | None:
    """Return where the weights of a tower for images are; None where they are packed, or not there."""
    names = [name for name in sorted(unread) if not any(word in name for word in OF_SOUNDS)]
    state = model.state_dict(keep_vars=True)
    try:
        tensors = {name: _stored_tensor(name, stored[name], state[name]) for name in names}
    except (KeyError, CheckpointError):
        return None
    return tower_record(model, tensors) if tensors else None


def lent_names(model: PreTrainedModel, own_modules: tuple[str, ...]) -> frozenset[str]:
    """Return names of parameters and stored buffers outside the decoder layers and `own_modules`."""
    own = tuple(f"{module}." for module in (decoder_layers(model)[0], *own_modules))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return frozenset(name for name in (*names, *stored_buffers(model)) if not name.startswith(own))


def build_on_meta(config: PretrainedConfig, folder: object, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return the family's module with parameters on the meta device; `folder` is named in errors."""
    try:
        # Buffers stay real: rotary frequencies are computed, not stored, and must stay float32.
        with init_empty_weights(include_buffers=False), NoInitialValues():
            model = model_from_config(copy.deepcopy(config), dtype=dtype)  # which writes the dtype into it
        model.tie_weights()  # registering on the meta device made separate objects of tied parameters
    except Exception as error:  # a value that a family cannot use shows in many ways
        what = f"transformers cannot build the model of '{folder}' ({type(error).__name__}: {error})."
        raise CheckpointError("E_CONFIG_INVALID", what, "Download its config.json again.") from error
    model.eval().requires_grad_(False)
    return model


def stored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that belong to a checkpoint."""
    names = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _ties(model: PreTrainedModel, stored: dict[str, Pieces]) -> dict[str, str]:
    """Return the parameters that are the same as another one: name -> that one's name.

    A tied parameter that is stored beside the other one is a weight of its own, whatever the config
    says; where only one of the two is stored, that one stands for both.
    """
    first_name: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(parameter), name)
        if first == name or (is_stored(name, stored) and is_stored(first, stored)):
            continue
        if is_stored(first, stored):
            ties[name] = first
        else:
            ties[first] = name
    return ties


def _stored_tensor(name: str, pieces: Pieces, tensor: Tensor) -> StoredTensor:
    """Return the parameter and its pieces; raises CheckpointError when they do not make it up."""
    shape = tuple(tensor.shape)
    as_stored = [piece for piece in pieces if piece.computed is None]
    odd = next((piece for piece in as_stored if piece.dtype not in (tensor.dtype, *PLAIN)), None)
    if odd is not None:
        raise CheckpointError(
            "E_QUANTIZED",
            f"'{odd.name}' holds {odd.dtype} numbers without scales that belong to '{name}': experts that "
            "bitsandbytes quantised one by one, or half a checkpoint.",
            "Download the model again, or use its bf16 or fp16 safetensors, with `quant=nf4` or int8.",
        )
    found = pieces[0].parameter_shape
    if len(pieces) == 1 and found != shape:
        raise _shape_mismatch(name, list(pieces[0].shape), pieces[0], shape)
    columns, expected = (found[-2:-1], shape[-2:-1]) if pieces[0].is_transposed else (found[-1:], shape[-1:])
    if pieces[0].is_in_turn:
        columns = (found[-1] * len(pieces),)
    if sum(math.prod(piece.parameter_shape) for piece in pieces) != tensor.numel() or columns not in (expected, ()):
        raise _shape_mismatch(name, f"{len(pieces)} times {list(pieces[0].shape)}", pieces[0], shape)
    return StoredTensor(pieces=pieces, shape=shape, dtype=tensor.dtype)


def _shape_mismatch(name: str, found: object, piece: TensorEntry, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(
        "E_SHAPE_MISMATCH",
        f"'{name}' has shape {found} in '{piece.file.name}', but its settings make it {list(shape)}.",
        "Use the config.json that belongs to these weights.",
    )
