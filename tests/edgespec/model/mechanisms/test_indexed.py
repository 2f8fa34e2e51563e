"""Layers that choose their keys by an index: each row of a tree chooses among the text and its own ancestors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from edgespec.model import row_shares
from edgespec.model.mechanisms import indexed
from edgespec.model.mechanisms.keys_values import LayerCache
from edgespec.model.pass_cache import PassCache
from edgespec.model.self_check import narrow_copy
from edgespec.model.text_cache import TextCache
from tests.edgespec.model.reader import Reader
from tests.edgespec.model.refusal import check_refuses
from tests.support.families import IMAGES, LATENT, SMALL, make_model

CPU = torch.device("cpu")
CHOSEN = 6  # keys that a row sees: fewer than a prompt has
PROMPT = 23
MIXTURE: dict[str, Any] = {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
                           "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}  # fmt: skip
# Many heads: a key's score is 0 where no head likes it, and of equal scores any may be chosen.
INDEX: dict[str, Any] = {"index_topk": CHOSEN, "index_n_heads": 16, "index_head_dim": 16}
ALL: dict[str, Any] = {**SMALL, "num_hidden_layers": 4, **MIXTURE, **LATENT, **INDEX}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "deepseek-v3.2": lambda: transformers.DeepseekV32Config(**ALL),
    # layers that see what an earlier one chose
    "glm-5": lambda: transformers.GlmMoeDsaConfig(**ALL, indexer_types=["full", "shared", "full", "shared"]),
    "hy-v4": lambda: transformers.HYV4Config(**ALL, indexer_types=["full", "full", "shared", "shared"]),
    # layers that read the keys of an earlier one, with and without an index of their own, and without rotation
    "mistral-large-4": lambda: transformers.MistralLarge4Config(
        text_config={
            "model_type": "mistral_large4_text", **ALL, "kv_source_layers": [0, 0, 2, 2],
            "indexer_types": ["full", "shared", "full", "full"], "no_rope_layers": [1, 1, 0, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision_config={**IMAGES, "model_type": "pixtral"},
    ),
}  # fmt: skip


def has_indexed() -> bool:
    """Whether this transformers keeps an index's keys beside latents: not in the oldest that we take."""
    config = getattr(transformers, "DeepseekV32Config", None)
    return config is not None and "indexed_attention" in config(**ALL).layer_types


pytestmark = pytest.mark.skipif(not has_indexed(), reason="this transformers has no such layers in our form")


def reader_of(family: str, *, chunk_rows: int = 512) -> Reader:
    return Reader.of(make_model(FAMILIES[family]()), chunk_rows=chunk_rows)


def test_a_context_shorter_than_the_index_sees_all_of_it() -> None:
    reader = reader_of("glm-5")
    reader.read_prompt(2)
    reader.look(None, nodes=3)


def _keeps_index_keys_of_dropped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(cache: TextCache, rows: Tensor, ids: list[int], *, num_in_place: int = 0) -> None:
        for layer in cache.layers:
            layer.keep(len(cache._ids), rows)
        cache._ids += ids

    monkeypatch.setattr(TextCache, "commit", keep)


def _chooses_among_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = indexed._in_score_chunks

    def blind(forward: Callable[..., Tensor], **named: Any) -> Callable[..., Any]:
        return chosen(lambda **given: forward(**{**given, "attention_mask": given["attention_mask"] * 0}), **named)

    monkeypatch.setattr(indexed, "_in_score_chunks", blind)


def _keys_of_all_texts_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: dict[int, LayerCache] = {}

    def update(self: Cache, keys: Tensor, layer: int) -> Tensor:
        cache = shared.setdefault(layer, LayerCache())
        return cache.append(keys[:, None], keys[:, None, :, :0])[0][:, 0, -keys.shape[1] :]

    monkeypatch.setattr(PassCache, "update_indexer", update)


def _lent_keys_are_the_last_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shares.RowShare, "of", _of_all_rows)


def _of_all_rows(share: Any, value: Any) -> Any:
    share.lent_keys = None
    return _OF(share, value)


_OF = row_shares.RowShare.of


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("deepseek-v3.2", _keeps_index_keys_of_dropped_rows),
        ("deepseek-v3.2", _chooses_among_siblings),
        ("deepseek-v3.2", _keys_of_all_texts_are_one),
        ("mistral-large-4", _lent_keys_are_the_last_spans),
    ],
)
def test_the_self_check_refuses_wrong_readings(
    family: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refuses(FAMILIES[family], fault, monkeypatch)


def test_the_trial_has_layers_that_choose_and_layers_that_share() -> None:
    config = FAMILIES["glm-5"]()
    config.index_topk = 2048
    small = narrow_copy(config)
    assert small.indexer_types == ["full", "shared", "shared"]  # the last one's MLP is a mixture
    assert small.index_topk < PROMPT
