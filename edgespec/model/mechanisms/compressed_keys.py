"""Attention to keys into which several rows were compressed (DeepSeek V4): each row of a tree has those of its path.

transformers keeps the rows of an unfinished group, and drops them once it is whole. Here a layer keeps what every row
gives to its groups, beside its keys: a group that ends in a tree is compressed of a row's ancestors, and one before the
tree is compressed once for all rows. Outside a pass of ours, transformers' own forward runs.

Legend: n rows of all texts, m of one, w what a row keeps for its groups, g groups, s rows that one is made of, d the
width of a compressed key with that of the index beside it, h heads of the index.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.model.layer_kinds import kinds_of
from edgespec.model.length_rotation import rotations_of
from edgespec.model.mechanisms.block_index import in_chunks, keys_of_blocks
from edgespec.model.mechanisms.chosen_keys import attend_chosen
from edgespec.model.mechanisms.indexed import SMALL_TOPK, layers_with
from edgespec.model.mechanisms.keys_values import KeysValues
from edgespec.model.mechanisms.mechanism import (
    KeyShape,
    Mechanism,
    ModelParts,
    Uninstall,
    beside,
    family_classes,
    parts_of,
    wrap_forwards,
)
from edgespec.model.mechanisms.row_paths import RowPaths, best_blocks
from edgespec.model.pass_cache import in_passes
from edgespec.model.pass_rows import LayerRows, Span

COMPRESSED_SPARSE = "compressed_sparse_attention"  # the kind whose groups are chosen by an index
GROUPS_AT_ONCE = 1024  # of a text, that are compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedKeys:
    """Keys into which several rows were compressed, and which of them each of m rows sees, beside those in its window.

    Each key of the layer is its own value.
    """

    keys: Tensor  # [c, d]
    numbers: Tensor  # [m, k], of these keys; -1 for none
    keeps_values = False

    def attend(self, of: LayerRows, query: Tensor, *, sinks: Tensor | None, row_by_row: bool) -> Tensor:
        """Return the attention [1, heads, m, d] to both kinds of keys."""
        pool, places = _in_one_pool(of.keys, of.span.row_paths(of.keys.shape[2]), of.window.size, self)
        return attend_chosen(query, pool, pool, places, of.scale, sinks=sinks, row_by_row=row_by_row)


def _in_one_pool(
    keys: Tensor, paths: RowPaths, window: int | None, compressed: CompressedKeys
) -> tuple[Tensor, Tensor]:
    """Return keys [1, 1, keys, d] that rows may see, and the places [1, m, k] of those in their windows and compressed.

    `keys` [1, 1, keys, d] are all that are in use, of a layer that has one head of them.
    """
    window = window or paths.longest
    first = max(0, paths.num_before + 1 - window)  # no row sees those before it
    near = paths.nearest(window)
    places = [near.sub(first).masked_fill(near < 0, -1)]
    places.append(compressed.numbers.add(keys.shape[2] - first).masked_fill(compressed.numbers < 0, -1))
    return torch.cat([keys[:, :, first:], compressed.keys[None, None]], 2), torch.cat(places, 1)[None]


class Compression(Mechanism):
    """Keys into which several rows were compressed: what each row gives to its groups, and the keys of whole groups."""

    kinds = frozenset({COMPRESSED_SPARSE, "heavily_compressed_attention"})
    small_sizes: ClassVar = {"o_lora_rank": 64}

    def unread_kinds(self, config: PretrainedConfig) -> dict[str, str]:
        """Return the kinds of a family that compresses in a way of its own."""
        if not self.has_layers(config) or any(_is_compressor(kind) for kind in family_classes(config)):
            return {}
        why = "read keys into which several rows were compressed, and a tree's rows cannot be removed from them"
        return dict.fromkeys(self.kinds, why)

    def reason(self, config: PretrainedConfig) -> str | None:
        """Return what keeps groups from being made again for each row."""
        if self.has_layers(config) and rotations_of(config):
            return "reads compressed keys, which it rotates by the length of the text"
        return None

    def install(self, parts: ModelParts) -> Uninstall:
        """Let a decoder's compressors follow the paths of rows."""
        return wrap_forwards(
            [module for module in parts.decoder.modules() if _is_compressor(type(module))],
            lambda compressor: in_passes(compressor.forward, functools.partial(_forward, compressor)),
        )

    def key_shape(self, config: PretrainedConfig, layer: int) -> KeyShape | None:
        """Return that of keys which are their own values."""
        if kinds_of(config)[layer] not in self.kinds:
            return None
        return replace(KeysValues().key_shape(config, layer), value_width=0)

    def row_numbers(self, config: PretrainedConfig) -> list[int]:
        """Return those of what a row gives to its groups, two with an index, and its part in a group's keys."""
        found = []
        for layer in layers_with(config, self.kinds):
            kind = kinds_of(config)[layer]
            is_sparse = kind == COMPRESSED_SPARSE
            width = config.head_dim + (config.index_head_dim if is_sparse else 0)
            found += [(4 if is_sparse else 2) * width, -(-width // config.compress_rates[kind])]
        return found

    def narrow(self, config: PretrainedConfig, hidden_size: int) -> dict[str, Any]:
        """Return small groups for each kind of layers."""
        rates = getattr(config, "compress_rates", None) or {}
        return {"compress_rates": {kind: min(rate, SMALL_TOPK) for kind, rate in rates.items()}} if rates else {}


def _is_compressor(kind: type) -> bool:
    has = parts_of(kind)
    return {"compress_rate", "kv_proj", "gate_proj", "position_bias", "kv_norm"} <= has and "q_b_proj" not in has


def _forward(
    compressor: Any, spans: Sequence[Span], hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor,
    cache: Any, layer_idx: int,
) -> tuple[Tensor, None]:  # fmt: skip
    """Leave what rows [1, n, hidden] see with their texts' spans, for attention; no keys go through the layer."""
    groups = _Groups(compressor)
    added = groups.row_parts(hidden_states)[0]
    queries = None if groups.indexer is None else groups.queries(q_residual, position_ids)
    first = 0
    for span in spans:
        rows = slice(first, first + span.count)
        first += span.count
        liking = None if queries is None else _Liking(groups.indexer.scorer, queries[rows], hidden_states[0, rows])
        span.readings[layer_idx] = groups.seen_by(span, layer_idx, added[rows], liking)
    return hidden_states.new_empty(1, 1, 0, compressor.head_dim), None


@dataclass(frozen=True, slots=True)
class _Liking:
    """How an index scores groups for a text's rows."""

    scorer: Callable[..., Tensor]
    queries: Tensor  # [m, h, width]
    hidden: Tensor  # [m, hidden]

    def of_shared(self, rows: slice, keys: Tensor) -> Tensor:
        """Return the scores [rows, g] of groups [g, width]."""
        return self.scorer(self.queries[None, rows], keys[None], self.hidden[None, rows])[0]

    def of_own(self, rows: slice, keys: Tensor) -> Tensor:
        """Return the scores [rows, g] of each row's own groups [rows, g, width]."""
        return self.scorer(self.queries[rows, None], keys, self.hidden[rows, None])[:, 0]


class _Groups:
    """The groups of rows of one layer, and how its compressor makes a key of each, and its index another."""

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor
        self.indexer: Any = getattr(compressor, "indexer", None)
        self.parts: list[Any] = [compressor] if self.indexer is None else [compressor, self.indexer]
        self.size: int = compressor.compress_rate
        self.series = len(self.parts)  # with an index, a row gives to the next group, too
        self.rotated = beside(compressor, "apply_rotary_pos_emb")

    def row_parts(self, hidden: Tensor) -> Tensor:
        """Return what rows [1, n, hidden] give to their groups, and the gates of that: [1, n, w]."""
        return torch.cat([given(hidden) for part in self.parts for given in (part.kv_proj, part.gate_proj)], -1)

    def queries(self, q_residual: Tensor, positions: Tensor) -> Tensor:
        """Return the index's queries [n, h, width] of rows at these positions [1, n]."""
        index = self.indexer
        queries = index.q_b_proj(q_residual).unflatten(-1, (index.num_heads, index.head_dim))
        cos, sin = index.rotary_emb(queries, position_ids=positions, layer_type=index.rope_layer_type)
        rotated: Tensor = self.rotated(queries, cos, sin, unsqueeze_dim=2)
        return rotated[0]

    def seen_by(self, span: Span, layer: int, added: Tensor, liking: _Liking | None) -> CompressedKeys:
        """Append what rows [m, w] give, and return the compressed keys that they see."""
        text, width = span.rows.cache, self.compressor.head_dim
        given = text.index_keys(layer).append_rows(added)
        paths = span.row_paths(given.shape[0])
        num_groups = paths.longest // self.size
        num_shared = num_groups if span.rows.visible is None else paths.num_before // self.size
        numbers = torch.arange(num_groups, device=given.device)
        own_numbers = numbers[num_shared:]

        def make(first: int, end: int) -> Tensor:
            parts = numbers[first:end].split(GROUPS_AT_ONCE)
            made = [self.compressed(given[self.rows_of(part).clamp(min=0)][None], part)[0] for part in parts]
            return torch.cat(made)

        shared = keys_of_blocks(text, layer, self.size, num_shared, make)
        keys, seen, num_keys = [shared[:, :width]], [], num_shared
        row_numbers = own_numbers.shape[0] * self.series * self.size * given.shape[1]
        num_heads = 1 if liking is None else liking.queries.shape[1]
        for rows, of in in_chunks(paths, max(row_numbers, num_groups * num_heads)):
            own = self._own(given, of, own_numbers) if own_numbers.shape[0] else None
            is_whole = (numbers + 1) * self.size <= of.counts[:, None]
            if liking is None or num_groups <= self.indexer.index_topk:
                found = numbers.expand_as(is_whole).masked_fill(~is_whole, -1)
            else:
                scores = liking.of_shared(rows, shared[:, width:])
                if own is not None:
                    scores = torch.cat([scores, liking.of_own(rows, own[..., width:])], 1)
                scores = scores.masked_fill(~is_whole, -torch.inf)
                found = best_blocks(scores[None], self.indexer.index_topk)[0]
                found = found.masked_fill(found >= num_groups, -1)
            if own is not None:  # each row's groups come after those of the rows before it
                keys.append(own[..., :width].flatten(0, 1))
                begin = num_keys - num_shared + own_numbers.shape[0] * torch.arange(len(own), device=given.device)
                found = torch.where(found < num_shared, found, found + begin[:, None])
                num_keys += keys[-1].shape[0]
            seen.append(found)
        return CompressedKeys(keys=torch.cat(keys), numbers=torch.cat(seen))

    def rows_of(self, numbers: Tensor) -> Tensor:
        """Return the positions [g, s] of the rows that groups are made of; those before a text are negative."""
        offsets = torch.arange((1 - self.series) * self.size, self.size, device=numbers.device)
        return numbers[:, None] * self.size + offsets

    def _own(self, given: Tensor, paths: RowPaths, numbers: Tensor) -> Tensor:
        """Return groups [m, g, d] that end in the tail, made of what each row's ancestors gave."""
        positions = self.rows_of(numbers)
        places = paths.places(positions.flatten().expand(1, paths.counts.shape[0], -1))[0]
        return self.compressed(given[places.clamp(min=0)].unflatten(1, positions.shape), numbers)

    def compressed(self, given: Tensor, numbers: Tensor) -> Tensor:
        """Return the keys [m, g, d] of groups of these numbers [g], of what their rows gave [m, g, s, w]."""
        widths = [2 * self.series * part.head_dim for part in self.parts]
        pairs = zip(self.parts, given.split(widths, -1), strict=True)
        return torch.cat([self._compressed(part, of, numbers) for part, of in pairs], -1)

    def _compressed(self, part: Any, given: Tensor, numbers: Tensor) -> Tensor:
        values, gates = given.chunk(2, -1)
        gates = gates + part.position_bias.repeat(self.series, 1)
        if self.series == 2:  # of the group before, the first series; of its own rows, the second
            values, gates = (_of_two(whole, self.size, part.head_dim) for whole in (values, gates))
            has_none = (numbers == 0)[:, None] & (torch.arange(2 * self.size, device=numbers.device) < self.size)
            gates = gates.masked_fill(has_none[..., None], -torch.inf)
        shares = gates.softmax(-2, dtype=torch.float32).to(values.dtype)
        keys = part.kv_norm((values * shares).sum(-2))
        positions = (numbers * self.size)[None]  # where a group begins
        cos, sin = part.rotary_emb(keys, position_ids=positions, layer_type=part.rope_layer_type)
        rotated: Tensor = self.rotated(keys, cos[0], sin[0], unsqueeze_dim=0)
        return rotated


def _of_two(whole: Tensor, size: int, width: int) -> Tensor:
    """Return the first series of the first rows, and the second of the others: [..., 2 * size, width]."""
    return torch.cat([whole[..., :size, :width], whole[..., size:, width:]], -2)
