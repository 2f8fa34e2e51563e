"""Texts beyond the length before scaling: greedy ones are transformers' own, in trees, in company and again."""

import dataclasses
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, Phi3ForCausalLM

from edgespec import Engine, TreeSettings
from edgespec.model.length_rotation import LengthRotation
from edgespec.model.target import Target
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.pair_setup import set_up
from edgespec.placement.run_config import resolve_run_config
from tests.support.families import FAMILIES, GROUPED, SMALL, greedy_tokens, make_model, save_folder

SHORT, NEW = 64, 20
TREE, PLAIN = TreeSettings(size=12, depth=5), TreeSettings(policy="none")
LONGROPE = {"type": "longrope", "factor": 4.0, "original_max_position_embeddings": SHORT,
            "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 2.0, 4.0, 8.0]}  # fmt: skip
MODELS: dict[str, tuple[type[LlamaConfig] | type[Phi3Config], dict[str, Any]]] = {
    "yarn": (LlamaConfig, {"type": "yarn", "factor": 4.0}),
    "dynamic": (LlamaConfig, {"type": "dynamic", "factor": 4.0}),
    "longrope": (LlamaConfig, LONGROPE),
    "phi3": (Phi3Config, LONGROPE),  # whose generate reads a text anew where it outgrows the short factors
}


def prompt_of(num_tokens: int) -> list[int]:
    return torch.randint(0, 255, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()


def scaled_folder(root: Path, kind: str) -> Path:
    """A folder whose config.json was edited by hand."""
    family, scaling = MODELS[kind]
    folder = save_folder(root / kind, make_model(family(**{**GROUPED, "max_position_embeddings": SHORT})))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": scaling, "original_max_position_embeddings": SHORT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path, draft: Path | None, tree: TreeSettings, *, texts: int = 1) -> Engine:
    """An engine whose texts do not stop."""
    pair = dataclasses.replace(open_pair(folder, draft), stop_tokens=frozenset())
    run_config = {"dtype": "float32", "context_tokens": 4 * SHORT, "parallel": texts}
    return Engine.from_pair(pair, tree=tree, self_check=False, **run_config)


def together(engine: Engine, lengths: list[int], **sampling: Any) -> list[tuple[int, ...]]:
    requests = [
        engine.request(prompt_of(count), max_new_tokens=NEW, seed=3, name=str(count), **sampling) for count in lengths
    ]
    handles = [engine.submit(request) for request in requests]
    return [handle.result().token_ids for handle in handles]


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Prompts that end before the length, at it and behind it; the texts of all cross it, or lie beyond."""
    if kind == "phi3" and "next_sequence_length" not in inspect.getsource(
        Phi3ForCausalLM.prepare_inputs_for_generation
    ):
        pytest.skip("this transformers reads one token alone where it means to read the text anew")
    folder, lengths = scaled_folder(tmp_path, kind), [50, SHORT, 90]
    expected = []
    for count in lengths:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # it remembers the longest pass
        expected.append(tuple(greedy_tokens(model, prompt_of(count), NEW, eos_token_id=None, pad_token_id=256)))
    with opened(folder, folder, TREE, texts=2) as engine:
        assert together(engine, lengths, temperature=0) == expected
        # behind others, and from the longest to the shortest
        assert together(engine, lengths[::-1], temperature=0) == expected[::-1]


@pytest.mark.parametrize("kind", ["dynamic", "phi3"])
def test_the_next_turn_is_what_the_whole_text_gives(kind: str, tmp_path: Path) -> None:
    """Rows that are kept of a shorter text rotate otherwise, and are read anew."""
    folder = scaled_folder(tmp_path, kind)
    turns = [prompt_of(40), prompt_of(30)]
    with opened(folder, folder, TREE) as engine:
        first = engine.generate(turns[0], max_new_tokens=NEW, temperature=0)
        text = [*turns[0], *first.token_ids, *turns[1]]
        request = engine.request(text, max_new_tokens=NEW, temperature=0)
        reused = engine._texts.submit(request, reuse=True).result()
    with opened(folder, None, PLAIN) as engine:
        assert reused.token_ids == engine.generate(text, max_new_tokens=NEW, temperature=0).token_ids


def test_a_text_that_is_begun_again_is_the_same(tmp_path: Path) -> None:
    """What it has written is read as it was written: a token at a time."""
    folder = scaled_folder(tmp_path, "dynamic")
    with opened(folder, folder, TREE) as engine:
        whole = engine.generate(prompt_of(90), max_new_tokens=NEW, temperature=0).token_ids
        handle = engine.submit(engine.request(prompt_of(90), max_new_tokens=NEW, temperature=0))
        pieces = iter(handle)
        while len(handle.added) < NEW // 2:
            next(pieces)
        handle.caches.target.truncate(0)
        engine._texts._begin_again()
        assert handle.result().token_ids == whole


def test_an_interrupt_may_end_the_pass_that_reads_a_text_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = scaled_folder(tmp_path, "phi3")
    with opened(folder, folder, TREE) as engine:
        request = engine.request(prompt_of(SHORT - 6), max_new_tokens=NEW, temperature=0)
        whole = engine.submit(request).result().token_ids
        handle, read, interrupted = engine.submit(request), Target.read, []

        def interrupt(target: Target, parts: Any) -> Any:
            found = read(target, parts)
            if parts[0].cache.prompt_tokens > SHORT and not interrupted:
                interrupted.append(parts[0].count)
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(Target, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.result()
        assert interrupted[0] >= SHORT  # all of the text
        assert handle.result().token_ids == whole


def test_lengths_that_rotate_alike_are_one() -> None:
    two_sets, growing = (
        LengthRotation(torch.nn.Linear(1, 1), MODELS[kind][0](**{**SMALL, "max_position_embeddings": 64},
                       rope_parameters={**MODELS[kind][1], "rope_type": kind, "rope_theta": 1e4}))
        for kind in ("longrope", "dynamic")
    )  # fmt: skip
    assert [two_sets.length(count) for count in (1, 64, 65, 200)] == [64, 64, 65, 65]
    assert [growing.length(count) for count in (1, 64, 65, 200)] == [64, 64, 65, 200]


@pytest.fixture(scope="module")
def short_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a table of positions, which has no row behind its end."""
    config = GPT2Config(**{**SMALL, "n_positions": SHORT, "max_position_embeddings": SHORT}, n_inner=64)
    return save_folder(tmp_path_factory.mktemp("short") / "draft", make_model(config, seed=1))


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("long") / "target", make_model(FAMILIES["llama"]()))


@pytest.mark.parametrize(
    ("tree", "temperature"), [(TREE, 0.0), (TREE, 1.0), (TreeSettings(policy="sequoia", size=9, draw="coupled"), 1.0)]
)
def test_a_shorter_limit_of_the_draft_ends_trees_and_no_texts(
    tree: TreeSettings, temperature: float, long_target: Path, short_draft: Path
) -> None:
    """One seed is one text: with trees that end at the draft's limit, without any, alone and with others."""
    lengths = [50, SHORT, 90]
    with opened(long_target, None, PLAIN) as engine:
        plain = together(engine, lengths, temperature=temperature)
    for texts in (1, 3):
        with opened(long_target, short_draft, tree, texts=texts) as engine:
            assert together(engine, lengths, temperature=temperature) == plain


def test_trees_reach_the_draft_s_last_position(long_target: Path, short_draft: Path) -> None:
    with opened(long_target, short_draft, replace(TREE, lookup=False)) as engine:
        result = engine.generate(prompt_of(50), max_new_tokens=30, temperature=0)
    num_tokens = 50
    for step in result.steps:
        if not step.is_prefill:
            assert (step.num_drafted > 0) == (num_tokens <= SHORT)
        num_tokens += len(step.tokens)
    assert num_tokens == 80


def setup_of(pair: ModelPair, context_tokens: int) -> Any:
    run_config = resolve_run_config(
        pair.target, pair.max_context, draft=pair.draft, context_tokens=context_tokens, dtype="float32"
    )
    return set_up(pair, run_config, TREE)


def test_the_draft_s_limit_is_named_and_its_cache_is_no_longer(long_target: Path, short_draft: Path) -> None:
    pair = open_pair(long_target, short_draft)
    assert pair.max_context == 256
    short, long = setup_of(pair, SHORT), setup_of(pair, 256)
    assert not short.notes
    assert f"the draft has positions for {SHORT} tokens, and texts may have 256" in long.notes[0]
    of_draft, of_target = (
        [setup.placement.device_bytes[f"{role}: keys and values"] for setup in (short, long)]
        for role in ("draft", "target")
    )
    assert of_draft[0] == of_draft[1]
    assert of_target[0] < of_target[1]
