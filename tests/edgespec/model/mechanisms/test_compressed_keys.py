"""Layers that read keys into which several rows were compressed: each row of a tree has the groups of its own path."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.model.attention import attend
from edgespec.model.mechanisms import compressed_keys
from edgespec.model.mechanisms.compressed_keys import CompressedKeys, _Groups
from edgespec.model.mechanisms.row_paths import best_blocks
from edgespec.model.mechanisms.windows import WHOLE, LayerAttention
from edgespec.model.narrow_copy import narrow_copy
from edgespec.model.pass_cache import attended
from edgespec.model.pass_rows import PassRows, Span
from edgespec.model.supported import no_tree_reason
from edgespec.model.text_cache import TextCache
from edgespec.placement.cache_memory import cache_bytes
from tests.edgespec.model.mechanisms import test_block_index as indexed
from tests.edgespec.model.reader import Reader
from tests.edgespec.model.refusal import check_refuses
from tests.edgespec.model.test_attention import tree_rows
from tests.support.families import GROUPED, greedy_tokens, make_model, save_folder

CPU = torch.device("cpu")
PROMPT = 45
SPARSE, HEAVY = 4, 6  # rows that one key is made of
CHOSEN = 3


NEW_TOKENS = 40


def has_compressed() -> bool:
    """Whether this transformers has the family in our form."""
    return hasattr(transformers, "DeepseekV4Config") and no_tree_reason(config_of()) is None


def config_of(**changed: Any) -> PretrainedConfig:
    return transformers.DeepseekV4Config(**{
        **GROUPED, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 16,
        "o_lora_rank": 8, "o_groups": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "index_n_heads": 32, "index_head_dim": 8, "index_topk": CHOSEN, "sliding_window": 7, "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": SPARSE, "heavily_compressed_attention": HEAVY},
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                        "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "partial_rotary_factor": 0.5, **changed,
    })  # fmt: skip


pytestmark = pytest.mark.skipif(not has_compressed(), reason="this transformers has no such layers in our form")


def model_of(**changed: Any) -> Any:
    """A random model, also where the family begins with zeros."""
    model = make_model(config_of(**changed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.3)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.copy_(torch.randint(4, table.shape))
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def reader_of(*, chunk_rows: int = 512, **changed: Any) -> Reader:
    return Reader.of(model_of(**changed), chunk_rows=chunk_rows)


def test_groups_that_are_longer_than_trees_end_in_some_of_them() -> None:
    rates = {"compressed_sparse_attention": 16, "heavily_compressed_attention": 24}
    reader = reader_of(compress_rates=rates, index_topk=1)
    reader.read_prompt(PROMPT)
    for node in (None, 3, None, 0, None, None):
        reader.look(node)


def test_the_plan_counts_what_rows_give_to_groups_and_the_keys_of_these() -> None:
    reader = reader_of(compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8})
    reader.read_prompt(PROMPT)
    cache = reader.target.cache
    held = {layer.capacity for layer in cache.layers}
    assert cache.num_bytes == cache_bytes(reader.causal.config, rows=max(held), dtype=torch.float32)


def test_many_groups_are_compressed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_keys, "GROUPS_AT_ONCE", 2)
    reader = reader_of()
    reader.read_prompt(PROMPT)
    reader.look(None)


def test_a_trees_row_has_the_bits_of_plain_decoding() -> None:
    """In float32, where each order of a sum shows; rows see unequal numbers of compressed keys."""
    context, heads, head_dim = 60, 4, 32
    generator = torch.Generator().manual_seed(1)
    rows, seen, _ = tree_rows(context, TextCache(1))
    everything = context + rows.count
    query, keys, groups = (
        torch.randn(1, number, count, head_dim, generator=generator)
        for number, count in ((heads, rows.count), (1, everything), (1, everything))
    )
    sinks = torch.randn(heads, generator=generator)
    of = LayerAttention(window=WHOLE, source=0, keeps_row_bits=True)
    module = SimpleNamespace(layer_attention=of, layer_idx=0)

    def attended_to(rows: PassRows, row: Tensor, keys: Tensor, compressed: CompressedKeys) -> Tensor:
        span = Span(rows, 0, rows.count, readings={0: compressed})
        read = functools.partial(attend, module, row, keys, keys, None, s_aux=sinks, sliding_window=7)
        return attended([span], read)[0]

    counts = [7 * row % everything for row in range(rows.count)]
    own = [torch.randperm(everything, generator=generator)[:count] for count in counts]
    numbers = torch.full((rows.count, max(counts)), -1)
    for row, of_row in enumerate(own):
        numbers[row, : len(of_row)] = of_row
    rows.cache.layers[0].append(keys[:, :, :context], keys[:, :, :context, :0])
    found = attended_to(rows, query, keys[:, :, context:], CompressedKeys(keys=groups[0, 0], numbers=numbers))
    for row, path in enumerate(seen):
        text, places = TextCache(1), sorted(path)
        text.layers[0].append(keys[:, :, places[:-1]], keys[:, :, places[:-1], :0])
        alone = PassRows(cache=text, ids=torch.zeros(1, dtype=torch.long), positions=torch.tensor([len(path) - 1]))
        compressed = CompressedKeys(keys=groups[0, 0, own[row]], numbers=torch.arange(counts[row])[None])
        expected = attended_to(alone, query[:, :, row : row + 1], keys[:, :, places[-1:]], compressed)
        assert torch.equal(found[:, row : row + 1], expected), row


@pytest.mark.parametrize("streams", [False, True])
def test_greedy_texts_are_transformers_own(streams: bool, tmp_path: Path) -> None:
    """Of a draft that knows the text, through several groups and beyond what the index chooses, from short and long."""
    model = model_of()
    folder = save_folder(tmp_path, model)
    limits = MemoryLimits(max_resident_layers=0) if streams else None
    tree = TreeSettings(policy="chain", draft_tokens=6, lookup=False)
    prompts = [[7 * number % 251 for number in range(count)] for count in (2, PROMPT)]
    options: dict[str, Any] = {"context_tokens": 128, "parallel": 2, "dtype": "float32", "experts": "stream"}
    with Engine.from_pretrained(folder, draft=folder, limits=limits, tree=tree, **options) as engine:
        assert (engine.placement.num_resident == 0) == streams
        requests = [engine.request(prompt, max_new_tokens=NEW_TOKENS, temperature=0.0) for prompt in prompts]
        results: list[Any] = [result for _, result in sorted(engine.generate_many(requests), key=lambda each: each[0])]
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == greedy_tokens(model, prompt, NEW_TOKENS, eos_token_id=None)
        assert (result.tokens_per_pass or 0) > 4


def _groups_of_a_tree_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by = _Groups.seen_by

    def committed_alone(groups: _Groups, span: Span, layer: int, added: Tensor, liking: Any) -> CompressedKeys:
        found = seen_by(groups, span, layer, added, liking)
        count = span.rows.cache.layers[layer].length // groups.size
        return CompressedKeys(keys=found.keys, numbers=found.numbers.masked_fill(found.numbers >= count, -1))

    monkeypatch.setattr(_Groups, "seen_by", committed_alone)


def _rows_give_to_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    of_two = compressed_keys._of_two

    def of_one(whole: Tensor, size: int, width: int) -> Tensor:
        found = of_two(whole, size, width)
        return torch.cat([found[..., size:, :], found[..., size:, :]], -2)

    monkeypatch.setattr(compressed_keys, "_of_two", of_one)


def _windows_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_pool = compressed_keys._in_one_pool
    monkeypatch.setattr(compressed_keys, "_in_one_pool", lambda keys, paths, _, of: in_one_pool(keys, paths, None, of))


def _all_groups_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "edgespec.model.mechanisms.compressed_keys.best_blocks", lambda scores, _: best_blocks(scores, scores.shape[-1])
    )


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    indexed._keeps_index_keys_of_dropped_rows, indexed._keeps_blocks_of_dropped_rows, indexed._chooses_among_siblings,
    indexed._positions_are_places, _groups_of_a_tree_are_not_seen, _rows_give_to_one_group, _windows_are_left_out,
    _all_groups_are_chosen,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_self_check_refuses_wrong_readings(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_refuses(config_of, fault, monkeypatch)


def test_the_trial_has_short_groups_and_each_kind_of_layer() -> None:
    small = narrow_copy(config_of(compress_rates=None, index_topk=512))
    assert small.layer_types == config_of().layer_types[:3]
    assert small.compress_rates == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


def test_rotations_that_go_by_the_length_of_a_text_are_not_read() -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = config_of(rope_parameters={"main": dict(scaled), "compress": dict(scaled)})
    assert "by the length of the text" in str(no_tree_reason(config))
