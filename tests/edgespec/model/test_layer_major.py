"""A long text through the layers: one pass over the weights, and one chunk's temporaries."""

import copy
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from edgespec import Engine, MemoryLimits, SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CHUNK_ROWS, CausalModel, shares_passes
from edgespec.model.pass_rows import chunks_of, next_rows
from edgespec.model.text_cache import TextCache
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from offload.stream import LayerStream
from offload.text_part import decoder_layers
from tests.edgespec.model.reader import Reader, random_tree
from tests.offload.experts.mixtures import MIXTURES
from tests.support.families import EAGER_ONLY, FAMILIES, GROUPED, VOCAB, make_model

CPU = torch.device("cpu")


def test_a_long_prompt_reads_every_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    acquired: list[int] = []
    acquire = LayerStream.acquire

    def counted(self: LayerStream, layer: int) -> dict[str, torch.Tensor]:
        acquired.append(layer)
        return acquire(self, layer)

    monkeypatch.setattr(LayerStream, "acquire", counted)
    ids = (torch.arange(2 * CHUNK_ROWS + 76) % 2000).tolist()
    with Engine.from_pair(open_pair(None, None), limits=MemoryLimits(max_resident_layers=0)) as engine:
        result = engine.generate(ids, max_new_tokens=3, sampling=SamplingSettings(), seed=0)
    assert acquired[:8] == list(range(8))
    assert len(acquired) == 8 * (1 + len(result.passes))
    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / "target", dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)[0, len(ids) :].tolist()
    assert list(result.token_ids) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_sees_no_more_rows_than_a_chunk_has(family: str) -> None:
    config = FAMILIES[family]()
    config._attn_implementation = "eager" if family in EAGER_ONLY else "sdpa"
    model = make_model(config)
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=CPU, chunk_rows=16)
    rows: list[int] = []
    layer = decoder_layers(model)[1][0]
    module = next(part for name, part in layer.named_children() if name in {"mlp", "fc1", "feed_forward"})
    module.register_forward_pre_hook(lambda _module, arguments: rows.append(arguments[0].shape[-2]))
    ids = torch.arange(41) % (VOCAB - 1)
    text = causal.new_text()
    causal.read_text(text, ids[:20])
    more = causal.read_text(text, ids[20:])  # behind rows that are cached already
    assert rows == [16, 4, 12, 9]  # cut where 16 and 32 tokens end
    expected = plain(input_ids=ids[None], use_cache=False).logits[0, -1]
    torch.testing.assert_close(more, expected, rtol=1e-4, atol=2e-5)


def prompts(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(length) * (3 + index) % (VOCAB - 1) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("most_rows", [1, 3, 7, 10, 64])
@pytest.mark.parametrize("text_by_text", [False, True])
def test_chunks_hold_every_row_once_and_in_order(most_rows: int, text_by_text: bool) -> None:
    parts = [next_rows(TextCache(1), ids) for ids in prompts(4, 1, 9, 2)]
    chunks = chunks_of(parts, most_rows=most_rows, text_by_text=text_by_text)
    seen = [(id(span.rows), row) for chunk in chunks for span in chunk for row in range(span.first, span.end)]
    assert seen == [(id(part), row) for part in parts for row in range(part.count)]
    sizes = [sum(span.count for span in chunk) for chunk in chunks]
    assert max(sizes) <= most_rows
    if text_by_text:
        assert all(len(chunk) == 1 for chunk in chunks)
    else:
        pairs = itertools.pairwise(sizes)
        assert all(one + other > most_rows or one == most_rows for one, other in pairs), "spans share chunks"


def test_in_what_parts_a_prompt_is_read_changes_no_span() -> None:
    """Rows are cut at the same tokens however many of them a pass reads, and whatever shares it."""
    edges = []
    for parts in ([50], [16, 34], [32, 16, 2], [48, 2]):
        cache, found = TextCache(1), []
        for count in parts:
            rows, tree = next_rows(cache, torch.zeros(count)), next_rows(TextCache(1), torch.zeros(5))
            chunks = chunks_of([tree, rows], most_rows=16, text_by_text=False)
            start = cache.length
            found += [(start + span.first, start + span.end) for chunk in chunks for span in chunk if span.rows is rows]
            cache.layers[0].length += count
        edges.append(found)
    assert edges == [[(0, 16), (16, 32), (32, 48), (48, 50)]] * 4


def test_a_layer_takes_more_rows_at_once_than_attention_does() -> None:
    causal = CausalModel(make_model(FAMILIES["qwen3-moe"]()), device=CPU, chunk_rows=8)
    causal.layer_rows = 40
    layer = decoder_layers(causal.model)[1][0]
    rows: list[int] = []
    layer.mlp.register_forward_pre_hook(lambda _module, arguments: rows.append(arguments[0].shape[1]))
    parts = [next_rows(causal.new_text(), ids) for ids in prompts(70, 20)]
    causal.read(parts)
    assert rows == [40, 38, 12]
    chunks = chunks_of(parts, most_rows=8, layer_rows=40, text_by_text=False)
    assert [[span.count for span in chunk] for chunk in chunks] == [[2, 8, 8, 8, 8], [8, 8, 8, 8, 4, 4], [8, 8]]


@pytest.mark.parametrize("chunk_rows", [8, 64])
def test_experts_behind_latent_attention_take_more_rows_at_once_than_it_does(chunk_rows: int) -> None:
    """Each text passes alone, under masks of its own: they are as large as attention's rows, not as the layer's."""
    model = make_model(MIXTURES["deepseek-v3"]())
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=CPU, chunk_rows=chunk_rows)
    causal.layer_rows = 40
    layer = decoder_layers(model)[1][-1]
    rows: dict[str, list[int]] = {"mlp": [], "o_proj": []}
    for name, module in (("mlp", layer.mlp), ("o_proj", layer.self_attn.o_proj)):
        module.register_forward_pre_hook(lambda _module, given, name=name: rows[name].append(given[0].shape[1]))
    texts = prompts(70, 20)
    hidden = causal.read([next_rows(causal.new_text(), ids) for ids in texts])
    assert rows["mlp"] == ([40, 30, 20] if chunk_rows == 8 else [64, 6, 20])
    assert sum(rows["o_proj"]) == 90
    assert max(rows["o_proj"]) <= chunk_rows
    for ids, states in zip(texts, hidden, strict=True):
        expected = plain(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(causal.logits(states), expected, rtol=1e-4, atol=2e-5)
    causal.close()
    assert not {"forward"} & (vars(layer).keys() | vars(layer.self_attn).keys())


def test_a_tree_that_is_cut_into_chunks_is_read_as_it_is_whole() -> None:
    """What rows of a chunk see ends before the rows of later ones."""
    model, found = make_model(FAMILIES["llama"]()), []
    for chunk_rows in (64, 8):
        reader = Reader.of(model, chunk_rows=chunk_rows)
        reader.read_prompt(5)
        found.append(reader.target.look(random_tree(3, reader.generator, nodes=20)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("layer_rows", [8, 24])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_that_share_a_pass_give_each_its_own_logits(family: str, layer_rows: int) -> None:
    """Their rows are cut into chunks without regard to where one ends, so some chunks have rows of several."""
    model = make_model(FAMILIES[family]())
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=CPU, chunk_rows=8)
    causal.layer_rows = layer_rows
    texts = prompts(21, 3, 18)
    caches = [causal.new_text() for _ in texts]
    for first, end in ((0, 2), (2, 15), (15, 30)):  # a text that has ended is in no pass
        sharing = [(cache, ids[first:end]) for cache, ids in zip(caches, texts, strict=True) if ids[first:end].numel()]
        hidden = causal.read([next_rows(cache, ids) for cache, ids in sharing])
        for (cache, ids), states in zip(sharing, hidden, strict=True):
            cache.commit_next(ids.tolist())
            whole = torch.tensor([list(cache.ids)])
            expected = plain(input_ids=whole, use_cache=False).logits[0, -ids.shape[0] :]
            torch.testing.assert_close(causal.logits(states), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_texts_whose_rotation_depends_on_the_longest_are_read_apart(scaling: str) -> None:
    parameters: dict[str, object] = {"rope_type": scaling, "rope_theta": 10_000.0, "factor": 4.0}
    if scaling == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "original_max_position_embeddings": 16}
    config = LlamaConfig(**{**GROUPED, "max_position_embeddings": 16}, rope_parameters=parameters)
    model = make_model(config)
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=CPU)
    assert not shares_passes(causal.config)
    texts = prompts(40, 6)
    caches = [causal.new_text() for _ in texts]
    for cache, ids in zip(caches, texts, strict=True):
        cache.prompt_tokens = ids.shape[0]
    hidden = causal.read([next_rows(cache, ids) for cache, ids in zip(caches, texts, strict=True)])
    for ids, states in zip(texts, hidden, strict=True):
        expected = copy.deepcopy(plain)(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(causal.logits(states), expected, rtol=1e-4, atol=2e-5)


def text_by_text() -> tuple[PreTrainedModel, CausalModel]:
    """A model whose family is taken for one that does not ask the registry for attention."""
    config = FAMILIES["llama"]()
    config._attn_implementation = "eager"  # which takes any mask
    model = make_model(config)
    plain = copy.deepcopy(model)
    model._supports_attention_backend = False
    return plain, CausalModel(model, device=CPU, chunk_rows=16)


def test_a_family_with_attention_of_its_own_reads_text_by_text_under_its_own_masks() -> None:
    plain, causal = text_by_text()
    texts = prompts(37, 5)
    hidden = causal.read([next_rows(causal.new_text(), ids) for ids in texts])
    for ids, states in zip(texts, hidden, strict=True):
        expected = plain(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(causal.logits(states), expected, rtol=1e-4, atol=2e-5)


def test_a_family_that_swallows_the_mask_is_refused() -> None:
    _, causal = text_by_text()
    causal._mask = causal._mask.clone()  # what the layers get is no more what the model was given
    with pytest.raises(EdgespecError, match="do not take the mask"):
        causal.read_text(causal.new_text(), torch.arange(20))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_what_parts_a_prompt_is_read_changes_no_bit(family: str, dtype: torch.dtype) -> None:
    causal = CausalModel(make_model(FAMILIES[family](), dtype=dtype), device=CPU, chunk_rows=16)
    (ids,) = prompts(90)
    found = []
    for sizes in ([90], [16, 74], [48, 32, 10]):
        text, states = causal.new_text(), []
        for part in ids.split(sizes):
            states += causal.read([next_rows(text, part)])
            text.commit_next(part.tolist())
        found.append(torch.cat(states))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_texts_that_all_leave_while_a_layer_runs_end_no_pass_that_goes_on_for_others_elsewhere() -> None:
    """Rows of trees may pass natively beside these."""
    causal = CausalModel(make_model(FAMILIES["llama"]()), device=CPU, chunk_rows=16)
    texts, left = [causal.new_text() for _ in range(2)], list[float]()

    def leave(share: float) -> None:
        left.append(share)
        for text in texts:
            text.is_left_out = True

    causal.watch = leave
    hidden = causal.read([next_rows(text, ids) for text, ids in zip(texts, prompts(37, 5), strict=True)])
    assert [len(states) for states in hidden] == [37, 5]
    assert len(left) > 1
