"""Indexes that choose blocks of a text's places, text by text: each row of a tree has the blocks of its own path.

transformers' own indexers count places of the cache. Here blocks go by position: those before the tail are the same for
all rows, and one that ends in a tree is made of the keys of a row's ancestors. A row's choice is the places of its
keys; attention reads these alone, and where the context is no longer than what is chosen, all of it. Outside a pass of
ours, transformers' own forward runs.

Legend: n rows of all texts, m of one, j its keys in use, b blocks, s rows of a block, h heads of an index, g groups of
heads with a choice of their own, d the width of a head, w of what a row keeps, k places that a row chooses.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edgespec.model.length_rotation import rotations_of
from edgespec.model.mechanisms.chosen_keys import ChosenKeys
from edgespec.model.mechanisms.indexed import INDEXED, SMALL_TOPK, layers_with, pooled_keys
from edgespec.model.mechanisms.mechanism import (
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
from edgespec.model.pass_rows import Span
from edgespec.model.text_cache import TextCache

SPARSE_BLOCKS = "minimax_m3_sparse"
SCORE_BYTES = 64 << 20  # of scores that exist at once
FLOAT32_BYTES = 4

Pool = Callable[[Tensor, Tensor], Tensor]  # rows' keys [..., b, s, w] and numbers of blocks [b] -> keys [..., b, d]
Score = Callable[[slice, Tensor], Tensor]  # some of the rows, and keys [b, d] or [rows, b, d] -> scores [rows, b]


class BlockKeys:
    """Keys of the first blocks of a text, each made of the keys of its rows: what is dropped is made again.

    So nothing of them is copied with a text, or kept in files.
    """

    def __init__(self, size: int) -> None:
        """Each block has `size` rows."""
        self._size = size
        self._count = 0
        self._keys: Tensor | None = None  # [capacity, width]

    @property
    def num_bytes(self) -> int:
        """The memory of the keys, those not in use included."""
        return 0 if self._keys is None else self._keys.nbytes

    def of(self, count: int, capacity: int, make: Callable[[int, int], Tensor]) -> Tensor:
        """Return the keys [count, width] of the first blocks; `make` gives those from one number up to another.

        Memory is for `capacity` blocks, which grows with that of the rows' keys.
        """
        if count > self._count:
            made = make(self._count, count)
            if self._keys is None or self._keys.shape[0] < count:
                grown = made.new_empty(max(capacity, count), made.shape[-1])
                if self._keys is not None:
                    grown[: self._count] = self._keys[: self._count]
                self._keys = grown
            self._keys[self._count : count] = made
            self._count = count
        elif self._keys is None:  # no block is whole yet
            return make(0, 0)
        return self._keys[:count]

    @property
    def length(self) -> int:
        """The number of rows that they are made of."""
        return self._count * self._size

    def keep(self, committed: int, rows: Tensor, *, num_in_place: int = 0) -> None:
        """Drop the blocks that end after the first `committed` rows of the text."""
        self.truncate(committed)

    def copy(self, rows: int) -> Self:
        """Return none."""
        return type(self)(self._size)

    def tensors(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing."""
        yield from ()

    def truncate(self, rows: int) -> None:
        """Drop the blocks that end after the first `rows` rows of the text."""
        self._count = min(self._count, rows // self._size)


def keys_of_blocks(text: TextCache, layer: int, size: int, count: int, make: Callable[[int, int], Tensor]) -> Tensor:
    """Return the keys [count, width] of a layer's first blocks of `size` rows, none of which is dropped later.

    `make` gives those from one number up to another.
    """
    kept = text.state(f"blocks.{layer}", lambda: BlockKeys(size))
    return kept.of(count, text.index_keys(layer).capacity // size, make)


class BlockIndex(Mechanism):
    """Indexes that choose blocks: what a row keeps for its own, and keys of whole blocks."""

    kinds = frozenset({SPARSE_BLOCKS})  # those that pool keys are INDEXED like others
    is_unflagged = needs_no_mask = True
    small_sizes: ClassVar = {
        "index_kpool": SMALL_TOPK // 2,
        "index_block_size": SMALL_TOPK // 4,
        "index_topk_blocks": 4,
        "index_local_blocks": 1,
        "indexer_budget": SMALL_TOPK,
        "indexer_compress_ratio": SMALL_TOPK // 2,
        "indexer_n_heads": 16,  # blocks that no head likes have equal scores: any of them may be chosen
    }

    def has_layers(self, config: PretrainedConfig) -> bool:
        """Return whether the family has an index of blocks that is known."""
        is_named = super().has_layers(config) or pooled_keys(config)
        return bool(is_named) and any(_choice_of(kind) for kind in family_classes(config))

    def unread_kinds(self, config: PretrainedConfig) -> dict[str, str]:
        """Return the kind whose blocks an unknown index chooses."""
        return {} if self.has_layers(config) else {
            SPARSE_BLOCKS: "choose blocks of places in the cache, where a tree's rows have places of their own"
        }  # fmt: skip

    def reason(self, config: PretrainedConfig) -> str | None:
        """Return what is unknown of an index that pools keys, or cannot be told apart by position."""
        pooled = pooled_keys(config)
        if pooled and not self.has_layers(config):
            return (
                f"chooses keys by groups of {pooled} places in the cache, where a tree's rows have places of their own"
            )
        if pooled and rotations_of(config):
            return f"chooses keys by groups of {pooled}, which it rotates by the length of the text"
        return None

    def install(self, parts: ModelParts) -> Uninstall:
        """Let a decoder's indexes of blocks choose by position."""
        chosen: dict[nn.Module, Any] = {module: _choice_of(type(module)) for module in parts.decoder.modules()}
        return wrap_forwards(
            [module for module, choose in chosen.items() if choose is not None],
            lambda index: in_passes(index.forward, functools.partial(chosen[index], parts.decoder, index)),
        )

    def row_numbers(self, config: PretrainedConfig) -> list[int]:
        """Return those of a row's keys and gates, and its part in its block's key."""
        pooled = pooled_keys(config)
        num_layers = len(layers_with(config, {SPARSE_BLOCKS} | ({INDEXED} if pooled else set())))
        width = getattr(config, "indexer_head_dim", None) or getattr(config, "index_head_dim", None) or 0
        if getattr(config, "index_kpool", None):
            return num_layers * [2 * width, -(-width // pooled)]
        return num_layers * [width, -(-width // pooled) if pooled else 0]


def _qwen4(
    decoder: Any,
    indexer: Any,
    spans: Sequence[Span],
    hidden_states: Tensor,  # [1, n, hidden]
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> Tensor:
    """Choose for attention, which reads the choice with the span, and return a mask that hides nothing."""
    cos, sin = position_embeddings
    heads, width, size = indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio
    rotated = functools.partial(beside(indexer, "apply_rotary_pos_emb"), k=None)
    queries, keys = indexer.index_qk_proj(hidden_states).split([heads * width, width], -1)
    queries = indexer.q_layernorm(queries.unflatten(-1, (heads, width)))
    queries = rotated(queries, cos=cos, sin=sin, unsqueeze_dim=2)

    def pool(rows: Tensor, blocks: Tensor) -> Tensor:
        pooled = indexer.k_layernorm(rows.float().mean(-2).to(rows.dtype))
        cos, sin = decoder.rotary_emb(rows, (blocks * size)[None])  # where a block begins
        keys: Tensor = rotated(pooled[..., None, :], cos=cos[0], sin=sin[0], unsqueeze_dim=1)
        return keys[..., 0, :]

    for span, of, added in _of_texts(spans, queries, keys):
        score = functools.partial(_liked_by_heads, of.float(), width)
        index = PooledIndex(
            layer=indexer.layer_idx, size=size, most=indexer.block_topk, pool=pool, score=score, num_scores=heads
        )  # fmt: skip
        _leave(span, indexer.layer_idx, index.choice(span, added))
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden_states.device)


def _liked_by_heads(queries: Tensor, width: int, rows: slice, keys: Tensor) -> Tensor:
    """Return Qwen 4's scores, 0 for a block that no head likes."""
    return torch.relu(queries[rows] @ keys.float().mT).sum(1) / math.sqrt(width)


def _glm5(
    _decoder: Any, indexer: Any, spans: Sequence[Span], hidden_states: Tensor, q_resid: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Return the places [1, n, k] that rows chose; -1 for none."""
    (span,) = spans  # latent attention reads text by text
    heads, width = indexer.n_heads, indexer.head_dim
    queries = indexer.wq_b(q_resid)[0].unflatten(-1, (heads, width)).float()
    keys = indexer.k_norm(indexer.wk(hidden_states))[0]
    gates = nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)[0]
    weights: Tensor = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))[0].float()
    weights = weights * heads**-0.5

    def pool(rows: Tensor, _blocks: Tensor) -> Tensor:
        keys, gates = rows.split(width, -1)
        shares: Tensor = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(-2)
        pooled: Tensor = (shares.to(keys.dtype) * keys).sum(-2)
        return pooled

    def score(rows: slice, keys: Tensor) -> Tensor:
        liked = torch.relu(queries[rows] @ keys.float().mT * indexer.softmax_scale)
        scores: Tensor = weights[rows][:, None] @ liked
        return scores[:, 0]

    index = PooledIndex(
        layer=indexer.layer_idx, size=indexer.index_kpool, most=indexer.index_topk // indexer.index_kpool, pool=pool,
        score=score, num_scores=heads, with_rest=indexer.index_kpool_always_select_tail, chooses_all=True,
    )  # fmt: skip
    chosen = index.choice(span, torch.cat([keys, gates], -1))
    assert chosen is not None
    return chosen.to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndex:
    """The index of one layer that has a key for each whole block, which is made of the keys of its rows."""

    layer: int
    size: int  # rows of a block
    most: int  # blocks that a row chooses
    pool: Pool
    score: Score
    num_scores: int  # of a row and a block, before they are one
    with_rest: bool = True  # rows also see what follows their last whole block
    chooses_all: bool = False  # places are wanted also where every row sees all of its keys

    def choice(self, span: Span, added: Tensor) -> Tensor | None:
        """Append rows' keys [m, w], and return the places [1, m, k] of the rows' best blocks, and of the rest.

        None where every row sees all of its keys.
        """
        text, size = span.rows.cache, self.size
        keys = text.index_keys(self.layer).append_rows(added)  # [j, w]
        if not self.chooses_all and keys.shape[0] // size <= self.most:
            return None
        paths = span.row_paths(keys.shape[0])
        num_blocks = paths.longest // size
        if not self.chooses_all and num_blocks <= self.most:
            return None
        # Blocks whose rows are the same for all
        num_shared = num_blocks if span.rows.visible is None else paths.num_before // size

        def make(first: int, end: int) -> Tensor:
            blocks = torch.arange(first, end, device=keys.device)
            return self.pool(keys[first * size : end * size].unflatten(0, (end - first, size)), blocks)

        shared = keys_of_blocks(text, self.layer, size, num_shared, make)  # [b, d]
        own = torch.arange(num_shared, num_blocks, device=keys.device)
        ends = (torch.arange(num_blocks, device=keys.device) + 1) * size
        found = []
        for rows, of in in_chunks(paths, num_blocks * self.num_scores):
            scores = self.score(rows, shared)
            if own.shape[0]:
                places = of.places_of_blocks(own.expand(1, of.counts.shape[0], -1), size, with_rest=False)[0]
                parts = keys[places.clamp(min=0)].unflatten(1, (own.shape[0], size))  # [m, b, s, w]
                scores = torch.cat([scores, self.score(rows, self.pool(parts, own))], 1)
            scores = scores.masked_fill(ends > of.counts[:, None], -torch.inf)
            chosen = best_blocks(scores[None], self.most)
            found.append(of.places_of_blocks(chosen, size, with_rest=self.with_rest))
        return torch.cat(found, 1)


def _minimax3(
    _decoder: Any,
    indexer: Any,
    spans: Sequence[Span],
    hidden_states: Tensor,  # [1, n, hidden]
    position_embeddings: tuple[Tensor, Tensor],
    *_: Any,
    **__: Any,
) -> None:
    """Choose for attention, which reads the choice with the span."""
    heads, width = indexer.num_heads, indexer.head_dim
    rotated = beside(indexer, "apply_rotary_pos_emb")
    cos, sin = (part[..., :width] for part in position_embeddings)
    queries = indexer.q_norm(indexer.q_proj(hidden_states).unflatten(-1, (heads, width))).transpose(1, 2)
    keys = indexer.k_norm(indexer.k_proj(hidden_states).unflatten(-1, (1, width))).transpose(1, 2)
    queries, keys = rotated(queries, keys, cos, sin)
    for span, of, added in _of_texts(spans, queries.transpose(1, 2), keys[:, 0]):
        _leave(span, indexer.layer_idx, _most_liked_keys(span, indexer, of.float(), added))


def _most_liked_keys(span: Span, indexer: Any, queries: Tensor, added: Tensor) -> Tensor | None:
    """Append keys [m, d], and return the places [g, m, k] of the blocks that have the best of a row's keys.

    Each head of the index chooses, with the row's own blocks among the choice. None where rows see all of their keys.
    """
    size, most = indexer.block_size, indexer.topk_blocks
    keys = span.rows.cache.index_keys(indexer.layer_idx).append_rows(added)  # [j, d]
    if keys.shape[0] <= most * size:
        return None
    paths = span.row_paths(keys.shape[0])
    if paths.longest <= most * size:
        return None
    num_blocks = -(-paths.longest // size)
    num_shared = paths.num_before // size
    blocks = torch.arange(num_blocks, device=keys.device)
    found = []
    for rows, of in in_chunks(paths, 2 * keys.shape[0] * queries.shape[1]):
        scores = queries[rows].transpose(0, 1) @ keys.float().T  # [g, m, j]
        shared = scores[..., : num_shared * size].unflatten(-1, (num_shared, size)).amax(-1)
        places = of.places_of_blocks(blocks[num_shared:].expand(1, of.counts.shape[0], -1), size, with_rest=False)
        own = scores.gather(2, places.clamp(min=0).expand(scores.shape[0], -1, -1))
        own = own.masked_fill(places < 0, -torch.inf).unflatten(-1, (num_blocks - num_shared, size)).amax(-1)
        last = (of.counts - 1) // size
        distance = last[:, None] - blocks
        nearest = (distance >= 0) & (distance < indexer.local_blocks)
        scores = torch.cat([shared, own], 2).masked_fill(nearest, torch.inf)
        found.append(of.places_of_blocks(best_blocks(scores, most), size, with_rest=False))
    return torch.cat(found, 1)


def _leave(span: Span, layer: int, places: Tensor | None) -> None:
    """Leave the places [g, rows, k] that rows chose for the layer's attention; None where they see all."""
    if places is not None:
        span.readings[layer] = ChosenKeys(places)


def _of_texts(spans: Sequence[Span], *wholes: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each text's span and its rows of tensors [1, n, ...]."""
    counts = [span.count for span in spans]
    return zip(spans, *(whole[0].split(counts) for whole in wholes), strict=True)


def in_chunks(paths: RowPaths, num_scores: int) -> Iterator[tuple[slice, RowPaths]]:
    """Yield parts of the rows whose scores, so many for each, may exist at once."""
    at_once = max(1, SCORE_BYTES // max(1, num_scores * FLOAT32_BYTES))
    for first in range(0, paths.counts.shape[0], at_once):
        rows = slice(first, first + at_once)
        yield rows, paths.rows(rows)


# What an index has -> how it chooses
_CHOICES: dict[frozenset[str], Callable[..., Any]] = {
    frozenset({"index_qk_proj", "compress_ratio", "block_topk", "k_layernorm"}): _qwen4,
    frozenset({"block_size", "topk_blocks", "local_blocks", "k_norm"}): _minimax3,
    frozenset({"index_kpool", "index_kpool_compress_ape", "index_kpool_compress_gate"}): _glm5,
}


def _choice_of(kind: type) -> Callable[..., Any] | None:
    """Return how modules of this class choose, where they are indexes of blocks."""
    return next((choose for needed, choose in _CHOICES.items() if needed <= parts_of(kind)), None)
