"""Texts choose among an engine's adapters: each is the one that it would be alone, on rows that have its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.pair.adapters import open_adapters
from edgespec.pair.folder import fingerprint
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.prefix_cache.caches import new_caches
from edgespec.prefix_cache.prompt_cache import PromptCache
from edgespec.prefix_cache.slots import Slots
from tests.support.adapters import with_adapters, write_adapter
from tests.support.families import FAMILIES, greedy_tokens, make_model, save_folder

PROMPT = [*b"def read(path):\n    return 0\n\n\ndef write(path):\n    "]
ENDS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
NEW = 12
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_id": []}
CHOICES: list[Any] = [["one"], [], ["two"], [("one", 0.5)], {"two": 1.0, "one": 2.0}, None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, list[Path]]:
    room = tmp_path_factory.mktemp("adapters")
    model = make_model(FAMILIES["llama-bias"]())
    adapters = [write_adapter(room / name, model, ENDS, seed=seed) for seed, name in enumerate(("one", "two"))]
    return save_folder(room / "model", model), model, adapters


def open_engine(folder: Path, *adapters: str | Path, draft: str | Path = "none", **options: Any) -> Engine:
    return Engine.from_pretrained(
        folder, draft=draft, device="cpu", dtype="float32", context_tokens=128, self_check=False, draft_check=False,
        limits=MemoryLimits(max_resident_layers=0), tree=TreeSettings(policy="none" if draft == "none" else "adaptive"),
        adapters=[str(path) for path in adapters], **options,
    )  # fmt: skip


def test_texts_of_several_adapters_and_none_are_those_that_they_are_alone(
    base: tuple[Path, nn.Module, list[Path]],
) -> None:
    """They share each pass; each is transformers' own greedy text with the unmerged forward."""
    folder, model, (one, two) = base
    uses = [[(one, 1.0)], [], [(two, 0.5)], [(one, 0.5)], [(two, 1.0), (one, 2.0)], [(one, 1.0), (two, 0.5)]]
    expected = [greedy_tokens(with_adapters(model, *use), PROMPT, NEW) for use in uses]
    assert len({tuple(text) for text in expected}) == len(uses)
    for draft in ("none", "self"):
        with open_engine(folder, one, f"{two}:0.5", draft=draft, parallel=6) as engine:
            requests = [engine.request(PROMPT, adapters=choice, **GREEDY) for choice in CHOICES]
            found = dict(engine.generate_many(requests))
            for number, wanted in enumerate(expected):
                result = found[number]
                assert not isinstance(result, Exception), result
                assert list(result.token_ids) == wanted, (draft, CHOICES[number])
            assert all(verdict.is_lossless for verdict in engine.verify_lossless([PROMPT], adapters=["two"]))


def test_a_copy_of_the_target_follows_its_adapters(base: tuple[Path, nn.Module, list[Path]]) -> None:
    """Its logits are those of the packed target with the text's own."""
    folder, _, adapters = base
    ids = torch.tensor(PROMPT)
    with (
        open_engine(folder, *adapters, draft="self:int4") as engine,
        open_engine(folder, *adapters, quant="int4") as packed,
    ):
        assert engine.draft_model is not None
        for use in ((), (("one", 1.0),), (("two", 2.0), ("one", 1.0))):
            copied, wanted = (of.read_text(of.new_text(use), ids) for of in (engine.draft_model, packed.target_model))
            assert torch.allclose(copied, wanted, atol=1e-4), use
            caches = new_caches(engine.target_model, engine.draft_model, use)
            assert caches.draft.adapters == caches.target.adapters == use
        assert engine.draft_model.follows_adapters


def test_rows_of_one_choice_are_never_used_for_another(base: tuple[Path, nn.Module, list[Path]]) -> None:
    """Kept in memory: names, scales and order count."""
    folder, model, (one, two) = base
    with open_engine(folder, f"{one}:0", f"{two}:0") as engine:
        for use in ([], [("one", 1.0)], [("one", 0.5)], [("two", 1.0), ("one", 1.0)], [("one", 1.0), ("two", 1.0)], []):
            found = engine.generate(PROMPT, reuse=True, adapters=use, **GREEDY)
            paths = [({"one": one, "two": two}[name], scale) for name, scale in use]
            assert list(found.token_ids) == greedy_tokens(with_adapters(model, *paths), PROMPT, NEW), use
            assert found.cached_tokens == 0
            engine.forget() if len(engine.prefix_cache) > 3 else None
        assert engine.generate(PROMPT, reuse=True, adapters=[], **GREEDY).cached_tokens > 0


def test_files_of_rows_know_their_adapters(base: tuple[Path, nn.Module, list[Path]], tmp_path: Path) -> None:
    """A prompt cache is of the adapters of texts that choose none; a folder of conversations has files of each."""
    folder, _, (one, two) = base
    path, slots = tmp_path / "rows.safetensors", tmp_path / "slots"
    with open_engine(folder, one, f"{two}:0") as engine:
        cache = PromptCache(path, engine.pair, engine.run_config)
        cache.keep_beginning([PROMPT, PROMPT])
        engine.prefix_cache.prompt_cache = cache
        engine.generate(PROMPT, adapters=["two"], **GREEDY)
        assert not path.exists()
        engine.generate(PROMPT, **GREEDY)
        assert path.exists()
        assert engine.generate(PROMPT, adapters=["two"], **GREEDY).cached_tokens == 0
        assert engine.generate(PROMPT, adapters=[("one", 0.5)], **GREEDY).cached_tokens == 0
        assert engine.generate(PROMPT, **GREEDY).cached_tokens > 0
        engine.prefix_cache.prompt_cache = None
        engine.prefix_cache.slots = Slots(slots, engine.pair, engine.run_config)
        engine.forget()
        engine.generate(PROMPT, reuse=True, adapters=["two"], **GREEDY)
        assert engine.prefix_cache.store() == 1
    with open_engine(folder, f"{one}:0.5", two) as engine:
        with pytest.raises(EdgespecError, match="other adapters"):
            PromptCache(path, engine.pair, engine.run_config)
        engine.prefix_cache.slots = Slots(slots, engine.pair, engine.run_config)
        assert engine.generate(PROMPT, reuse=True, adapters=["one"], **GREEDY).cached_tokens == 0
        assert engine.generate(PROMPT, reuse=True, adapters=["two"], **GREEDY).cached_tokens > 0


def test_a_file_has_rows_for_a_draft_with_the_same_adapters_alone(
    base: tuple[Path, nn.Module, list[Path]], tmp_path: Path
) -> None:
    """Those of the target are used all the same."""
    folder, _, (one, _) = base
    for given, is_same in ((str(one), True), (str(one), True), (f"{one}:0.5", False), (None, False)):
        own = [] if given is None else [given]
        with open_engine(folder, draft=folder, draft_adapters=own) as engine:
            cache = PromptCache(tmp_path / "rows.safetensors", engine.pair, engine.run_config)
            if not cache.ids:
                cache.keep_beginning([PROMPT, PROMPT])
                engine.prefix_cache.prompt_cache = cache
                engine.generate(PROMPT, **GREEDY)
            caches = cache.begin(PROMPT, engine.target_model, engine.draft_model, ())
            assert (len(caches.target.ids), bool(caches.draft.ids)) == (len(PROMPT) - 1, is_same), given


def test_the_fingerprint_is_of_the_adapters_and_their_scales(base: tuple[Path, nn.Module, list[Path]]) -> None:
    """Of those alone that texts have which choose none."""
    folder, _, (one, two) = base
    pair = open_pair(folder, Path("none"))
    prints = {
        specs: fingerprint(pair.with_adapters(specs).target)
        for specs in ((), (f"{one}:0",), (str(one),), (f"{one}:0.5",), (str(one), str(two)), (str(two), str(one)))
    }
    assert prints[()] == prints[f"{one}:0",] == fingerprint(pair.target)
    assert len(set(prints.values())) == len(prints) - 1


UNKNOWN: dict[str, tuple[Any, str]] = {
    "no such name": (["three"], "'three'"),
    "twice": (["one", "one"], "twice"),
    "a scale of no number": ([("one", float("nan"))], "nan"),
}


@pytest.mark.parametrize("of", UNKNOWN)
def test_a_choice_that_is_none_is_refused(of: str, base: tuple[Path, nn.Module, list[Path]]) -> None:
    folder, _, adapters = base
    choice, word = UNKNOWN[of]
    with open_engine(folder, *adapters) as engine, pytest.raises(EdgespecError) as caught:
        engine.request(PROMPT, adapters=choice)
    assert word in caught.value.what


def test_names_and_scales_of_adapters(base: tuple[Path, nn.Module, list[Path]], tmp_path: Path) -> None:
    _, model, (one, _) = base
    odd = write_adapter(tmp_path / "odd:2", model, ["q_proj"])
    config: Any = model.config
    given = open_adapters([f"mine={one}:-0.5", one, (one.parent / "two", 2), odd], config)
    assert [(each.name, each.scale) for each in given] == [("mine", -0.5), ("one", 1), ("two", 2), ("odd:2", 1)]
    for spec, word in ((f"{one}:x", "there is no adapter"), (tmp_path, "adapter_config.json"), ((one, "2"), "'2'")):
        with pytest.raises(EdgespecError) as caught:
            open_adapters([spec], config)
        assert word in caught.value.what
    with pytest.raises(EdgespecError, match="two adapters have the name 'one'"):
        open_adapters([one, f"{one}:2"], config)


def test_a_draft_that_reads_features_takes_no_adapter(base: tuple[Path, nn.Module, list[Path]]) -> None:
    folder, _, (one, _) = base
    with pytest.raises(EdgespecError, match="no draft of its own"):
        open_pair(folder, Path("none")).with_adapters([one], [one])


def test_sampled_texts_are_plain_decodings(base: tuple[Path, nn.Module, list[Path]]) -> None:
    """Through trees of a draft that knows the adapter, and of one that does not."""
    folder, _, adapters = base
    options: dict[str, Any] = {"sampling": SamplingSettings(temperature=0.9), "seed": 5, "max_new_tokens": NEW}
    with open_engine(folder, *adapters) as plain:
        wanted = plain.generate(PROMPT, adapters=["one"], **options).token_ids
    with open_engine(folder, *adapters, draft="self") as engine:
        assert engine.generate(PROMPT, adapters=["one"], **options).token_ids == wanted
    with open_engine(folder, *adapters, draft=folder) as engine:
        assert engine.generate(PROMPT, adapters=["one"], **options).token_ids == wanted


def test_texts_that_share_a_read_of_the_head_have_each_their_own(
    base: tuple[Path, nn.Module, list[Path]], tmp_path: Path
) -> None:
    """An adapter with a head of its own: rows of all texts are multiplied by heads at once."""
    folder, model, _ = base
    head = write_adapter(tmp_path / "head", model, ["q_proj"], replaced=["lm_head.weight"], modules_to_save=["lm_head"])
    wanted = [greedy_tokens(of, PROMPT, NEW) for of in (model, with_adapters(model, (head, 1.0)))]
    with open_engine(folder, f"{head}:0", parallel=4) as engine:
        choices: list[list[str]] = [[], ["head"], [], ["head"]]
        requests = [engine.request(PROMPT, adapters=choice, **GREEDY) for choice in choices]
        for number, found in engine.generate_many(requests):
            assert not isinstance(found, Exception), found
            assert list(found.token_ids) == wanted[number % 2], number


def test_few_rows_of_a_text_with_adapters_do_not_pass_all_layers_in_one_native_call(tmp_path: Path) -> None:
    """Texts without adapters do, in the same engine."""
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / "target", dtype=torch.float32)
    one = write_adapter(tmp_path / "one", model, ENDS)
    ids = torch.tensor(PROMPT[:4])
    with Engine.from_pretrained(
        DEMO_FOLDER / "target", draft="none", device="cpu", dtype="float32", context_tokens=64, self_check=False,
        tree=TreeSettings(policy="none"), adapters=[f"{one}:0"],
    ) as engine:  # fmt: skip
        target = engine.target_model
        assert target.is_native
        for use, meant in (((), model), ((("one", 1.0),), with_adapters(model, (one, 1.0)))):
            with torch.no_grad():
                wanted = meant(input_ids=ids[None]).logits[0, -1]
            found = target.read_text(target.new_text(use), ids)
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5, use


def test_a_conversation_that_changes_its_adapters_is_read_anew_with_them(tmp_path: Path) -> None:
    """And gone on with the same ones it is not: each answer is that of an engine that has read nothing before."""
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER / "target", dtype=torch.float32)
    adapters = [write_adapter(tmp_path / name, model, ENDS, seed=seed) for seed, name in enumerate(("one", "two"))]
    with open_engine(DEMO_FOLDER / "target", f"{adapters[0]}:0.5", f"{adapters[1]}:0") as engine:
        chat = engine.chat(temperature=0.0, max_new_tokens=NEW, eos_token_id=[])
        turns = [(["one"], False), (["one"], True), ([("one", 1.0)], False), (["two"], False), ([], False), ([], True)]
        for choice, is_kept in turns:
            chat.options["adapters"] = choice
            chat.send("def main(")
            assert (chat.last.cached_tokens > 0) == is_kept, choice
            fresh = engine.generate(chat.prompt_ids(chat.messages[:-1]), adapters=choice, **GREEDY)
            assert chat.last.token_ids == fresh.token_ids, choice
        path = tmp_path / "chat.json"
        chat.save(path)
    assert [(name, scale) for name, _, scale in json.loads(path.read_text())["adapters"]] == [
        ("one", 0.5),
        ("two", 0.0),
    ]
