"""A target's own low-bit copy: texts are plain decoding's, its logits the packed target's, its memory planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.draft.own_parts import is_copy
from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair
from edgespec.placement import copied_layers
from edgespec.placement.pair_profile import pair_facts
from edgespec.placement.pair_setup import set_up
from edgespec.placement.run_config import resolve_run_config
from offload.placement import COPIES
from tests.edgespec.draft.contract import open_engine
from tests.offload.formats.bitsandbytes_checkpoints import published
from tests.support.families import FAMILIES, RECURRENT, SMALL, make_model, save_folder

COPY = Path("self:nf4")
STREAMED = MemoryLimits(max_resident_layers=0)
ONE_STAYS = MemoryLimits(max_resident_layers=1)
PLAIN = TreeSettings(policy="none")
# Each kind of cache and of weights: windows, a mixture, recurrent layers, and both
KINDS = ("llama", "gemma3", "qwen3-moe", "qwen3-next", "mamba")
IDS = torch.arange(20, 60)


def write(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    return save_folder(folder / family, make_model({**FAMILIES, **RECURRENT}[family](), dtype=dtype))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("copy"), "llama")


@pytest.mark.parametrize("word", ["self", "self:nf4", "self:int4"])
def test_a_copy_is_named_by_its_word(target: Path, word: str) -> None:
    """Its files are the target's: the folder's name would say that the target drafts for itself."""
    pair = open_pair(target, Path(word))
    run_config = resolve_run_config(pair.target, pair.max_context, draft=pair.draft, dtype="float32")
    setup = set_up(pair, run_config, TreeSettings(size=12))
    assert pair.names == (target.name, word)
    assert pair_facts(pair.target, pair.draft, run_config, setup.placement).draft == word


def logits_of(engine: Engine, *, of_draft: bool) -> torch.Tensor:
    model = engine.draft_model if of_draft else engine.target_model
    return model.read_text(model.new_text(), IDS)


@pytest.mark.parametrize(("family", "word"), [*((family, "nf4") for family in KINDS), ("llama", "int4")])
def test_a_copys_logits_are_those_of_the_target_packed_so(family: str, word: str, tmp_path: Path) -> None:
    folder = write(tmp_path, family)
    with open_engine(folder, Path(f"self:{word}"), tree=TreeSettings(size=8), limits=STREAMED) as engine:
        found, exact = logits_of(engine, of_draft=True), logits_of(engine, of_draft=False)
    with open_engine(folder, Path("none"), tree=PLAIN, limits=STREAMED, quant=word) as engine:
        expected = logits_of(engine, of_draft=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - exact).abs().max() > 1e-3  # rounding shows, or the comparison would say nothing


@pytest.mark.parametrize("family", KINDS)
def test_a_copy_of_layers_that_all_stay_is_the_target(family: str, tmp_path: Path) -> None:
    with open_engine(write(tmp_path, family), COPY, tree=TreeSettings(size=8)) as engine:
        assert engine.placement.is_resident
        assert torch.equal(logits_of(engine, of_draft=True), logits_of(engine, of_draft=False))


def test_layers_that_stay_are_shared_and_the_others_take_what_was_planned(target: Path) -> None:
    pair = open_pair(target, COPY)
    assert is_copy(pair.draft.parts)
    num_bytes = []
    for limits in (STREAMED, ONE_STAYS):
        run_config = resolve_run_config(pair.target, None, draft=pair.draft, dtype="float32", limits=limits)
        setup = set_up(pair, run_config, TreeSettings(size=8))
        with Engine(setup, self_check=False) as engine:
            assert engine.draft_model is not None
            ours, theirs = (model.model.model.layers for model in (engine.target_model, engine.draft_model))
            own = 0
            for index, (layer, copy) in enumerate(zip(ours, theirs, strict=True)):
                if index in engine.placement.resident_layers:
                    weights, copies = (dict(one.named_parameters()) for one in (layer, copy))
                    assert all(copies[name] is weight for name, weight in weights.items())
                else:
                    parts = [*copy.parameters(), *copy.buffers()]
                    own += sum(part.nbytes for part in parts if not part.is_meta)
            planned = setup.placement.device_bytes[COPIES]
            assert own <= planned <= own + 64 * 3 * 40  # each tensor begins at a multiple of 64 bytes
            num_bytes.append(planned)
            assert f"{len(ours) - engine.placement.num_resident} of 3 layers in nf4" in " ".join(setup.notes)
    assert num_bytes[1] == num_bytes[0] * 2 // 3


def test_more_layers_stay_where_their_copies_are_not_needed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that stays frees its copy: a plan that counts all copies keeps fewer layers, or streams for nothing."""
    with open_engine(target, COPY, tree=TreeSettings(size=8)) as engine:
        uses = engine.planned.device_bytes
        assert uses[COPIES] == 0
        limits = MemoryLimits(max_cpu_bytes=sum(uses.values()))
        with open_engine(target, COPY, tree=TreeSettings(size=8), limits=limits) as tight:
            assert tight.placement.is_resident
        monkeypatch.setattr(copied_layers, "is_copy", lambda _parts: False)
        monkeypatch.setattr("edgespec.placement.place.is_copy", lambda _parts: True)
        with open_engine(target, COPY, tree=TreeSettings(size=8), limits=limits) as wrong:
            assert not wrong.placement.is_resident


def test_a_target_that_does_not_fit_beside_its_copy_says_so_before_weights_are_read(target: Path) -> None:
    with pytest.raises(EdgespecError, match="draft: weights") as raised:
        open_engine(target, COPY, tree=TreeSettings(size=8), limits=MemoryLimits(max_cpu_bytes=1 << 20))
    assert raised.value.code == "E_MEMORY"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quant": "nf4"}, "is to be packed as nf4"),
        ({"draft_quant": "int8"}, "format stands in its name"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name(target: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(EdgespecError, match=said):
        open_engine(target, COPY, **options)


def test_a_checkpoint_that_is_packed_already_names_what_does_instead(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "packed", make_model(LlamaConfig(**SMALL, head_dim=32)))
    published(folder, "nf4")
    with pytest.raises(EdgespecError, match="hardly be smaller as nf4") as raised:
        open_engine(folder, COPY)
    assert "small draft" in raised.value.fix
    assert "looked up" in raised.value.fix


def test_the_built_in_targets_copy_guesses_many_tokens_of_its_texts() -> None:
    """It is a draft of fifteen tokens a pass and more, by the acceptance that is fitted on such a copy."""
    with Engine.from_pretrained(
        None, draft="self:nf4", tree=TreeSettings(size=64, lookup=False), limits=STREAMED, context_tokens=512
    ) as engine:
        found = engine.generate("import os\n\n\ndef read_lines(path):\n", max_new_tokens=96, temperature=0.0)
    assert (found.tokens_per_pass or 0) > 8
