"""Rows of several conversations: which are kept in memory, and how they survive a restart in files."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from edgespec import Engine, TreeSettings
from edgespec.errors import EdgespecError
from edgespec.prefix_cache import prompt_cache, slots
from edgespec.prefix_cache.slots import Slots
from tests.edgespec.model.reader import KINDS
from tests.support.families import FAMILIES, RECURRENT, SMALL, make_model, save_folder

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
    for ids in [turn(engine, prompt)[0] for prompt in TURNS]:
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


def test_the_files_that_were_written_longest_ago_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "_open", lambda _, path: SimpleNamespace(path=path))
    paths = [tmp_path / f"conversation-{name}.rows.safetensors" for name in "cabd"]
    for written_s, path in enumerate(paths, 1):
        path.write_bytes(bytes(100))
        os.utime(path, (written_s, written_s))
    nothing: Any = None
    stored = Slots(tmp_path, nothing, nothing, max_bytes=350)
    new: Any = SimpleNamespace(path=tmp_path / "conversation-new.rows.safetensors")
    stored._make_room(100, replaced=new)
    assert set(tmp_path.iterdir()) == set(paths[2:])
    assert stored.num_files == 2


def store(engine: Engine, folder: Path, **options: Any) -> Slots:
    stored = Slots(folder, engine.pair, engine.run_config, **options)
    engine.prefix_cache.slots = stored
    return stored


def test_after_a_restart_a_turn_reads_what_is_new_and_says_the_same(tmp_path: Path, dtype: str) -> None:
    with open_engine(dtype=dtype) as engine:
        store(engine, tmp_path)
        after = [turn(engine, prompt)[0] for prompt in TURNS]
        assert engine.prefix_cache.store() == 3
        assert engine.prefix_cache.store() == 0
        expected = [turn(engine, [*ids, 7, 8])[0] for ids in after]
    with open_engine(dtype=dtype) as engine:
        stored = store(engine, tmp_path)
        assert (stored.num_files, stored.not_used) == (3, [])
        for ids, said in zip(after, expected, strict=True):
            found, num_read, _ = turn(engine, [*ids, 7, 8])
            assert (found, num_read) == (said, 3), "the last token that was drawn, and what is new"
        engine.prefix_cache.store()
        assert stored.num_files == 3, "a conversation that goes on replaces its file"


def test_files_are_bounded_and_those_of_another_model_or_broken_are_named(tmp_path: Path) -> None:
    with open_engine() as engine:
        stored = store(engine, tmp_path)
        turn(engine, TURNS[0])
        engine.prefix_cache.store()
        one = stored.num_bytes
    with open_engine() as engine:
        stored = store(engine, tmp_path, max_bytes=int(2.5 * one))
        for prompt in TURNS:
            turn(engine, prompt)
        engine.prefix_cache.store()
        assert stored.num_files == 2
        assert stored.num_bytes <= 2.5 * one
    (broken, _) = sorted(tmp_path.iterdir())
    content = broken.read_bytes()
    broken.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with open_engine(dtype="bfloat16") as engine:
        stored = store(engine, tmp_path)
        assert stored.num_files == 0
        assert [("dtype=float32" in what) for what in stored.not_used] == [True, True]
    with open_engine() as engine:
        stored = store(engine, tmp_path)
        assert stored.num_files == 1
        assert "is damaged" in stored.not_used[0]
        assert str(broken) in stored.not_used[0]
        turn(engine, TURNS[0])


def test_a_file_that_is_broken_while_it_is_known_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_engine() as engine:
        store(engine, tmp_path)
        after, _, _ = turn(engine, TURNS[0])
        engine.prefix_cache.store()
        engine.forget()
        (file,) = tmp_path.iterdir()
        file.write_bytes(b"no rows")
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert turn(engine, after)[1] > 0
                engine.forget()
    assert len(caplog.records) == 1
    assert str(file) in caplog.text


def test_rows_of_another_model_with_the_same_tokens_are_not_taken(tmp_path: Path) -> None:
    one, other = (save_folder(tmp_path / str(seed), make_model(FAMILIES["llama"](), seed=seed)) for seed in (1, 2))
    prompt = list(range(64, 128))
    with open_engine(target=one, context_tokens=256) as engine:
        store(engine, tmp_path / "slots")
        turn(engine, prompt)
        assert engine.prefix_cache.store() == 1
    with open_engine(target=other, context_tokens=256) as engine:
        expected = engine.generate(prompt, max_new_tokens=12, seed=3, temperature=0.7)
        engine.forget()
        assert len(store(engine, tmp_path / "slots").not_used) == 1
        found, _, num_kept = turn(engine, prompt)
        assert (found[len(prompt) :], num_kept) == (list(expected.token_ids), 0)


@pytest.mark.parametrize("bound", ["folder", "memory"])
def test_a_text_that_is_larger_than_may_be_is_said_once_and_others_are_written(
    bound: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(tree=TreeSettings(policy="none")) as engine:  # a draft's rows depend on whether trees pay
        stored = store(engine, tmp_path)
        turn(engine, TURNS[0])
        engine.prefix_cache.store()
        size = stored.num_bytes
        turn(engine, TURNS[1])
        turn(engine, TURNS[2] * 3)
        if bound == "folder":
            stored.max_bytes = int(2.2 * size)
        else:
            monkeypatch.setattr(slots, "free_host_bytes", lambda: 3 * size)
        with caplog.at_level(logging.WARNING):
            assert engine.prefix_cache.store() == 1
            assert engine.prefix_cache.store() == 0
            turn(engine, TURNS[2] * 3)
            assert engine.prefix_cache.store() == 0
        assert stored.num_files == 2
    assert len(caplog.records) == 1
    assert "a conversation is not written" in caplog.text


def test_a_file_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine() as engine:
        stored = store(engine, tmp_path)
        after, _, _ = turn(engine, TURNS[0])
        engine.prefix_cache.store()
        (file,) = tmp_path.iterdir()
        content = file.read_bytes()

        def fail(_tensors: Any, path: Path, **_options: Any) -> None:
            path.write_bytes(b"a part")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
            broken.setattr(prompt_cache, "save_file", fail)
            after, _, _ = turn(engine, after)
            assert engine.prefix_cache.store() == 0
        assert list(tmp_path.iterdir()) == [file]
        assert file.read_bytes() == content
        assert "No space left on device" in caplog.text
        assert engine.prefix_cache.store() == 1
        assert stored.num_files == 1
        engine.forget()
        assert turn(engine, after)[1] <= 2


@pytest.mark.parametrize("family", KINDS[::2])
def test_states_reach_the_ends_of_turns_and_no_other_place(family: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", make_model(RECURRENT[family]()))
    models: dict[str, Any] = {"target": folder, "draft": folder, "context_tokens": 256}
    prompt = [number % 60 for number in range(100)]
    with open_engine(**models) as engine:
        store(engine, tmp_path / "slots")
        after, _, _ = turn(engine, prompt)
        assert engine.prefix_cache.store() == 1
        prompts = {"end": [*after, 7, 8], "prompt's end": [*prompt, 9, 10, 11], "middle": [*prompt[:50], 9, 10, 11]}
        expected = {}
        for place, ids in prompts.items():
            found = engine.generate(ids, max_new_tokens=12, seed=3, temperature=0.7)
            expected[place] = [*ids, *found.token_ids]
    for place, ids in prompts.items():
        with open_engine(**models) as engine:
            store(engine, tmp_path / "slots")
            found, _, num_kept = turn(engine, ids)
        assert found == expected[place], place
        assert num_kept == {"end": len(after) - 1, "prompt's end": len(prompt), "middle": 0}[place]


def test_a_model_whose_rows_depend_on_the_whole_text_has_no_folder(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = save_folder(tmp_path / "target", make_model(LlamaConfig(**SMALL, rope_parameters=rope)))
    with Engine.from_pretrained(target, context_tokens=64) as engine:
        with pytest.raises(EdgespecError, match="depend on the length") as caught:
            Slots(tmp_path / "slots", engine.pair, engine.run_config)
        assert "slots_dir" in caught.value.fix
