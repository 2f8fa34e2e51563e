"""Attention in one part and in two, against what it is written out: each row sees its ancestors within its reach."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from edgespec.model import attention
from edgespec.model.attention import attend, attend_part
from edgespec.model.mechanisms.windows import WHOLE, AttentionWindow, LayerAttention
from edgespec.model.pass_cache import attended
from edgespec.model.pass_rows import MASK_WIDTH, PassRows, Span, additive
from edgespec.model.text_cache import TextCache

# heads, heads of keys, head_dim of families as people run them, narrowed in the number of heads alone
SHAPES = {
    "llama": (8, 2, 128), "llama-1b": (8, 2, 64), "mistral": (4, 1, 128), "qwen3": (8, 4, 128),
    "qwen2": (14, 2, 64),
    "gemma2": (4, 2, 256), "gemma3": (4, 1, 256), "phi3": (4, 4, 96), "gpt-oss": (8, 1, 64), "gpt2": (3, 3, 64),
    "opt": (2, 2, 80), "smollm": (9, 3, 64),
}  # fmt: skip
REACHES = {
    "whole": WHOLE,
    "window": AttentionWindow(40),
    "narrow window": AttentionWindow(5),
    "chunks": AttentionWindow(48, in_chunks=True),
    "unseen first": AttentionWindow(first=1),
    "window, unseen first": AttentionWindow(40, first=1),
}
PARENTS = [0, 0, 0, 1, 1, 3, 2, 5, 5, 8]  # of the nodes behind the root, by node


def tree_rows(context: int, cache: TextCache) -> tuple[PassRows, list[set[int]], list[int]]:
    """The rows of a tree; of each, the keys that it sees without a limit, and its position."""
    seen, positions = [{0}], [context]
    for node, parent in enumerate(PARENTS, start=1):
        seen.append(seen[parent] | {node})
        positions.append(positions[parent] + 1)
    visible = torch.tensor([[key in row for key in range(len(seen))] for row in seen])
    ids = torch.zeros(len(seen), dtype=torch.long)
    rows = PassRows(cache=cache, ids=ids, positions=torch.tensor(positions), visible=visible)
    return rows, [{*range(context), *(context + node for node in row)} for row in seen], positions


def text_rows(context: int, cache: TextCache) -> tuple[PassRows, list[set[int]], list[int]]:
    positions = [*range(context, context + 9)]
    rows = PassRows(cache=cache, ids=torch.zeros(9, dtype=torch.long), positions=torch.tensor(positions))
    return rows, [{*range(position + 1)} for position in positions], positions


def written_out(
    query: Tensor, keys: Tensor, values: Tensor, seen: list[set[int]], positions: list[int], places: list[int],
    window: AttentionWindow, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Row by row, in float64: [1, rows, heads, head_dim]."""
    query, keys, values = (part[0].double() for part in (query, keys, values))
    heads, num_rows, head_dim = query.shape
    found = torch.zeros(num_rows, heads, head_dim, dtype=torch.float64)
    for row in range(num_rows):
        near = [key for key in sorted(seen[row]) if places[key] >= window.first_seen(positions[row])]
        for head in range(heads):
            group = head * keys.shape[0] // heads
            scores = keys[group, near] @ query[head, row] / math.sqrt(head_dim)
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[None]])
            found[row, head] = scores.softmax(0)[: len(near)] @ values[group, near]
    return found[None]


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short contexts are attended to in two parts as well."""
    monkeypatch.setattr(attention, "MIN_SHARED", 16)


def largest_difference(
    shape: tuple[int, int, int], window: AttentionWindow, *, context: int, is_tree: bool,
    softcap: float | None = None, with_sinks: bool = False,
) -> float:  # fmt: skip
    heads, key_heads, head_dim = shape
    cache = TextCache(1)
    generator = torch.Generator().manual_seed(context)
    rows, seen, positions = (tree_rows if is_tree else text_rows)(context, cache)
    everything = context + rows.count
    query = 2 * torch.randn(1, heads, rows.count, head_dim, generator=generator)
    keys = 2 * torch.randn(1, key_heads, everything, head_dim, generator=generator)
    values = torch.randn(1, key_heads, everything, head_dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if with_sinks else None
    if context:
        cache.layers[0].append(keys[:, :, :context], values[:, :, :context])
    of = LayerAttention(window=window, source=0, query_growth=None)
    module = SimpleNamespace(layer_attention=of, layer_idx=0)
    found, _ = attended(
        [Span(rows, 0, rows.count)],
        lambda: attend(
            module, query, keys[:, :, context:], values[:, :, context:], None, softcap=softcap, s_aux=sinks,
            sliding_window=None if window.in_chunks else window.size,
        ),
    )  # fmt: skip
    places = [*range(context), *rows.positions.tolist()]
    expected = written_out(query, keys, values, seen, positions, places, window, softcap, sinks)
    return float((found - expected).abs().max())


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("is_tree", [True, False], ids=["tree", "text"])
@pytest.mark.parametrize("window", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("family", SHAPES)
def test_rows_attend_to_what_they_see_in_two_parts(family: str, window: AttentionWindow, is_tree: bool) -> None:
    for context in (0, 45, 100):
        assert largest_difference(SHAPES[family], window, context=context, is_tree=is_tree) < 2e-5


@pytest.mark.parametrize("window", REACHES.values(), ids=REACHES)
def test_short_contexts_are_attended_to_in_one_part(window: AttentionWindow) -> None:
    for is_tree in (True, False):
        assert largest_difference(SHAPES["llama"], window, context=60, is_tree=is_tree) < 2e-5


@pytest.mark.parametrize("window", REACHES.values(), ids=REACHES)
def test_capped_scores_and_sinks_exist_for_some_rows_at_a_time(
    window: AttentionWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in (1, 2000, 1 << 26):
        monkeypatch.setattr(attention, "MAX_SCORES", most)
        for softcap, with_sinks in ((5.0, False), (None, True), (5.0, True)):
            assert largest_difference(
                SHAPES["gpt-oss"], window, context=60, is_tree=True, softcap=softcap, with_sinks=with_sinks
            ) < 2e-5  # fmt: skip


@pytest.mark.parametrize("window", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt-oss"])
def test_a_trees_row_has_the_bits_of_plain_decoding(family: str, window: AttentionWindow) -> None:
    """In bf16, where the order of a sum shows; the keys keep the order of the tree."""
    (heads, key_heads, head_dim), context = SHAPES[family], 60
    generator = torch.Generator().manual_seed(1)
    cache = TextCache(1)
    rows, seen, _ = tree_rows(context, cache)
    everything = context + rows.count
    query, keys, values = (
        torch.randn(1, count, number, head_dim, generator=generator).bfloat16()
        for count, number in ((heads, rows.count), (key_heads, everything), (key_heads, everything))
    )
    sinks = torch.randn(heads, generator=generator).bfloat16() if family == "gpt-oss" else None
    of = LayerAttention(window=window, source=0, keeps_row_bits=True)
    module = SimpleNamespace(layer_attention=of, layer_idx=0)

    def attended_to(rows: PassRows, row: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        size = None if window.in_chunks else window.size
        read = functools.partial(attend, module, row, keys, values, None, s_aux=sinks, sliding_window=size)
        return attended([Span(rows, 0, rows.count)], read)[0]

    cache.layers[0].append(keys[:, :, :context], values[:, :, :context])
    found = attended_to(rows, query, keys[:, :, context:], values[:, :, context:])
    assert torch.equal(cache.layers[0].rows(everything)[0], keys)
    for row, path in enumerate(seen):
        text, places = TextCache(1), sorted(path)
        text.layers[0].append(*(of[:, :, places[:-1]] for of in (keys, values)))
        alone = PassRows(cache=text, ids=torch.zeros(1, dtype=torch.long), positions=torch.tensor([len(path) - 1]))
        last = places[-1:]
        expected = attended_to(alone, query[:, :, row : row + 1], keys[:, :, last], values[:, :, last])
        assert torch.equal(found[:, row : row + 1], expected), row


def test_no_mask_of_all_rows_and_a_long_context_is_made() -> None:
    cache = TextCache(1)
    for make in (tree_rows, text_rows):
        rows, _, _ = make(30_000, cache)
        span = Span(rows, 0, rows.count)
        for window in (WHOLE, AttentionWindow(4096)):
            seen = span.seen(30_000 + rows.count, window, least_shared=attention.MIN_SHARED)
            assert span.mask(seen, window, torch.float32).shape[1] <= 2 * rows.count


@pytest.mark.parametrize("keys", [1, 16, 37])
def test_rows_of_a_mask_begin_where_cudas_kernels_want_them(keys: int) -> None:
    """Otherwise each layer would copy the mask to such a place."""
    visible = torch.arange(keys) <= torch.arange(3)[:, None]
    mask = additive(visible, torch.bfloat16)
    assert mask.stride() == (-(-keys // MASK_WIDTH) * MASK_WIDTH, 1)
    assert torch.equal(mask == 0, visible)
    assert attention.repeated(mask, 2).stride(0) == mask.stride(0)


@pytest.mark.parametrize("width", [64, 72])
def test_mixed_precision_is_as_near_as_one_kernel(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 two parts differ from one by a rounding of the result at most."""
    cache, generator = TextCache(1), torch.Generator().manual_seed(1)
    rows, _, _ = tree_rows(3000, cache)
    query, keys, values = (
        torch.randn(1, 4, number, width, generator=generator).bfloat16()
        for number in (rows.count, 3000 + rows.count, 3000 + rows.count)
    )
    cache.layers[0].append(keys[:, :, :3000], values[:, :, :3000])
    module = SimpleNamespace(layer_attention=LayerAttention(window=WHOLE, source=0, query_growth=None), layer_idx=0)
    found = []
    for least in (1, 9999):
        monkeypatch.setattr(attention, "MIN_SHARED", least)
        cache.layers[0].length = 3000
        read = functools.partial(attend, module, query, keys[:, :, 3000:], values[:, :, 3000:], None)
        found.append(attended([Span(rows, 0, rows.count)], read)[0])
    assert (found[0].float() - found[1].float()).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * found[
        1
    ].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_cudas_kernels_take_what_they_are_given(head_dim: int, dtype: torch.dtype) -> None:
    """As far as shapes and formats tell, which is all that a machine without CUDA can see."""
    with FakeTensorMode():
        query, keys = (torch.empty(1, 2, rows, head_dim, dtype=dtype, device="cuda") for rows in (36, 100))
        mask = torch.empty(36, 112, dtype=dtype, device="cuda").narrow(1, 0, 100)
        parts = [attend_part(query, keys, keys, of, 0.1) for of in (None, mask)]
    for part in parts:
        assert (part.attended.shape, part.attended.dtype) == (query.shape, dtype)
        assert (part.log_sum.shape, part.log_sum.dtype) == ((1, 2, 36), torch.float32)
