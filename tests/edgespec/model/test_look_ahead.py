"""Pictures of texts that wait pass the tower while passes wait for weights, and say what they would say later."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4", reason="a newer transformers has them")

from edgespec.config import MemoryLimits
from edgespec.engine import Engine
from edgespec.machine.torch_threads import torch_threads
from edgespec.model.layer_rounds import LayerRounds
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.sight import Sight
from edgespec.text.request import TextOptions
from offload.loaders import CpuLoader
from offload.tower import Tower
from tests.support.tiny_pictures import SEEING, Family, generated, seeing_prompt

GREEDY: TextOptions = {"max_new_tokens": 12, "temperature": 0.0, "eos_token_id": []}
NAME = "edgespec-text"  # of the threads in which pictures pass
LAYER_S = 0.004  # that a layer takes to come


@pytest.fixture(params=["qwen3_vl"])
def family(request: pytest.FixtureRequest) -> Family:
    return SEEING[request.param]()


@pytest.fixture
def engine(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Two texts share passes, whose layers come slowly."""
    family.model.save_pretrained(tmp_path / "model")
    family.processor.tokenizer.save_pretrained(tmp_path / "model")
    load = CpuLoader.load

    def slow(self: CpuLoader, record: Any, slot: int) -> None:
        time.sleep(LAYER_S)
        load(self, record, slot)

    monkeypatch.setattr(CpuLoader, "load", slow)
    with Engine.from_pretrained(
        tmp_path / "model", device="cpu", dtype="float32", context_tokens=256, parallel=2,
        limits=MemoryLimits(max_resident_layers=0), self_check=False,
    ) as engine:  # fmt: skip
        yield engine


def sight_of(engine: Engine) -> Sight:
    assert engine._loaded.sight is not None
    return engine._loaded.sight


def prompts_of(family: Family, count: int, *, first: int = 1) -> list[PicturePrompt]:
    return [seeing_prompt(family, (first + 2 * number, first + 2 * number + 1)) for number in range(count)]


def num_threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "smolvlm", "llava_onevision"], indirect=True)
@pytest.mark.parametrize("is_resident", [False, True])
def test_texts_whose_pictures_passed_ahead_are_those_of_generate(
    engine: Engine, family: Family, is_resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing is kept that no prompt waits for, each picture passes once."""
    monkeypatch.setattr("edgespec.model.sight.MOST_KEPT_BYTES", 0)
    sight = sight_of(engine)
    sight._is_resident = is_resident
    prompts = prompts_of(family, 6)
    truths = [generated(family, prompt)[:12] for prompt in prompts]
    ahead = 0
    go_on = sight.go_on

    def counted() -> bool:
        nonlocal ahead
        ahead += (found := go_on())
        return found

    assert engine._loaded._streamed["target"].work_meanwhile(counted)
    found = dict(engine.generate_many([engine.request(prompt, **GREEDY) for prompt in prompts]))
    assert [list(found[number].token_ids) for number in range(6)] == truths
    if "llava_onevision" not in type(family.model).__module__:  # whose pictures are asked of together
        assert ahead > 0
        assert sight.num_pictures == 12
    assert not sight.is_awake
    assert num_threads() == 0


@pytest.mark.parametrize("is_resident", [False, True])
def test_what_the_tower_says_ahead_has_the_bits_of_later(
    engine: Engine, family: Family, is_resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text begins in the middle; the tower is done with the others' pictures before it takes its own.

    What it said of those is kept until their prompts have taken it.
    """
    monkeypatch.setattr("edgespec.model.sight.MOST_KEPT_BYTES", 0)
    sight = sight_of(engine)
    sight._is_resident = is_resident
    prompts = prompts_of(family, 3)
    expected = [Sight(sight._causal, sight._record, is_resident=False, check=lambda *_: None).see(prompt)
                for prompt in prompts]  # fmt: skip
    sight.look_ahead(prompts[:2])
    assert sight.go_on()
    seen = [sight.see(prompt) for prompt in (prompts[2], *prompts[:2])]
    assert (sight.num_runs, sight.num_pictures) == (2, 6)
    for found, other in zip(seen, (expected[2], *expected[:2]), strict=True):
        assert torch.equal(found.embedded, other.embedded)
        assert all(map(torch.equal, found.deepstack, other.deepstack))


def test_a_known_picture_does_not_wait_for_those_that_pass_ahead(engine: Engine, family: Family) -> None:
    sight = sight_of(engine)
    known, new = prompts_of(family, 2)
    sight.see(known)
    sight.look_ahead([new])
    sight.go_on()
    sight.see(known)
    assert sight.num_runs == 1
    assert num_threads() > 0
    sight.rest()
    assert num_threads() == 0
    assert not sight.is_awake


def test_what_fails_ahead_is_tried_again_with_its_text(
    engine: Engine, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that fails once ends no text; nothing is looked at ahead until pictures have passed again."""
    sight, tries = sight_of(engine), 0
    sight._is_resident = False
    put = Tower._put

    def failing(self: Tower, record: Any) -> None:
        nonlocal tries
        if threading.current_thread().name == NAME and sight._ahead is not None:
            tries += 1
            raise OSError("the disk is away")
        put(self, record)

    monkeypatch.setattr(Tower, "_put", failing)
    prompts = prompts_of(family, 4)
    truths = [generated(family, prompt)[:12] for prompt in prompts]
    found = dict(engine.generate_many([engine.request(prompt, **GREEDY) for prompt in prompts]))
    assert [list(found[number].token_ids) for number in range(4)] == truths
    assert 1 <= tries <= 2 * torch.get_num_threads()
    assert num_threads() == 0


def test_an_interrupt_within_leaves_no_thread_and_no_weights(engine: Engine, family: Family) -> None:
    sight = sight_of(engine)
    sight.look_ahead(prompts_of(family, 1))
    assert sight.go_on()
    assert sight._ahead is not None
    for call in sight._ahead.under_way._everyone:
        call._error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        sight.go_on()
    assert num_threads() == 0
    assert sight._ahead is None
    assert sight.see(prompts_of(family, 1)[0]).embedded.isfinite().all()


def test_texts_that_left_while_their_pictures_passed_leave_nothing(engine: Engine, family: Family) -> None:
    prompts = prompts_of(family, 4)
    handles = [engine.submit(engine.request(prompt, **GREEDY)) for prompt in prompts]
    while sight_of(engine)._ahead is None and not all(handle.is_done for handle in handles[:2]):
        engine.advance()
    for handle in handles[2:]:
        handle.cancel()
    while not all(handle.is_done for handle in handles):
        engine.advance()
    engine.advance()
    assert num_threads() == 0
    assert not sight_of(engine).is_awake


def test_what_the_tower_said_for_texts_that_left_is_forgotten_while_others_wait(
    engine: Engine, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.model.sight.MOST_KEPT_BYTES", 0)
    sight, (left, waiting) = sight_of(engine), prompts_of(family, 2)
    sight.look_ahead([left, waiting])
    while sight.go_on():
        pass
    assert len(sight._kept) == 4
    sight.look_ahead([waiting])
    sight.see(waiting)
    assert not set(sight._kept) & set(sight._keys(left))
    assert sight.num_runs == 1


def test_nothing_is_looked_at_ahead_where_no_pass_waits(family: Family, tmp_path: Path) -> None:
    family.model.save_pretrained(tmp_path / "model")
    family.processor.tokenizer.save_pretrained(tmp_path / "model")
    with Engine.from_pretrained(
        tmp_path / "model", device="cpu", dtype="float32", context_tokens=256, self_check=False
    ) as engine:
        sight_of(engine).look_ahead(prompts_of(family, 1))
        assert sight_of(engine)._ahead is None


def test_calls_that_have_the_turn_at_once_leave_the_threads_of_torch_as_they_were() -> None:
    of_calls: list[int] = []
    rounds = LayerRounds()

    def call(number: int) -> int:
        of_calls.append(torch.get_num_threads())
        for _ in range(3):
            rounds.arrive()
        return number

    calls = [lambda number=number: call(number) for number in range(5)]
    under_way = rounds.begin(calls, device=torch.device("cpu"), at_once=2, num_threads=1)
    count = 0
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    with torch_threads(2):
        while under_way.go_on():
            count += 1
        under_way.leave()
        assert torch.get_num_threads() == 2
        thread.start()
        thread.join()
    assert under_way.results == list(range(5))
    assert count == 3 * 4  # of five calls two, two and one a round; the last round brings them to their ends
    assert of_calls == [1] * 5
    assert later == [2]


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"], indirect=True)
def test_so_many_pictures_pass_a_block_at_once_as_the_plan_has_memory_for(
    engine: Engine, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    sight = sight_of(engine)
    of_picture = 0
    asked = sight._new_calls(prompts_of(family, 2))
    patch = family.model.config.vision_config.patch_size
    for call in asked.values():
        of_picture = max(of_picture, call.arguments["pixel_values"].numel() // (3 * patch**2))
    for rows, expected in ((2 * of_picture, 2), (2 * of_picture - 1, 1), (0, 1), (100 * of_picture, 4)):
        monkeypatch.setattr("edgespec.model.sight.PICTURE_ROWS", rows)
        sight.forget()
        with torch_threads(4):
            sight.look_ahead(prompts_of(family, 2))
            assert sight._ahead is not None
            assert sight._ahead.under_way._at_once == expected
        sight.rest()
