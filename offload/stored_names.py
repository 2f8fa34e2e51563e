"""The checkpoint's tensors under the parameter names that the installed transformers uses.

transformers has renamed modules over time and fuses the experts of a layer into one parameter. It
describes both in its conversion mapping, which is read here and applied to names alone: the
pieces of a fused parameter follow each other in memory, transposed tensors are seen through a view,
and so are rows that lie in turn with another matrix's, so that no weight has to be rearranged. A tensor
that is one of several in a parameter, whatever the mapping says, has its number in brackets behind the name.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from offload.checkpoint import Checkpoint, Pieces, TensorEntry, split_number
from offload.errors import CheckpointError
from offload.formats.known import PART_LEAVES
from offload.text_part import unread_names

UNPACKS = "Inkling2LoopDequantizeExperts"  # a step of transformers', which older versions lack


def pieces_by_parameter(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, Pieces]:
    """Return parameter name -> the tensors that make it up, in the order in which they lie in it.

    The parts of a packed weight go where the weight would go: they stand beside it, or below a parameter that is
    made of several. Raises CheckpointError where their order in memory would not be the parameter's.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    own_names = model.state_dict()
    found: dict[str, dict[str | None, list[TensorEntry]]] = defaultdict(lambda: defaultdict(list))
    numbered = set()
    for stored_name in sorted(checkpoint.tensors, key=_in_order):
        name, number = split_number(stored_name)
        module, _, leaf = name.rpartition(".")
        of_weight = f"{module}.weight" if leaf in PART_LEAVES else name
        target, pattern = rename_source_key(of_weight, renamings, converters, model.base_model_prefix, own_names)
        if target not in own_names and of_weight in own_names:  # a rule for other modules took it, too
            target, pattern = of_weight, None
        if leaf in PART_LEAVES:
            target = f"{target.removesuffix('.weight')}.{leaf}"
        found[target][pattern].append(checkpoint.tensors[stored_name])
        if number is not None:
            numbered.add(target)
    pieces: dict[str, Pieces] = {}
    for target, by_pattern in found.items():
        if None in by_pattern:
            pieces[target] = tuple(by_pattern[None][: None if target in numbered else 1])
            continue
        converter = next(c for c in converters if set(by_pattern) <= set(c.source_patterns))
        sources = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
        if split := _split(converter, sources, target, own_names):
            pieces |= split
            continue
        parameter = own_names.get(target)
        in_order = _first_rows(converter, sources, parameter) or _transposed(converter, sources, parameter)
        in_order = in_order or _in_memory_order(converter, sources)
        if in_order is not None:
            pieces[target] = in_order
        elif target in own_names and target not in unread_names(model):
            raise _unreadable(checkpoint, sources[0][0], converter)
    return pieces


def _unreadable(checkpoint: Checkpoint, entry: TensorEntry, converter: WeightConverter) -> CheckpointError:
    """Return the error of a tensor that a conversion does more to than is done here."""
    stored = f"'{checkpoint.folder}' stores '{entry.name}'"
    if type(converter.operations[0]).__name__ == UNPACKS:
        what = f"{stored} packed in a form that is not read: transformers unpacks all of it when it loads the model."
        return CheckpointError("E_QUANTIZED", what, "Use the model's bf16 safetensors, with `quant=nf4`.")
    return CheckpointError(
        "E_UNSUPPORTED_ARCHITECTURE",
        f"{stored} transposed or in another order than transformers computes with, and weights are streamed as they "
        "lie in the file.",
        "Use a model of another family.",
    )


def _in_order(name: str) -> tuple[list[object], int]:
    whole, number = split_number(name)
    return dot_natural_key(whole), number or 0


def is_stored(parameter: str, stored: Collection[str]) -> bool:
    """Return whether a parameter is stored as it is, or as parts beside it."""
    module = parameter.removesuffix(".weight")
    return parameter in stored or any(f"{module}.{leaf}" in stored for leaf in PART_LEAVES)


def _in_memory_order(converter: WeightConverter, sources: list[list[TensorEntry]]) -> Pieces | None:
    """Return the order of the pieces in the converted tensor; None where it is no mere sequence of them."""
    operations: list[Any] = converter.operations
    if _unpacks_nothing(operations[0], sources):
        if len(operations) == 1:
            return (sources[0][0],)
        operations = operations[1:]
    elif len(sources) != len(converter.source_patterns):
        return None
    steps = [(type(operation), getattr(operation, "dim", None)) for operation in operations]
    if len(steps) == 1 and (halves := _in_turn(operations[0], sources)):
        steps, sources = [(Concatenate, steps[0][1])], [[half] for half in halves]
    if steps[0][0].__name__ == "Inkling2LoopMergeMessageQueries" and not operations[0].inverse:
        own, others = (_rows(source[0]) for source in sources)  # [query, mlp] and [key, value] of each layer
        layers = zip(own[::2], others[::2], others[1::2], own[1::2], strict=True)
        return tuple(row for layer in layers for row in layer)
    if steps == [(MergeModulelist, 0)] and len(sources) == 1:  # [experts, ...]
        return tuple(sources[0])
    if steps == [(MergeModulelist, 0), (Concatenate, 1)]:
        # [experts, rows of all sources, columns]: every expert's pieces side by side
        _check_every_expert_has_all(sources)
        return tuple(piece for expert in zip(*sources, strict=True) for piece in expert)
    if steps == [(Concatenate, 1)] and all(len(source) == 1 for source in sources):  # each of all experts
        experts = zip(*(_rows(source[0]) for source in sources), strict=True)
        return tuple(piece for expert in experts for piece in expert)
    if steps == [(Concatenate, 0)]:
        return tuple(piece for source in sources for piece in source)
    return None


def _unpacks_nothing(operation: Any, sources: list[list[TensorEntry]]) -> bool:
    """Return whether a step that would unpack experts finds them as they are."""
    dtype = sources[0][0].dtype
    is_wide_float = len(sources) == 1 and dtype.is_floating_point and dtype.itemsize > 1
    return type(operation).__name__ == UNPACKS and is_wide_float


def _in_turn(operation: Any, sources: list[list[TensorEntry]]) -> Pieces:
    """Return the even and the odd rows of a tensor's matrices, where an operation tells these apart."""
    whole = sources[0][0]
    is_meant = type(operation).__name__ == "Interleave" and not operation.inverse  # older versions have none
    if not is_meant or [len(source) for source in sources] != [1]:
        return ()
    *before, rows, columns = whole.shape if len(whole.shape) > 1 else (0, 0)
    if operation.dim != len(before) or rows % 2:
        return ()
    even = replace(whole, shape=(*before, rows // 2, columns), num_bytes=whole.num_bytes // 2, every=2)
    return even, replace(even, offset=whole.offset + columns * whole.dtype.itemsize)


def _rows(entry: TensorEntry) -> Pieces:
    """Return what stands along a tensor's first dimension, piece by piece."""
    each = math.prod(entry.shape[1:])
    one = replace(entry, shape=entry.shape[1:], num_bytes=each * entry.dtype.itemsize)
    return tuple(replace(one, offset=entry.place(row * each)) for row in range(entry.shape[0]))


def _first_rows(converter: WeightConverter, sources: list[list[TensorEntry]], parameter: Tensor | None) -> Pieces:
    """Return the rows of a head that stand for tokens, where a converter leaves out the others."""
    whole = sources[0][0]
    is_meant = [type(operation).__name__ for operation in converter.operations] == ["Inkling2UnpadVocab"]
    if not is_meant or parameter is None or not 1 <= len(whole.shape) == parameter.dim():
        return ()
    count = min(parameter.shape[0], whole.shape[0])
    num_bytes = whole.num_bytes // max(1, whole.shape[0]) * count
    return (replace(whole, shape=(count, *whole.shape[1:]), num_bytes=num_bytes),)


def _transposed(
    converter: WeightConverter, sources: list[list[TensorEntry]], parameter: Tensor | None
) -> Pieces | None:
    """Return the piece that a converter transposes, or as it is where it looks at the shape first; None of others."""
    if len(converter.operations) != 1 or [len(source) for source in sources] != [1]:
        return None
    operation, (piece,) = converter.operations[0], sources[0]
    if not isinstance(operation, Transpose):
        return None
    exchanged, dimensions = replace(piece, is_transposed=True), len(piece.shape)
    is_of_matrices = {operation.dim0, operation.dim1} == {dimensions - 2, dimensions - 1}
    # Parts of a packed weight, which have other shapes or no parameter, stay as they are.
    shape = None if parameter is None else tuple(parameter.shape)
    is_as_stored = operation.check_dims and piece.shape == shape
    return (exchanged if is_of_matrices and exchanged.parameter_shape == shape and not is_as_stored else piece,)


def _split(
    converter: WeightConverter, sources: list[list[TensorEntry]], target: str, own_names: Mapping[str, Tensor]
) -> dict[str, Pieces]:
    """Return the parameters that one tensor's rows are split into; none where the converter does anything else."""
    steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
    whole, first_name = sources[0][0], converter.target_patterns[0]
    names = [target.replace(first_name, name) for name in converter.target_patterns]
    halves = _in_turn(converter.operations[0], sources)
    if halves and steps[1:] == [("Chunk", steps[0][1])] and len(names) == 2 and set(names) <= own_names.keys():
        return dict(zip(names, zip(halves), strict=True))
    if steps not in ([("Split", 0)], [("Chunk", 0)]) or [len(source) for source in sources] != [1]:
        return {}
    if not set(names) <= own_names.keys() or sum(own_names[name].shape[0] for name in names) != whole.shape[0]:
        return {}
    row_bytes, first = whole.num_bytes // whole.shape[0], 0
    found: dict[str, Pieces] = {}
    for name in names:
        count = own_names[name].shape[0]
        part = replace(
            whole, shape=(count, *whole.shape[1:]), offset=whole.offset + first * row_bytes, num_bytes=count * row_bytes
        )
        found[name], first = (part,), first + count
    return found


def _check_every_expert_has_all(sources: list[list[TensorEntry]]) -> None:
    """Raise CheckpointError where an expert lacks a tensor that others have."""
    ends = [source[0].name.split(".")[-2:] for source in sources]
    experts = [[piece.name.rsplit(".", 2)[0] for piece in source] for source in sources]
    for expert in dict.fromkeys(name for source in experts for name in source):
        end = next((end for end, source in zip(ends, experts, strict=True) if expert not in source), None)
        if end is not None:
            what = f"'{'.'.join([expert, *end])}' is missing from '{sources[0][0].file.parent}'."
            raise CheckpointError("E_TENSOR_MISSING", what, "Download the model again.")


def surplus_weights(model: PreTrainedModel, stored: Iterable[str], read: Collection[str]) -> tuple[str, ...]:
    """Return the stored weights that are not `read`: of another architecture, or of layers beyond the last.

    Those that the family itself leaves out are none, nor are scales, masks and frequencies beside weights.
    """
    left_out = [*(model._keys_to_ignore_on_load_unexpected or ()), *_further_layers(model)]
    modules = dict(model.named_modules())
    found = []
    for name in stored:
        owner, _, leaf = name.rpartition(".")
        is_mask = owner in modules and not hasattr(modules[owner], "weight")  # GPT-2 has a buffer that it calls bias
        if leaf not in {"weight", "bias"} or name in read or is_mask:
            continue
        if not any(re.search(pattern, name) for pattern in left_out):
            found.append(name)
    return tuple(found)


def _further_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of layers after the last that predict further tokens, as patterns."""
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    return [rf"\blayers\.{config.num_hidden_layers + index}\." for index in range(count)]
