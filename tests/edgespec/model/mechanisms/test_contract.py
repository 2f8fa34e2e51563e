"""Whatever layers keep between passes, trees read as paths do: after commits, cuts, copies and files, in company."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from edgespec.model.causal_model import CausalModel
from edgespec.model.mechanisms import block_index, chosen_keys, indexed
from edgespec.placement.cache_memory import cache_bytes
from tests.edgespec.model.mechanisms import test_block_index, test_compressed_keys, test_indexed, test_latents
from tests.edgespec.model.reader import CPU, KINDS, Reader, check_cut_copy_and_file, look_together
from tests.support.families import FAMILIES, RECURRENT, make_model

PROMPT = 45  # of which recurrent layers fold a part, and more than a row may choose


def random_model(config_of: Callable[[], Any]) -> Any:
    return make_model(config_of())


# What layers keep -> a random model of it
KEPT: dict[str, Callable[[], Any]] = {
    name: partial(random_model, config_of)
    for name, config_of in {
        **{name: FAMILIES[name] for name in ("llama", "gemma3", "qwen2-window")},
        **{name: RECURRENT[name] for name in KINDS},
        **(test_latents.DENSE | test_indexed.FAMILIES if test_indexed.has_indexed() else {}),
    }.items()
}
if test_block_index.has_block_indexes():
    KEPT |= {name: partial(test_block_index.model_of, name) for name in test_block_index.FAMILIES}
if test_compressed_keys.has_compressed():
    KEPT["deepseek-v4"] = test_compressed_keys.model_of
every_kind = pytest.mark.parametrize("kept", KEPT)


@cache
def plain_model(kept: str) -> Any:
    """The reference: nobody changes it."""
    return KEPT[kept]()


def readers(kept: str, count: int = 1, *, chunk_rows: int = 512) -> list[Reader]:
    """Texts of one model."""
    model = plain_model(kept)
    causal = CausalModel(copy.deepcopy(model), device=CPU, chunk_rows=chunk_rows)
    return [Reader(model, causal, 4 + seed) for seed in range(count)]


@every_kind
def test_trees_over_rounds_of_commits_read_as_paths_do(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of rows, and of scores and chosen keys for a few of them at once."""
    monkeypatch.setattr(block_index, "SCORE_BYTES", 3 * 16 * PROMPT * 4)
    monkeypatch.setattr(indexed, "SCORE_BYTES", 3 * 16 * PROMPT * 4)
    monkeypatch.setattr(chosen_keys, "CHOSEN_BYTES", 5 * 2 * 11 * 16 * 4)
    (reader,) = readers(kept, chunk_rows=7)
    reader.read_prompt(PROMPT)
    for node in (5, 0, None, None):
        reader.look(node, nodes=23)


@every_kind
@pytest.mark.parametrize("prompt", [1, 6])
def test_trees_grow_beyond_a_context_that_is_seen_whole(kept: str, prompt: int) -> None:
    (reader,) = readers(kept)
    reader.read_prompt(prompt)
    for _ in range(5):
        reader.look(None)


@every_kind
def test_texts_in_one_pass_read_what_is_their_own(kept: str) -> None:
    """One is shorter than what is chosen, or made into one key."""
    texts = readers(kept, 3)
    for reader, count in zip(texts, (PROMPT, 2, 17), strict=True):
        reader.read_prompt(count)
    for _ in range(2):
        for reader, tree in zip(texts, look_together(texts, nodes=9), strict=True):
            reader.commit(tree, 7)


@every_kind
def test_a_cut_pass_a_copy_and_a_file_leave_what_is_kept_as_the_text_is(kept: str) -> None:
    check_cut_copy_and_file(*readers(kept), PROMPT)


@every_kind
def test_features_of_texts_that_are_not_cached_are_those_of_others(kept: str) -> None:
    (reader,) = readers(kept)
    texts = [torch.tensor(reader.tokens(count)) for count in (PROMPT, 3, 20)]
    for text, hidden in zip(texts, reader.causal.features_of_texts(texts), strict=True):
        expected = reader.plain(input_ids=text[None], use_cache=False).logits[0]
        torch.testing.assert_close(reader.causal.logits(hidden), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kept", sorted(KEPT.keys() - {"deepseek-v4"}))  # whose groups are counted in its own test
def test_the_plan_counts_all_that_a_text_keeps_but_its_states(kept: str) -> None:
    (reader,) = readers(kept)
    reader.read_prompt(PROMPT)
    cache = reader.target.cache
    rows = max(layer.capacity for layer in cache.layers)
    planned = cache_bytes(reader.causal.config, rows=rows, dtype=torch.float32)
    assert cache.num_bytes - sum(state.num_bytes for state in cache._recurrent) == planned


@every_kind
def test_a_closed_model_has_its_own_functions_again(kept: str) -> None:
    (reader,) = readers(kept)
    reader.causal.close()
    for own, closed in zip(reader.plain.modules(), reader.causal.model.modules(), strict=True):
        assert closed.__class__ is own.__class__
        assert not {name for name in vars(closed).keys() - vars(own).keys() if hasattr(type(closed), name)}
