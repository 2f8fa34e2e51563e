"""The experts of one decoder layer, taken apart: where each expert's own weights lie in the checkpoint.

transformers computes with all experts of a layer in one parameter. A checkpoint stores them in one tensor, or in
tensors of their own for every expert; either way an expert's weights are slices that can be read by themselves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from offload.checkpoint import Pieces
from offload.formats.storage import PackedStorage
from offload.layer_store import LayerRecord, StoredTensor
from offload.layouts.known import kernel_of
from offload.layouts.layout import Kernel
from offload.packed_weight import PackedWeight

# Weights that are converted together: they stay in a core's own cache until they are multiplied with
CONVERTED_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeight:
    """One attribute of an expert in the form that is computed with: packed, where rows are few, else in blocks."""

    blocks: Callable[[], Iterable[Tensor]]  # makes its rows in order, each block valid until the next one is made
    dtype: torch.dtype  # of the blocks, and of rows that the kernel multiplies
    is_transposed: bool  # rows are multiplied with the weight, not with its transposed; it comes in one block
    kernel: Kernel | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # that the kernel multiplies with


ExpertWeights = Mapping[str, ExpertWeight]  # by attribute


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrix:
    """One attribute of an experts' module: the shape of one expert's, and how it is packed.

    Of weights whose transposed is stored, as gpt-oss has them, it is that one.
    """

    attribute: str
    shape: tuple[int, int]  # of one expert's
    packing: PackedStorage | None  # of one expert's; None where it is not packed
    in_blocks: bool  # whether its rows may be multiplied with a few at a time
    is_turned: bool = False  # the parameter is a transposed view of the tensor

    @property
    def num_weights(self) -> int:
        """The weights of one expert's matrix."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, kw_only=True)
class ExpertGroup:
    """The experts of one layer."""

    layer: int
    module_name: str
    num_experts: int
    matrices: tuple[ExpertMatrix, ...]
    tensors: dict[str, StoredTensor]  # of all experts together, by their names below the module
    # Those of the matrices that were asked for: every pass asks for each expert's
    _kernels: dict[object, Kernel | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors in the model."""
        return frozenset(f"{self.module_name}.{name}" for name in self.tensors)

    @property
    def is_packed(self) -> bool:
        """Whether some of an expert's weights are."""
        return any(matrix.packing is not None for matrix in self.matrices)

    @cached_property
    def experts(self) -> tuple[LayerRecord, ...]:
        """The record of each expert; its names are those below the module."""
        return tuple(self._expert(number) for number in range(self.num_experts))

    @cached_property
    def expert_stored_bytes(self) -> int:
        """The bytes of one expert in the checkpoint: all have as many."""
        return sum(piece.num_bytes for tensor in self.tensors.values() for piece in tensor.pieces) // self.num_experts

    @cached_property
    def expert_flat_bytes(self) -> int:
        """The bytes of the flat buffer that holds one expert."""
        return self._expert(0).flat_bytes

    @property
    def row_flops(self) -> float:
        """The operations of one expert for one row: two a weight."""
        return 2.0 * sum(matrix.num_weights for matrix in self.matrices)

    def weights(self, stored: Mapping[str, Sequence[Tensor]], scratch: Tensor) -> ExpertWeights:
        """Return an expert's weights in the form that is computed with.

        `stored` has the pieces of each of its tensors. What is packed, or of another dtype than `scratch`, passes
        through that, one block after the other.
        """
        return {
            matrix.attribute: _weight(matrix, stored, scratch, self._kernel(matrix, scratch))
            for matrix in self.matrices
        }

    def _kernel(self, matrix: ExpertMatrix, scratch: Tensor) -> Kernel | None:
        if matrix.packing is None or not matrix.in_blocks:
            return None
        key = matrix.attribute, scratch.dtype, scratch.device
        if key not in self._kernels:
            self._kernels[key] = kernel_of(matrix.packing, matrix.shape, scratch.dtype, scratch.device)
        return self._kernels[key]

    def _expert(self, number: int) -> LayerRecord:
        shapes: dict[str, tuple[int, ...]] = {}
        for matrix in self.matrices:
            if matrix.packing is None:
                shapes[matrix.attribute] = matrix.shape
                continue
            parts = matrix.packing.part_shapes(matrix.shape)
            shapes |= {f"{matrix.attribute}_packed.{part}": shape for part, (shape, _) in parts.items()}
        tensors = {name: self._slice(self.tensors[name], shape, number) for name, shape in shapes.items()}
        return LayerRecord(index=self.layer, expert=number, tensors=tensors)

    def _slice(self, tensor: StoredTensor, shape: tuple[int, ...], number: int) -> StoredTensor:
        """Return one expert's part of a tensor."""
        if len(tensor.pieces) == 1:
            whole = tensor.pieces[0]
            num_bytes = whole.num_bytes // self.num_experts
            offset = whole.place(number * num_bytes // whole.dtype.itemsize)
            pieces: Pieces = (replace(whole, shape=shape, offset=offset, num_bytes=num_bytes, is_transposed=False),)
        else:
            each = len(tensor.pieces) // self.num_experts
            of_expert = tensor.pieces[number * each : (number + 1) * each]
            pieces = _as_one(tuple(replace(piece, is_transposed=False) for piece in of_expert), shape)
        return StoredTensor(pieces=pieces, shape=shape, dtype=tensor.dtype)


def find_experts(
    layer: int, module_name: str, module: nn.Module, stored: Mapping[str, StoredTensor]
) -> ExpertGroup | None:
    """Return the experts of a module that they can be taken out of; None for any other module.

    Such a module is one whose experts transformers lets others compute, in the form that it describes by attributes.
    `stored` are the tensors of the module's layer.
    """
    num_experts = getattr(module, "num_experts", None)
    if not isinstance(num_experts, int) or not hasattr(module, "_apply_gate") or not hasattr(module, "is_transposed"):
        return None
    matrices: list[ExpertMatrix] = []
    tensors: dict[str, StoredTensor] = {}
    for attribute in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        parameter = module._parameters.get(attribute)
        if parameter is None or parameter.dim() != 3 or parameter.shape[0] != num_experts:
            return None
        shape = (int(parameter.shape[1]), int(parameter.shape[2]))
        packed = module._modules.get(f"{attribute}_packed")
        packing, in_blocks, is_turned = None, not module.is_transposed, False
        names = [attribute]
        plain = stored.get(f"{module_name}.{attribute}")
        if plain is not None and plain.pieces[0].is_transposed:
            if not module.is_transposed:
                return None
            shape, in_blocks, is_turned = (shape[1], shape[0]), True, True
        if isinstance(packed, PackedWeight):
            packing = packed.packing.of_share(tuple(parameter.shape), num_experts)
            if packing is None:
                return None
            if module.is_transposed and packing.transposed is not None:
                packing, shape, in_blocks = packing.transposed, (shape[1], shape[0]), True
            names = [f"{attribute}_packed.{part}" for part in packed._parameters]
        matrices.append(
            ExpertMatrix(attribute=attribute, shape=shape, packing=packing, in_blocks=in_blocks, is_turned=is_turned)
        )
        found = {name: stored.get(f"{module_name}.{name}") for name in names}
        if any(tensor is None or not _is_divided(tensor, num_experts) for tensor in found.values()):
            return None
        tensors |= {name: tensor for name, tensor in found.items() if tensor is not None}
    return ExpertGroup(
        layer=layer, module_name=module_name, num_experts=num_experts, matrices=tuple(matrices), tensors=tensors
    )


def scratch_weights(groups: Iterable[ExpertGroup]) -> int:
    """Return how many of an expert's weights are unpacked or converted at once."""
    matrices = (matrix for group in groups for matrix in group.matrices)
    return max(
        (
            matrix.num_weights if matrix.packing or not matrix.in_blocks else CONVERTED_AT_ONCE + matrix.shape[1]
            for matrix in matrices
        ),
        default=0,
    )


def _weight(
    matrix: ExpertMatrix, stored: Mapping[str, Sequence[Tensor]], scratch: Tensor, kernel: Kernel | None
) -> ExpertWeight:
    packing = matrix.packing
    if packing is None:
        blocks = partial(_unpacked_blocks, matrix, stored[matrix.attribute], scratch)
        return ExpertWeight(blocks=blocks, dtype=scratch.dtype, is_transposed=not matrix.in_blocks)
    shapes = packing.part_shapes(matrix.shape)
    pieces = {part: stored[f"{matrix.attribute}_packed.{part}"] for part in shapes}
    parts = {part: _joined(pieces[part]).view(shape) for part, (shape, _) in shapes.items()}
    return ExpertWeight(
        blocks=lambda: [packing.unpack(parts, scratch[: matrix.num_weights].view(matrix.shape))],
        dtype=scratch.dtype,
        is_transposed=not matrix.in_blocks,
        kernel=kernel,
        parts=parts,
    )


def _unpacked_blocks(matrix: ExpertMatrix, pieces: Sequence[Tensor], scratch: Tensor) -> Iterator[Tensor]:
    blocks = [block.view(-1, matrix.shape[1]) for block in pieces]
    if not matrix.in_blocks:
        blocks = [torch.cat(blocks) if len(blocks) > 1 else blocks[0]]
    for block in blocks:
        if block.dtype == scratch.dtype:
            yield block
            continue
        rows = max(1, CONVERTED_AT_ONCE // matrix.shape[1]) if matrix.in_blocks else matrix.shape[0]
        for share in block.split(rows):
            yield scratch[: share.numel()].view(share.shape).copy_(share)


def _is_divided(tensor: StoredTensor, num_experts: int) -> bool:
    """Return whether every expert has an equal part of the tensor as it lies, or as many of its pieces."""
    if any(piece.computed for piece in tensor.pieces):
        return False
    if len(tensor.pieces) == 1:
        return tensor.pieces[0].num_bytes % num_experts == 0
    return len(tensor.pieces) % num_experts == 0


def _as_one(pieces: Pieces, shape: tuple[int, ...]) -> Pieces:
    """Return pieces that follow each other in their file as one: nothing has to be copied to compute with both."""
    first = pieces[0]
    end = first.offset
    for piece in pieces:
        if piece.file != first.file or piece.offset != end or piece.dtype != first.dtype or piece.every > 1:
            return pieces
        end += piece.num_bytes
    return (replace(first, shape=shape, num_bytes=end - first.offset),)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])
