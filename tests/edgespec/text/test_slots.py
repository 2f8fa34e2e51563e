"""Rows of several conversations: which are kept in memory, and how they survive a restart in files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine
from edgespec.errors import EdgespecError
from edgespec.text.slots import Slots
from tests.conftest import RECURRENT, make_model, save_folder

SYSTEM = "def total(values):\n    found = 0\n    for value in values:\n        found += value\n    return found\n\n"
NAMES = ("first", "second", "third")
TURNS = [f"{SYSTEM}class {name}:\n    def {name}(self, {name}s):\n" * 3 for name in NAMES]


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with open_engine() as engine:
        yield engine


def open_engine(**options: Any) -> Engine:
    return Engine.from_pretrained(**{"parallel": 1, "context_tokens": 2048, **options})


def turn(engine: Engine, prompt: str | list[int]) -> tuple[list[int], int, int]:
    """All ids after a turn, how many of its prompt were read, and how many were kept."""
    ids = engine.encode(prompt)
    found = engine.generate(ids, reuse=True, max_new_tokens=12, seed=3, temperature=0.7)
    return [*ids, *found.token_ids], len(ids) - found.usage.cached_tokens, found.usage.cached_tokens


def test_conversations_that_begin_alike_take_nothing_from_each_other(engine: Engine) -> None:
    after = [turn(engine, prompt)[0] for prompt in TURNS]
    for ids in after:
        expected = engine.request(ids, max_new_tokens=12, seed=3, temperature=0.7)
        found, num_read, _ = turn(engine, ids)
        assert num_read <= 1, "a turn that adds nothing reads the last token"
        assert list(engine.submit(expected, keeps=False).result().token_ids) == found[len(ids) :]


def test_what_two_conversations_begin_with_is_copied(engine: Engine) -> None:
    turn(engine, TURNS[0])
    shared = len(engine.encode(SYSTEM)) - 2
    assert turn(engine, TURNS[1])[2] >= shared


def test_the_least_recently_used_goes_first_where_memory_ends() -> None:
    with open_engine(context_tokens=640) as engine:  # each has over 100 tokens, and those beyond the first 128 more
        one, two = (turn(engine, prompt)[0] for prompt in TURNS[:2])
        one = turn(engine, one)[0]
        turn(engine, TURNS[2])
        assert turn(engine, one)[1] <= 1
        assert turn(engine, two)[1] > 1


def store(engine: Engine, folder: Path, **options: Any) -> Slots:
    slots = Slots(folder, engine.pair, engine.run_config, **options)
    engine.use_slots(slots)
    return slots


def test_after_a_restart_a_turn_reads_what_is_new_and_says_the_same(tmp_path: Path, dtype: str) -> None:
    with open_engine(dtype=dtype) as engine:
        store(engine, tmp_path)
        after = [turn(engine, prompt)[0] for prompt in TURNS]
        assert engine.store_kept() == 3
        assert engine.store_kept() == 0
        expected = [turn(engine, [*ids, 7, 8])[0] for ids in after]
    with open_engine(dtype=dtype) as engine:
        slots = store(engine, tmp_path)
        assert (slots.num_files, slots.not_used) == (3, [])
        for ids, said in zip(after, expected, strict=True):
            found, num_read, _ = turn(engine, [*ids, 7, 8])
            assert (found, num_read) == (said, 3), "the last token that was drawn, and what is new"
        engine.store_kept()
        assert slots.num_files == 3, "a conversation that goes on replaces its file"


def test_files_are_bounded_and_those_of_another_model_or_broken_are_named(tmp_path: Path) -> None:
    with open_engine() as engine:
        slots = store(engine, tmp_path)
        turn(engine, TURNS[0])
        engine.store_kept()
        one = slots.num_bytes
    with open_engine() as engine:
        slots = store(engine, tmp_path, max_bytes=int(2.5 * one))
        for prompt in TURNS:
            turn(engine, prompt)
        engine.store_kept()
        assert slots.num_files == 2
        assert slots.num_bytes <= 2.5 * one
    (broken, _) = sorted(tmp_path.iterdir())
    content = broken.read_bytes()
    broken.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with open_engine(dtype="bfloat16") as engine:
        slots = store(engine, tmp_path)
        assert slots.num_files == 0
        assert [("dtype=float32" in what) for what in slots.not_used] == [True, True]
    with open_engine() as engine:
        slots = store(engine, tmp_path)
        assert slots.num_files == 1
        assert "is damaged" in slots.not_used[0]
        assert str(broken) in slots.not_used[0]
        turn(engine, TURNS[0])


def test_a_file_that_is_broken_while_it_is_known_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_engine() as engine:
        store(engine, tmp_path)
        after, _, _ = turn(engine, TURNS[0])
        engine.store_kept()
        engine.forget()
        (file,) = tmp_path.iterdir()
        file.write_bytes(b"no rows")
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert turn(engine, after)[1] > 0
                engine.forget()
    assert len(caplog.records) == 1
    assert str(file) in caplog.text


def test_models_with_states_have_none(tmp_path: Path) -> None:
    target = save_folder(tmp_path / "target", make_model(RECURRENT["qwen3-next"]()))
    with Engine.from_pretrained(target, context_tokens=64) as engine:
        with pytest.raises(EdgespecError, match="recurrent layers") as caught:
            Slots(tmp_path / "slots", engine.pair, engine.run_config)
        assert "slots_dir" in caught.value.fix
