"""Who waits for a long prompt: it is read in parts that others share, and a pass goes on without those who left."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.text.handle import TextHandle
from edgespec.text.request import TextRequest
from edgespec.tuning.prompt_parts import PromptParts
from tests.support.families import BY_LEVELS, FAMILIES, RECURRENT, make_model, save_folder

ALL = FAMILIES | RECURRENT
KINDS = ["llama", "gemma3", "qwen3.5", "mamba", next(iter(BY_LEVELS))]
UNIT = 8  # tokens of a part
LONG = [7 * number % 250 for number in range(90)]
OTHER = [11 * number % 250 for number in range(70)]
SHORT = [1, 2, 3]
TREE = TreeSettings(policy="chain", draft_tokens=3, lookup=False)


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[Engine]:
    given = {"context_tokens": 256, "parallel": 4, "dtype": "float32", "tree": TREE, "draft": folder, **options}
    with Engine.from_pretrained(folder, self_check=False, draft_check=False, **given) as engine:
        engine.target_model._chunk_rows = engine.target_model.layer_rows = UNIT
        yield engine


def asked(engine: Engine, prompt: list[int], **options: Any) -> TextRequest:
    return engine.request(prompt, **{"max_new_tokens": 12, "seed": 3, "ignore_eos": True, **options})


def read_in(monkeypatch: pytest.MonkeyPatch, rows: int | None) -> None:
    monkeypatch.setattr(PromptParts, "num_rows", lambda _self, _unit, *, is_shared: rows)


def drain(engine: Engine, *handles: TextHandle) -> list[tuple[int, ...]]:
    return [handle.result().token_ids for handle in handles]


@pytest.mark.parametrize("family", KINDS)
def test_parts_that_others_share_change_no_text(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(save_folder(tmp_path, make_model(ALL[family]()))) as engine:
        requests = [asked(engine, prompt) for prompt in (LONG, SHORT, OTHER, LONG)]  # the last as a sample of the first
        expected = [
            engine.generate(request.ids, max_new_tokens=12, seed=3, ignore_eos=True).token_ids for request in requests
        ]
        for rows in (UNIT, 3 * UNIT):
            read_in(monkeypatch, rows)
            assert drain(engine, *(engine.submit(request) for request in requests)) == expected
        assert engine.generate([*LONG[:60], *OTHER], max_new_tokens=1, reuse=True).prompt_tokens == 60 + len(OTHER)
        again = engine.generate(
            LONG, max_new_tokens=12, seed=3, ignore_eos=True, reuse=True
        )  # on rows, where there are
        assert again.token_ids == expected[0]


def test_a_short_prompt_has_its_token_while_a_long_one_is_read(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in(monkeypatch, UNIT)
    with opened(pair_folders[0]) as engine:
        long, other = engine.submit(asked(engine, LONG)), engine.submit(asked(engine, OTHER))
        engine.advance()
        short = engine.submit(asked(engine, SHORT, max_new_tokens=2))
        num_read = long.sequence.target.num_read if long.sequence else 0
        engine.advance()
        assert len(short.added) == 1
        assert long.sequence.target.num_read == num_read, "its pass is a short one"
        engine.advance()
        assert short.is_done
        assert long.sequence.target.num_read == num_read + UNIT, "and the next one has a part again"
        assert not long.added
        assert not other.added
        while not other.added:  # which has less to read, and does not keep the one that came first from its parts
            engine.advance()
        assert len(long.caches.target.ids if long.caches else []) >= UNIT * 4
        drain(engine, long, other)


@pytest.mark.parametrize(("family", "rows"), [*((family, 3 * UNIT) for family in KINDS), ("llama", None)])
def test_a_pass_goes_on_without_a_client_that_left(
    family: str, rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves within a layer, between two chunks: others' texts are theirs, and what was read whole is kept."""
    read_in(monkeypatch, rows)
    folder = save_folder(tmp_path, make_model(ALL[family]()))
    with opened(folder, limits=MemoryLimits(max_resident_layers=0)) as engine:
        requests = [asked(engine, prompt) for prompt in (OTHER, LONG, SHORT)]
        expected = drain(engine, *(engine.submit(request, keeps=False) for request in requests))
        seen: list[int] = []
        left = engine.submit(requests[1], reuse=True, on_prefill=lambda read, _all: leave(read))

        def leave(read: int) -> None:
            seen.append(read)
            if read > 30:
                left.cancel(leaves=True)

        stays = [engine.submit(requests[0], reuse=True), engine.submit(requests[2], reuse=True)]
        assert drain(engine, *stays) == [expected[0], expected[2]]
        assert left.result().finish_reason == "interrupted"
        assert left.whole().token_ids == ()
        assert max(seen) < len(LONG)
        kept = engine.generate(LONG, max_new_tokens=12, seed=3, ignore_eos=True, reuse=True)
        assert kept.token_ids == expected[1]
        if rows is not None and family == "llama":
            assert kept.cached_tokens >= 3 * UNIT
            assert kept.cached_tokens % UNIT == 0


@pytest.mark.parametrize("leaves", [False, True])
def test_a_pass_ends_where_nobody_is_left_in_it(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """Also where texts are only cancelled, as by the first signal: rows of prompts bring them nothing."""
    read_in(monkeypatch, None)
    with opened(pair_folders[0], parallel=2) as engine:
        heard: list[int] = []

        def leave(read: int, _all: int) -> None:
            heard.append(read)
            for handle in handles:
                handle.cancel(leaves=leaves)

        looks: list[int] = []
        act_between_layers(monkeypatch, engine, lambda: looks.append(len(heard)))
        handles = [engine.submit(asked(engine, LONG), on_prefill=leave), engine.submit(asked(engine, OTHER))]
        engine.advance()
        assert looks == [0, 1], "the next look is the last one"
        found = drain(engine, *[engine.submit(asked(engine, SHORT)) for _ in range(4)])
        assert len(heard) == 1
        assert [handle.whole().finish_reason for handle in handles] == ["interrupted"] * 2
        assert found == [engine.generate(SHORT, max_new_tokens=12, seed=3, ignore_eos=True).token_ids] * 4


def test_a_text_that_writes_gets_the_tokens_of_its_pass_unless_its_client_left(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(pair_folders[0]) as engine:
        for leaves in (False, True):
            handle = engine.submit(asked(engine, SHORT, max_new_tokens=40))
            engine.advance()
            act_between_layers(monkeypatch, engine, lambda handle=handle, leaves=leaves: handle.cancel(leaves=leaves))
            before = len(handle.added)
            engine.advance()
            monkeypatch.undo()
            assert handle.is_done
            assert (len(handle.added) > before) is not leaves


def act_between_layers(monkeypatch: pytest.MonkeyPatch, engine: Engine, act: Callable[[], None]) -> None:
    """Have something happen within each pass of the target, before the look between its layers."""
    layer_major = engine.target_model._layer_major
    rows = layer_major.rows

    def watched(chunks: Any, watch: Callable[[float], None]) -> Any:
        def first(share: float) -> None:
            act()
            watch(share)

        return rows(chunks, first)

    monkeypatch.setattr(layer_major, "rows", watched)


def test_samples_go_on_where_the_one_that_read_their_prompt_left(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in(monkeypatch, UNIT)
    with opened(pair_folders[0]) as engine:
        requests = [dataclasses.replace(asked(engine, LONG), name=str(number)) for number in range(3)]
        expected = drain(engine, *(engine.submit(request, keeps=False) for request in requests))
        first, *others = [engine.submit(request, reuse=True) for request in requests]
        for _ in range(3):
            engine.advance()
        first.cancel(leaves=True)
        assert drain(engine, *others) == expected[1:]
        assert others[0].whole().cached_tokens >= 2 * UNIT  # what the first had read is kept


def test_threads_that_share_an_engine_leave_it_in_order(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in(monkeypatch, UNIT)
    with opened(pair_folders[0]) as engine:
        request = asked(engine, OTHER)
        (expected,) = drain(engine, engine.submit(request, keeps=False))
        handles = [engine.submit(request, reuse=True) for _ in range(8)]
        threads = [threading.Thread(target=handle.result) for handle in handles]
        for thread in threads:
            thread.start()
        for handle in handles[::2]:
            handle.cancel(leaves=True)
        for thread in threads:
            thread.join(20)
        assert [handle.result().token_ids for handle in handles[1::2]] == [expected] * 4
