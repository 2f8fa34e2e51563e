"""A tower's weights come block by block or stay, and what it said is kept by what pictures show."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4", reason="a newer transformers has them")

from edgespec.engine import Engine
from edgespec.model.seeing import see
from edgespec.model.sight import Sight
from offload.layer_store import LayerRecord, LayerStore
from offload.tower import Tower
from tests.support.tiny_pictures import SEEING, Family, seeing_prompt


@pytest.fixture(params=["qwen3_vl", "gemma3", "smolvlm"])
def family(request: pytest.FixtureRequest) -> Family:
    return SEEING[request.param]()


@pytest.fixture
def engine(family: Family, tmp_path: Path) -> Iterator[Engine]:
    family.model.save_pretrained(tmp_path / "model")
    family.processor.tokenizer.save_pretrained(tmp_path / "model")
    with Engine.from_pretrained(tmp_path / "model", device="cpu", dtype="float32", context_tokens=512) as engine:
        yield engine


def test_a_tower_that_streams_says_the_same_with_the_memory_of_one_block(
    engine: Engine, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    sight, prompt = engine._loaded.sight, seeing_prompt(family, (1, 2))
    expected = sight.see(prompt)
    most = 0

    def put(tower: Tower, record: LayerRecord) -> None:
        nonlocal most
        before(tower, record)
        tensors = [tower.record.outside, *tower.record.blocks.values()]
        present = sum(t.num_bytes for of in tensors for name, t in of.tensors.items() if name in tower._present)
        most = max(most, present)

    dropped: list[int] = []
    drop = LayerStore.drop

    def noted(store: LayerStore, record: LayerRecord, *, from_cache: bool = False) -> None:
        dropped.append(record.index)
        drop(store, record, from_cache=from_cache)

    monkeypatch.setattr(LayerStore, "drop", noted)
    before = Tower._put
    monkeypatch.setattr(Tower, "_put", put)
    streamed = Sight(sight._causal, sight._record, is_resident=False, check=lambda *_: None)
    torch.testing.assert_close(streamed.see(prompt).embedded, expected.embedded, rtol=0, atol=0)
    assert 0 < most <= sight._record.streamed_bytes < sight._record.num_bytes
    assert not streamed.is_awake
    assert sorted(dropped) == [record.index for record in (sight._record.outside, *sight._record.blocks.values())]
    assert streamed.tower_read_bytes <= sight._record.num_bytes


@pytest.mark.parametrize("family", SEEING, indirect=True)
def test_pictures_of_several_prompts_pass_the_tower_once_and_each_says_what_it_says_alone(
    engine: Engine, family: Family
) -> None:
    """Its weights are read once; a picture's rows have the bits that they have in company of others, or alone."""
    sight = engine._loaded.sight
    assert sight is not None
    place = family.prompt.partition(" and ")[0].removeprefix("Look: ")
    three = seeing_prompt(family, (4, 5, 6), words=f"{place} and {place} or this: {place}")
    prompts = [seeing_prompt(family, (1, 2)), seeing_prompt(family, (3, 2)), three]

    def opened() -> Sight:
        assert sight is not None
        return Sight(sight._causal, sight._record, is_resident=False, check=lambda *_: None)

    together = opened()
    together.look(prompts)
    assert together.is_awake
    asks_together = "llava_onevision" in type(family.model).__module__
    assert together.num_pictures == (3 if asks_together else 6)
    for prompt in prompts:
        by_itself = opened()
        found, alone = together.see(prompt), by_itself.see(prompt)
        assert together.tower_read_bytes == by_itself.tower_read_bytes
        assert torch.equal(found.embedded, alone.embedded)
        assert all(map(torch.equal, found.deepstack, alone.deepstack))
        whole = see(family.model, prompt)
        torch.testing.assert_close(found.embedded, whole.embedded, rtol=1e-5, atol=1e-5)
        for layer, expected in zip(found.deepstack, whole.deepstack, strict=True):
            torch.testing.assert_close(layer, expected, rtol=1e-5, atol=1e-5)
    assert (together.num_runs, together.is_awake) == (1, False)


def test_known_pictures_run_no_tower_and_it_rests_when_nothing_waits(engine: Engine, family: Family) -> None:
    sight, prompt = engine._loaded.sight, seeing_prompt(family, (1, 2))
    first = sight.see(prompt)
    assert sight.is_awake
    sight.rest()
    assert not sight.is_awake
    again = sight.see(prompt)
    assert (sight.num_runs, sight.is_awake) == (1, False)
    torch.testing.assert_close(again.embedded, first.embedded, rtol=0, atol=0)
    sight.see(seeing_prompt(family, (1, 4)))
    assert (sight.num_runs, sight.num_pictures) == (2, 3), "one of two pictures is new"
    assert sight.is_awake
    engine.generate(prompt, max_new_tokens=2)
    assert not sight.is_awake, "no text waits that has pictures"
