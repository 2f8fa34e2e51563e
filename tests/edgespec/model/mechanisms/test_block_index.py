"""Layers that choose blocks of places by an index: each row of a tree has the blocks of its own path."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from edgespec.model.mechanisms import block_index, compressed_keys, ngrams, short_convolution
from edgespec.model.mechanisms.block_index import BlockKeys, keys_of_blocks
from edgespec.model.mechanisms.keys_values import IndexKeys, LayerCache
from edgespec.model.mechanisms.row_paths import NONE, RowPaths, best_blocks
from edgespec.model.mechanisms.short_convolution import last_inputs
from edgespec.model.mechanisms.state_cache import StateRows
from edgespec.model.narrow_copy import narrow_copy
from edgespec.model.text_cache import TextCache
from edgespec.tree.token_tree import TokenTree
from tests.edgespec.model.reader import Reader
from tests.edgespec.model.refusal import check_refuses
from tests.support.families import GROUPED, LATENT, SMALL, make_model

CPU = torch.device("cpu")
PROMPT = 39  # of which recurrent layers fold a part, and more than a row may choose
BLOCK, CHOSEN = 4, 2  # rows of a block, and blocks that a row chooses
MIXTURE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
KINDS = ["linear_attention", "indexed_attention"] * 2
FEW_TOKENS = 6
# Many heads: a block's score is 0 where no head likes it, and of equal scores any may be chosen.
QWEN4: dict[str, Any] = {
    **GROUPED, **MIXTURE, "num_hidden_layers": 4, "layer_types": KINDS, "num_experts": 4, "head_dim": 8,
    "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_lowrank": 8, "indexer_n_heads": 16,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": BLOCK * CHOSEN, "indexer_compress_ratio": BLOCK,
    "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 50, "ple_embed_dim": 32, "split_ngram_parts": 1,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen4": lambda: transformers.Qwen4ExpTextConfig(**QWEN4),
    "minimax-m3": lambda: transformers.MiniMaxM3VLTextConfig(
        **GROUPED, num_experts_per_tok=2, num_local_experts=4, head_dim=8, rotary_dim=4, dense_intermediate_size=48,
        shared_intermediate_size=16, index_n_heads=2, index_head_dim=8, index_block_size=BLOCK,
        index_topk_blocks=CHOSEN, layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    ),
    "glm-5-next": lambda: transformers.Glm5NextConfig(
        text_config={
            **SMALL, **MIXTURE, **LATENT, "qk_rope_head_dim": 0, "num_hidden_layers": 4, "num_key_value_heads": 4,
            "n_routed_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "index_n_heads": 32,
            "index_head_dim": 16, "index_topk": BLOCK * CHOSEN, "index_kpool": BLOCK,
            "layer_types": ["linear_attention", *["indexed_attention"] * 3],
            "indexer_types": ["full", "full", "shared", "full"],  # one that has what an earlier one chose
        },
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
                       "projection_intermediate_size": 16},
    ),
}  # fmt: skip


def has_block_indexes() -> bool:
    """Whether this transformers has these families in our form: the oldest that we take refuses their layers."""
    try:
        return all(make() is not None for make in FAMILIES.values())
    except Exception:
        return False


pytestmark = pytest.mark.skipif(not has_block_indexes(), reason="this transformers has no such layers in our form")


def model_of(family: str) -> Any:
    """A random model, also where the family begins with zeros."""
    model = make_model(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.3)
    return model


def reader_of(family: str, *, chunk_rows: int = 512) -> Reader:
    return Reader.of(model_of(family), chunk_rows=chunk_rows)


def test_ngrams_end_where_a_text_ends() -> None:
    """The token that ends texts is among those of the prompt and of the trees."""
    model = make_model(transformers.Qwen4ExpTextConfig(**{**QWEN4, "eos_token_id": 3}))
    reader = Reader.of(model, 5, chunk_rows=7)
    reader.text = [token % FEW_TOKENS for token in reader.tokens(PROMPT)]
    reader.target.prefill(torch.tensor(reader.text))
    for _ in range(3):
        tree = reader.tree(23)
        tree = dataclasses.replace(tree, tokens=tree.tokens % FEW_TOKENS)
        reader.check(tree, reader.target.look(tree))
        reader.commit(tree, deepest(tree))


def deepest(tree: TokenTree) -> int:
    depths = [0]
    for parent in tree.parents[1:].tolist():
        depths.append(depths[parent] + 1)
    return max(range(len(depths)), key=depths.__getitem__)


def test_places_of_blocks_follow_each_rows_path() -> None:
    """Two branches behind five rows: a block that begins before the tail ends in each of them."""
    visible = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    paths = RowPaths.of_tree(visible, 5)
    found = paths.places_of_blocks(torch.tensor([[[0, 1]] * 3 + [[1, NONE]] * 2]), 4, with_rest=True)[0]
    assert paths.longest == 8
    assert found.tolist() == [
        [0, 1, 2, 3, 4, 5, -1, -1, 4, 5, -1],
        [0, 1, 2, 3, 4, 5, 6, -1, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 7, -1, 4, 5, 7],
        [4, 5, 6, 8, -1, -1, -1, -1, -1, -1, -1],
        [4, 5, 7, 9, -1, -1, -1, -1, -1, -1, -1],
    ]


def test_the_best_blocks_come_in_the_order_of_their_positions() -> None:
    scores = torch.tensor([[[1.0, 3, -torch.inf, 2], [5, -torch.inf, -torch.inf, -torch.inf]]])
    assert best_blocks(scores, 2).tolist() == [[[1, 3], [0, NONE]]]


def test_keys_of_blocks_are_made_once_and_again_where_they_were_dropped() -> None:
    made: list[tuple[int, int]] = []

    def make(first: int, end: int) -> Tensor:
        made.append((first, end))
        return torch.arange(first, end)[:, None].float()

    keys = BlockKeys(BLOCK)
    for count in (3, 3, 5):
        assert keys.of(count, 4, make)[:, 0].tolist() == list(range(count))
    keys.truncate(15)
    assert keys.of(5, 4, make)[:, 0].tolist() == list(range(5))
    assert made == [(0, 3), (3, 5), (3, 5)]


def _keeps_index_keys_of_dropped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(of: IndexKeys, count: int, rows: Tensor, **_: int) -> None:
        LayerCache.keep(of, count, torch.arange(count, count + rows.shape[0]))

    monkeypatch.setattr(IndexKeys, "keep", kept)


def _keeps_blocks_of_dropped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a tree's blocks were kept like a text's."""
    monkeypatch.setattr(BlockKeys, "truncate", lambda _keys, _rows: None)

    def kept(cache: TextCache, layer: int, size: int, count: int, make: Callable[[int, int], Tensor]) -> Tensor:
        ahead = cache.index_keys(layer).length // size
        return keys_of_blocks(cache, layer, size, max(count, ahead), make)[:count]

    for users in (block_index, compressed_keys):
        monkeypatch.setattr(users, "keys_of_blocks", kept)


def _chooses_among_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tree = RowPaths.of_tree

    def blind(visible: Tensor, num_before: int) -> RowPaths:
        ahead = visible | torch.ones_like(visible).tril()
        return of_tree(ahead, num_before)

    monkeypatch.setattr(RowPaths, "of_tree", blind)


def _positions_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowPaths, "places", lambda of, found: found.masked_fill(found >= of.counts[:, None], -1))


def _partly_filled_block_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    of_blocks = RowPaths.places_of_blocks

    def cut(of: RowPaths, blocks: Tensor, size: int, *, with_rest: bool) -> Tensor:
        del with_rest
        is_whole = (blocks + 1) * size <= of.counts[:, None]
        return of_blocks(of, blocks.masked_fill(~is_whole, NONE), size, with_rest=False)

    monkeypatch.setattr(RowPaths, "places_of_blocks", cut)


def _all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_index, "_leave", lambda _span, _layer, _places: None)


def _ngrams_go_by_places(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(held: StateRows, new: Tensor, visible: Tensor) -> Tensor:
        return last_inputs(held, new, torch.ones_like(visible).tril(visible.shape[1] - visible.shape[0]))

    for users in (ngrams, short_convolution):
        monkeypatch.setattr(users, "last_inputs", by_place)


FAULTS: Sequence[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    *((family, fault) for family in FAMILIES for fault in (
        _keeps_index_keys_of_dropped_rows, _chooses_among_siblings,
    )),
    ("qwen4", _positions_are_places),
    ("qwen4", _partly_filled_block_is_left_out),
    ("qwen4", _keeps_blocks_of_dropped_rows),
    ("qwen4", _all_is_seen),
    ("minimax-m3", _all_is_seen),
    ("qwen4", _ngrams_go_by_places),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fault"), FAULTS)
def test_the_self_check_refuses_wrong_readings(
    family: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refuses(FAMILIES[family], fault, monkeypatch)


def test_the_trial_has_few_blocks_and_layers_with_and_without_ngrams() -> None:
    config = transformers.Qwen4ExpTextConfig(**{**QWEN4, "ple_layer_ids": [3], "ngram_vocab_size_base": 20_000_000})
    small = narrow_copy(config)
    assert small.layer_types == ["linear_attention", "indexed_attention", "linear_attention"]
    assert small.ple_layer_ids == [3]
    assert small.indexer_budget == 2 * small.indexer_compress_ratio
    assert small.ngram_vocab_size_base < 1000
