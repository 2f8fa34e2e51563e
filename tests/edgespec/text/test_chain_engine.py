"""An engine whose target follows no branches: its trees are chains, and its texts are those of plain decoding.

The reference of greedy texts is transformers' own generate; that of sampled ones is the same seed without trees.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, RwkvConfig

from edgespec import EdgespecError, Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.model.own_pass_model import OwnPassModel
from edgespec.model.own_pass_text import OwnPassText
from edgespec.pair.pair import open_pair
from edgespec.pair.tree_support import check_may_draft
from edgespec.placement.pair_setup import set_up
from edgespec.placement.plan import placement_for
from edgespec.placement.run_config import resolve_run_config
from edgespec.prefix_cache.prompt_cache import PromptCache
from offload.stream import LayerStream
from offload.text_part import language_model
from tests.support.families import greedy_tokens
from tests.support.tiny_checkpoints import make_model, save_folder
from tests.support.tiny_configs import is_image_text, tiny_config

NEW_TOKENS = 16
PROMPTS = [list(b"def main(a):\n    return main(a"), list(b"import os"), list(b"x = x = x = x")]
SEED = 3
SAMPLED = SamplingSettings(temperature=0.8, ignore_eos=True)
WITH_DRAFT, LOOKED_UP = TreeSettings(size=12, lookup=False), TreeSettings(policy="lookup", size=12)
PLAIN = TreeSettings(policy="none")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model(tiny_config("llama"), is_image_text=False, seed=1)
    with torch.no_grad():  # nearly even distributions: the noise decides, for target and draft alike
        model.get_output_embeddings().weight.mul_(0.1)
    return save_folder(tmp_path_factory.mktemp("draft") / "llama", model)


@pytest.fixture(scope="module", params=["bloom", "mpt", "gpt_neo", "kosmos-2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = str(request.param)
    model = make_model(tiny_config(name), is_image_text=is_image_text(name), seed=0)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.3)
    return save_folder(tmp_path_factory.mktemp("target") / name, model)


def generated(folder: Path) -> list[list[int]]:
    """What transformers' own generate adds to each prompt."""
    family = AutoModelForImageTextToText if is_image_text(folder.name) else AutoModelForCausalLM
    model = language_model(family.from_pretrained(folder, dtype=torch.float32).eval())
    options: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 256, "forced_eos_token_id": None}
    return [greedy_tokens(model, prompt, NEW_TOKENS, **options) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return generated(folder)


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, dtype="float32", context_tokens=128, parallel=3, **options)


@pytest.fixture(scope="module")
def engine(folder: Path, draft: Path) -> Iterator[Engine]:
    with open_engine(folder, draft=draft, tree=WITH_DRAFT) as found:
        yield found


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Any]:
    """The results of sampled texts without trees."""
    return texts(engine, PLAIN, PROMPTS, SAMPLED)


def texts(engine: Engine, tree: TreeSettings | None, prompts: list[list[int]], sampling: SamplingSettings) -> list[Any]:
    """Return the results of prompts that share their passes."""
    engine.use_tree(tree)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "sampling": sampling, "seed": SEED}
    handles = [engine.submit(engine.request(prompt, **options)) for prompt in prompts]
    return [handle.result() for handle in handles]


def tokens(found: list[Any]) -> list[list[int]]:
    return [list(result.token_ids) for result in found]


def num_passes(found: list[Any]) -> int:
    return sum(len(result.passes) for result in found)


@pytest.mark.parametrize("tree", [WITH_DRAFT, LOOKED_UP, TreeSettings(size=12)], ids=["draft", "lookup", "both"])
def test_texts_are_plain_decodings_alone_and_in_company(
    engine: Engine, expected: list[list[int]], plain: list[Any], tree: TreeSettings
) -> None:
    """Greedy texts are those of generate, sampled ones those of their seeds; they take fewer passes than tokens."""
    greedy = texts(engine, tree, PROMPTS, SamplingSettings())
    assert tokens(greedy) == expected
    sampled = texts(engine, tree, PROMPTS, SAMPLED)
    assert tokens(sampled) == tokens(plain)
    for prompt, result in zip(PROMPTS, plain, strict=True):
        assert tokens(texts(engine, tree, [prompt], SAMPLED)) == tokens([result])
    if not tree.lookup:
        assert num_passes(sampled) < 0.5 * num_passes(plain)
    if not tree.needs_draft:
        assert num_passes(greedy) < len(PROMPTS) * NEW_TOKENS - 3


def test_few_bits_on_a_processor_grow_no_chains(draft: Path, tmp_path: Path) -> None:
    """A row's bits depend on the rows beside it in a family's own code, and a seed has one text."""
    folder = save_folder(tmp_path / "bloom", make_model(tiny_config("bloom"), is_image_text=False, seed=0))
    pair = open_pair(folder, draft)
    for named, tree in ((pair, WITH_DRAFT), (replace(pair, draft=None), None)):
        run_config = resolve_run_config(named.target, 128, draft=named.draft, dtype="bfloat16")
        setup = set_up(named, run_config, tree)
        assert setup.tree.policy == "none"
        assert setup.weights.draft is None
        (note,) = [note for note in setup.notes if "one token a pass (dtype=float32 has chains)" in note]
        assert "adds biases" in note
    with Engine.from_pair(pair, dtype="bfloat16", context_tokens=128, tree=WITH_DRAFT) as engine:
        engine.use_tree(LOOKED_UP)
        result = engine.generate(PROMPTS[0], max_new_tokens=5, ignore_eos=True)
    assert [len(step.tokens) for step in result.steps] == [1] * 5


@pytest.fixture(scope="module")
def streamed(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = make_model(tiny_config("bloom"), is_image_text=False, seed=0)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.3)
    folder = save_folder(tmp_path_factory.mktemp("streamed") / "bloom", model)
    with open_engine(folder, draft=draft, tree=WITH_DRAFT, limits=MemoryLimits(max_resident_layers=0)) as found:
        yield found


@pytest.mark.parametrize("tree", [WITH_DRAFT, PLAIN], ids=["chains", "none"])
def test_each_layer_is_streamed_once_a_pass(
    streamed: Engine, tree: TreeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three texts, with chains of their own or without, share each pass from the disk, and have their own texts."""
    assert tokens(texts(streamed, tree, PROMPTS, SamplingSettings())) == generated(streamed.pair.target.folder)
    acquire, read = LayerStream.acquire, []

    def counted(stream: LayerStream, layer: int) -> dict[str, torch.Tensor]:
        read.append(layer)
        return acquire(stream, layer)

    plain = tokens(texts(streamed, PLAIN, PROMPTS, SAMPLED))
    monkeypatch.setattr(LayerStream, "acquire", counted)
    found = texts(streamed, tree, PROMPTS, SAMPLED)
    assert tokens(found) == plain
    num_layers = streamed.placement.num_layers
    assert read == [*range(num_layers)] * (len(read) // num_layers)
    assert len(read) // num_layers <= max(len(result.steps) for result in found) + len(PROMPTS) - 1


def test_a_cache_that_cannot_be_cut_is_read_anew(streamed: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of its seed all the same."""
    plain = tokens(texts(streamed, PLAIN, PROMPTS, SAMPLED))
    refused = []

    def is_cut(self: OwnPassText, count: int) -> bool:
        refused.append(count)
        return False

    monkeypatch.setattr(OwnPassText, "_is_cut", is_cut)
    assert tokens(texts(streamed, TreeSettings(size=12), PROMPTS, SAMPLED)) == plain
    assert refused


def test_a_cancel_while_a_prompt_is_read_ends_the_text_and_nothing_else(streamed: Engine) -> None:
    plain = tokens(texts(streamed, PLAIN, PROMPTS[:1], SAMPLED))
    request = streamed.request(PROMPTS[0], max_new_tokens=NEW_TOKENS, sampling=SAMPLED)
    cut = streamed.submit(request, on_prefill=lambda *_: streamed.cancel(abandon=True))
    assert cut.result().finish_reason == "interrupted"
    assert tokens(texts(streamed, PLAIN, PROMPTS[:1], SAMPLED)) == plain


@pytest.mark.parametrize("at", [0, 2])
def test_a_cancel_within_a_pass_leaves_whole_texts(streamed: Engine, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a text had by then are its tokens, and the conversation's next turn is that of the whole text."""
    streamed.use_tree(WITH_DRAFT)
    options: dict[str, Any] = {"sampling": SAMPLED, "seed": SEED}
    streamed.forget()
    whole = list(streamed.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, **options).token_ids)
    streamed.forget()
    handle = streamed.submit(streamed.request(PROMPTS[0], max_new_tokens=NEW_TOKENS, **options))
    chunks = iter(handle)
    next(chunks)

    look = OwnPassModel._look

    def cut(model: OwnPassModel, layer: int) -> None:
        if layer >= at:
            streamed.cancel(abandon=True)
        look(model, layer)

    monkeypatch.setattr(OwnPassModel, "_look", cut)
    list(chunks)
    monkeypatch.undo()
    found = list(handle.result().token_ids)
    assert handle.result().finish_reason == "interrupted"
    assert found == whole[: len(found)]
    again = streamed.generate([*PROMPTS[0], *whole[:3]], max_new_tokens=4, sampling=SamplingSettings(), reuse=True)
    streamed.forget()
    anew = streamed.generate([*PROMPTS[0], *whole[:3]], max_new_tokens=4, sampling=SamplingSettings())
    assert again.token_ids == anew.token_ids


def test_a_turn_goes_on_from_the_last_one(streamed: Engine) -> None:
    """The rows of the turn before are not read again, but for those of a chain that were not its text's."""
    streamed.use_tree(WITH_DRAFT)
    streamed.forget()
    first = streamed.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, sampling=SAMPLED, seed=SEED)
    prompt = [*PROMPTS[0], *first.token_ids, *PROMPTS[1]]
    turn = streamed.generate(prompt, max_new_tokens=NEW_TOKENS, sampling=SAMPLED, seed=SEED, reuse=True)
    assert turn.steps[0].num_cached == len(PROMPTS[0]) + NEW_TOKENS - 1
    streamed.use_tree(PLAIN)
    streamed.forget()
    assert streamed.generate(prompt, max_new_tokens=NEW_TOKENS, sampling=SAMPLED, seed=SEED).token_ids == turn.token_ids


def test_trees_tune_themselves_where_nothing_is_named(streamed: Engine, draft: Path) -> None:
    """Without a setting the trees are chains of the default policy, or looked up text where there is no draft."""
    target = streamed.pair.target.folder
    for named in (draft, None):
        with open_engine(target, draft=named) as engine:
            assert engine.tree.policy == ("adaptive" if named else "lookup")
            result = engine.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, sampling=SAMPLED, seed=SEED)
            verdicts = engine.verify_lossless(PROMPTS[:1], max_new_tokens=6)
        plain = streamed.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS, sampling=SAMPLED, seed=SEED)
        assert result.token_ids == plain.token_ids
        assert all(verdict.is_lossless for verdict in verdicts)


@pytest.mark.parametrize("policy", ["opt-tree", "eagle2", "c2t", "sequoia", "chain"])
def test_every_coupled_policy_grows_chains(streamed: Engine, policy: str) -> None:
    """What has branches would raise; the texts are those of their seeds."""
    plain = tokens(texts(streamed, PLAIN, PROMPTS, SAMPLED))
    sized: dict[str, Any] = {"draft_tokens": 6} if policy == "chain" else {"size": 6}
    found = texts(streamed, TreeSettings(policy=policy, draw="coupled", lookup=False, **sized), PROMPTS, SAMPLED)
    assert tokens(found) == plain
    assert max(step.num_drafted for result in found for step in result.steps) > 1


BRANCHED = {
    "policy=specinfer": TreeSettings(policy="specinfer", draw="coupled"),
    "fork=4x3": TreeSettings(policy="mcsd", draw="coupled", fork=(4, 3)),
    "target_width=2": TreeSettings(policy="mcsd", target_width=2),
    "draw=sampled": TreeSettings(policy="chain", draw="sampled"),
    "draw=chosen": TreeSettings(policy="opt-tree", draw="chosen"),
    "max_children=3": TreeSettings(max_children=3),
}


@pytest.mark.parametrize("setting", BRANCHED)
def test_branches_are_refused_by_name(
    streamed: Engine, draft: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight is read, and of an engine that is open."""
    monkeypatch.setattr("edgespec.engine.load_models", lambda *_args, **_options: pytest.fail("weights are read"))
    for refused in (
        lambda: open_engine(streamed.pair.target.folder, draft=draft, tree=BRANCHED[setting]),
        lambda: streamed.use_tree(BRANCHED[setting]),
    ):
        with pytest.raises(EdgespecError) as caught:
            refused()
        assert caught.value.code == "E_PLAIN"
        assert f"grows no trees of `{setting}`: it is decoded by chains" in caught.value.what


def test_the_plan_counts_the_draft_and_the_chains(streamed: Engine) -> None:
    """Rows of chains beside the texts', their logits, and what a draft needs."""
    plain = placement_for(streamed.pair.target.folder, tree=PLAIN, context_tokens=128, parallel=3)
    found = streamed.planned.device_bytes
    assert {use for use in found if use.startswith("draft: ")} >= {"draft: weights", "draft: one pass"}
    for use in ("target: its own cache", "target: one pass"):
        assert found[use] > plain.device_bytes[use]
    cache = streamed.target_model.new_text()
    streamed.target_model.read_text(cache, torch.zeros(128 + WITH_DRAFT.num_nodes, dtype=torch.long))
    assert 3 * cache.num_bytes <= found["target: its own cache"] <= 5 * cache.num_bytes


def test_a_draft_that_reads_hidden_states_is_refused(streamed: Engine, draft: Path, tmp_path: Path) -> None:
    """The sentence says so; a model of the level cannot draft either, and one without chains takes no draft at all."""
    target = streamed.pair.target
    with pytest.raises(
        EdgespecError, match="takes no draft that reads its hidden states or is its copy: it is decoded by chains"
    ):
        check_may_draft(target, replace(target, parts=object()))
    with pytest.raises(EdgespecError, match="cannot draft, because it adds biases"):
        open_engine(target.folder, draft=target.folder)
    config = RwkvConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2, context_length=64)
    states = save_folder(tmp_path / "rwkv", AutoModelForCausalLM.from_config(config))
    with pytest.raises(EdgespecError, match="takes no draft: it is decoded plainly, one token a pass, because it has"):
        open_engine(states, draft=draft, tree=TreeSettings())


def test_a_prompt_cache_is_refused_and_texts_are_verified_as_others_are(streamed: Engine, tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match="its own cache has no form in a file"):
        PromptCache(tmp_path / "rows", streamed.pair, streamed.run_config)
    assert all(verdict.is_lossless for verdict in streamed.verify_lossless(PROMPTS[:1], max_new_tokens=3))
