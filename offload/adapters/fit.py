"""An adapter is matched with a model's modules: names, kinds and shapes, before a weight is read."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from offload.adapters.adapter import Adapter, Delta
from offload.adapters.use import refused
from offload.checkpoint import TensorEntry
from offload.layouts.onednn import is_multiplied_by_hand, is_read_whole
from offload.skeleton import Skeleton

EXPERTS = ".experts."
SAMPLE_ROWS = 256  # of a table that is compared with the base's
OTHER_BASE = "Give the model that the adapter was trained on."
WITHOUT = "Train the adapter without it, or merge it into its model with peft."
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedAdapter:
    """An adapter whose parts are those of a model's modules, by the names that the model has for them."""

    name: str
    deltas: Mapping[str, Delta]  # by module
    replaced: Mapping[str, TensorEntry]  # by parameter
    num_bytes: int  # in memory: factors in float32, parameters as the model computes, and what finds lengths


def fitted(adapter: Adapter, name: str, skeleton: Skeleton) -> FittedAdapter:
    """Return the adapter as a model has it; raises OffloadError for a part that fits no module, by its name."""
    model = skeleton.model
    names = _Names(model)
    deltas: dict[str, Delta] = {}
    for stored, delta in adapter.deltas.items():
        module = names.of(f"{stored}.weight").removesuffix(".weight")
        _check_delta(adapter, module, delta, skeleton)
        deltas[module] = delta
    replaced = {}
    for stored, entry in adapter.replaced.items():
        parameter = names.of(stored)
        _check_replaced(adapter, parameter, entry, skeleton)
        replaced[parameter] = entry
    tables = {names.of(stored): entry for stored, entry in adapter.tables.items()}
    for parameter, entry in tables.items():
        if not _is_of_base(parameter, entry, skeleton):
            _check_replaced(adapter, parameter, entry, skeleton)
            replaced |= dict.fromkeys(_tied(parameter, skeleton) - (tables.keys() - {parameter}), entry)
    num_numbers = sum(
        sum(_count(one) for one in (delta.down, delta.up, delta.up_bias, delta.magnitude)) for delta in deltas.values()
    )
    num_bytes = num_numbers * FLOAT32_BYTES + sum(_count(one) for one in replaced.values()) * model.dtype.itemsize
    num_bytes += _unpacked_bytes(skeleton, [path for path, delta in deltas.items() if delta.magnitude is not None])
    return FittedAdapter(name=name, deltas=deltas, replaced=replaced, num_bytes=num_bytes)


def _unpacked_bytes(skeleton: Skeleton, paths: Iterable[str]) -> int:
    """Return the most bytes that the lengths of a weight's rows take, which are found when a layer first runs."""
    modules = {skeleton.model.get_submodule(path) for path in paths}
    packed = [weight for one in skeleton.packed if one.module in modules for _, weight in one.weights]
    whole = [math.prod(weight.shape) for weight in packed if weight.packing.unpack_some is None]
    return max(whole, default=0) * skeleton.model.dtype.itemsize


class _Names:
    """The names of a model's parameters, also for those that older versions of transformers gave them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._own = model.state_dict()
        self._renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
        self._prefix = model.base_model_prefix

    def of(self, stored: str) -> str:
        """Return the present name of a parameter: the same where there is none."""
        if stored in self._own:
            return stored
        found, _ = rename_source_key(stored, self._renamings, [], self._prefix, self._own)
        return found if found in self._own else stored


def _module(adapter: Adapter, path: str, skeleton: Skeleton) -> nn.Module:
    """Return a module of a model's decoder; raises OffloadError where there is none."""
    found: nn.Module | None = dict(skeleton.model.named_modules()).get(path)
    if found is None:
        joined = dict(skeleton.model.named_modules()).get(path.partition(EXPERTS)[0] + EXPERTS.rstrip("."))
        if EXPERTS in path and joined is not None:
            what = f"'{adapter.path}' has a part of '{path}', an expert, and this model's experts have joined weights."
            raise refused(what, WITHOUT)
        what = f"'{adapter.path}' has a part of '{path}', and this model has no such module."
        raise refused(what, OTHER_BASE)
    if path not in _read_modules(skeleton):
        what = f"'{adapter.path}' has a part of '{path}', which reads images or sounds."
        raise refused(what, WITHOUT)
    return found


def _read_modules(skeleton: Skeleton) -> set[str]:
    """Return the modules whose parameters, or packed parts, are read."""
    records = (*skeleton.records, skeleton.outside, skeleton.tables)
    stored = [*(name for record in records for name in record.tensors), *skeleton.ties, *skeleton.ties.values()]
    return {(name.partition("_packed.")[0] if "_packed." in name else name).rpartition(".")[0] for name in stored}


def _check_delta(adapter: Adapter, path: str, delta: Delta, skeleton: Skeleton) -> None:
    module = _module(adapter, path, skeleton)
    named = f"'{adapter.path}' has a part of '{path}'"
    kind: Any = type(module)
    sizes: Any = module
    if f"{path}.weight" in skeleton.tables.tensors:
        raise refused(f"{named}, a table that stays in its file.", WITHOUT)
    if isinstance(module, nn.Embedding):
        columns, rows = sizes.num_embeddings, sizes.embedding_dim
    elif kind is nn.Linear:
        columns, rows = sizes.in_features, sizes.out_features
    elif kind is Conv1D:
        columns, rows = sizes.nx, sizes.nf
    else:
        raise refused(f"{named}, a {kind.__name__}, which is no linear layer and no embedding.", WITHOUT)
    if delta.is_embedding != isinstance(module, nn.Embedding):
        are = "an embedding" if delta.is_embedding else "a linear layer"
        raise refused(f"{named} as of {are}, and this model has a {kind.__name__} there.", OTHER_BASE)
    if is_multiplied_by_hand(skeleton.model, f"{path}.weight"):
        raise refused(f"{named}, whose weight the layer multiplies by itself.", WITHOUT)
    if is_read_whole(skeleton.model, path) and (delta.magnitude is not None or delta.up_bias is not None):
        more = "magnitudes (DoRA)" if delta.magnitude is not None else "a bias"
        raise refused(f"{named} with {more}, whose weight latent attention multiplies by itself.", WITHOUT)
    if (delta.down.parameter_shape[1], delta.up.parameter_shape[0]) != (columns, rows):
        found = f"{delta.down.parameter_shape[1]} to {delta.up.parameter_shape[0]}"
        raise refused(f"{named} from {found} numbers, and this model has {columns} to {rows}.", OTHER_BASE)


def _check_replaced(adapter: Adapter, parameter: str, entry: TensorEntry, skeleton: Skeleton) -> None:
    path, _, attribute = parameter.rpartition(".")
    named = f"'{adapter.path}' has '{parameter}'"
    module = _module(adapter, path, skeleton)
    found: Tensor | None = module._parameters.get(attribute)
    if found is None:
        raise refused(f"{named}, and this model's '{path}' has no parameter of that name.", OTHER_BASE)
    shape = tuple(found.shape)
    if entry.parameter_shape != shape:
        what = f"{named} of shape {list(entry.parameter_shape)}, and this model has {list(shape)}"
        is_table = isinstance(module, nn.Embedding) or module is skeleton.model.get_output_embeddings()
        raise refused(f"{what}: the table was resized." if is_table else f"{what}.", OTHER_BASE)
    if not can_be_replaced(module) or parameter in skeleton.tables.tensors:
        what = f"{named}, trained whole, in a {type(module).__name__}, where the rows of texts cannot be told apart."
        raise refused(what, WITHOUT)
    weight = f"{path}.weight"
    if is_read_whole(skeleton.model, path) or is_multiplied_by_hand(skeleton.model, weight):
        raise refused(f"{named}, which the layer multiplies by itself.", WITHOUT)


def can_be_replaced(module: nn.Module) -> bool:
    """Return whether a module's parameters may be other ones for some rows: it makes a row of a row, and is called."""
    if type(module) is nn.Linear or isinstance(module, (nn.Embedding, Conv1D)):
        return True
    kind: Any = type(module)
    takes = [one for one in list(inspect.signature(kind.forward).parameters.values())[1:] if one.default is one.empty]
    is_of_vectors = all(one.dim() == 1 for one in module._parameters.values() if one is not None)
    return "norm" in kind.__name__.lower() and is_of_vectors and not module._modules and len(takes) == 1


def _tied(parameter: str, skeleton: Skeleton) -> set[str]:
    """Return the parameters that are the same as one, and itself: PEFT loads a table where all of them lie."""
    source = skeleton.ties.get(parameter, parameter)
    return {source, *(name for name, other in skeleton.ties.items() if other == source)}


def _is_of_base(parameter: str, entry: TensorEntry, skeleton: Skeleton) -> bool:
    """Return whether a whole table in an adapter's file is the base's own, as PEFT stores it beside an embedding's.

    Rows that are spread over the table are compared. No packed table is the one that is stored whole.
    """
    stored = skeleton.outside.tensors.get(skeleton.ties.get(parameter, parameter))
    if stored is None:
        return False
    (piece, *more) = stored.pieces
    if more or piece.computed is not None or piece.is_transposed or entry.parameter_shape != stored.shape:
        return False
    ours = [row.to(stored.dtype) for row in _sample(piece)]
    theirs = [row.to(stored.dtype) for row in _sample(entry)]
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _sample(entry: TensorEntry) -> Iterator[Tensor]:
    """Yield rows of a matrix, from its first to its last."""
    num_rows, columns = entry.shape
    count = min(SAMPLE_ROWS, num_rows)
    num_bytes = columns * entry.dtype.itemsize
    with entry.file.open("rb") as file:
        for number in range(count):
            file.seek(entry.offset + number * (num_rows - 1) // max(1, count - 1) * num_bytes)
            yield torch.frombuffer(bytearray(file.read(num_bytes)), dtype=entry.dtype)


def _count(entry: TensorEntry | None) -> int:
    return 0 if entry is None else math.prod(entry.parameter_shape)
