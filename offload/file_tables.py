"""Tables that stay in their files: a pass looks up few of their rows, and they are larger than models.

The system keeps the pages of rows that come often. What a row costs beside is a small read, and all that a pass needs
are announced before the first is waited for.
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offload.checkpoint import FileRange
from offload.device import to_device
from offload.layer_store import LayerRecord, LayerStore, StoredTensor

TABLES_INDEX = -3  # of the record, beside those of what lies outside of the layers
_TABLES = {"blt": ("encoder_hash_tok_embedding.weight",)}  # of families that name none themselves


def take_tables(model: PreTrainedModel, places: Sequence[dict[str, StoredTensor]]) -> LayerRecord:
    """Take the tables that are never to be loaded out of these parameters of layers and others; return their record.

    A table that is packed or has to be rearranged stays.
    """
    named = tuple(getattr(model, "_no_placement_params", None) or ()) or _TABLES.get(model.config.model_type, ())
    found = {}
    for tensors in places:
        for name in [name for name in tensors if name.endswith(named) and named]:
            is_table = type(model.get_submodule(name.rpartition(".")[0])) is nn.Embedding
            if is_table and all(piece.computed is None and not piece.is_transposed for piece in tensors[name].pieces):
                found[name] = tensors.pop(name)
    return LayerRecord(index=TABLES_INDEX, tensors=found)


def look_up_in_files(
    model: nn.Module, tables: LayerRecord, store: LayerStore, device: torch.device, undo: ExitStack
) -> None:
    """Let the embeddings of a model give the rows of its tables, until `undo` is closed."""
    store.check_unchanged(tables, store.mapped_samples(tables))  # for the first time: a pass reads few of its rows
    store.watch(tables)
    for name, tensor in tables.tensors.items():
        module: Any = model.get_submodule(name.rpartition(".")[0])
        table = FileTable(store, tensor)

        def forward(ids: Tensor, table: FileTable = table) -> Tensor:
            # On a card the host waits until the ids are there, once a table.
            return to_device(table.rows(ids.reshape(-1).cpu()).view(*ids.shape, -1), device)

        module.forward = forward
        undo.callback(module.__dict__.pop, "forward", None)


class FileTable:
    """A table [rows, columns] that lies in one or several tensors of a checkpoint."""

    def __init__(self, store: LayerStore, tensor: StoredTensor) -> None:
        self._store, self._tensor = store, tensor
        ends = list(itertools.accumulate(piece.shape[0] for piece in tensor.pieces))
        self._ends = torch.tensor(ends)  # [pieces], of the numbers of their rows
        self._columns = tensor.shape[1]

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [n, columns] of ids [n] in the type that is computed with."""
        distinct, places = ids.unique(return_inverse=True)
        of_piece = torch.bucketize(distinct, self._ends, right=True)
        parts = []
        for number in of_piece.unique().tolist():
            first = 0 if number == 0 else int(self._ends[number - 1])
            parts.append((number, distinct[of_piece == number] - first))
        self._store.announce([self._range(number, row) for number, rows in parts for row in rows.tolist()])
        found = [self._store.view(self._tensor.pieces[number])[rows] for number, rows in parts]
        return torch.cat(found).to(self._tensor.dtype)[places]

    def _range(self, number: int, row: int) -> FileRange:
        """Return the bytes of a file that hold a row."""
        piece = self._tensor.pieces[number]
        return piece.file_range(row * self._columns, (row + 1) * self._columns)
