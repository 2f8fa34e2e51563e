"""A prompt cache's file that others change while a run uses it: texts are those without it, whatever is done to it."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.pair.pair import open_pair
from edgespec.prefix_cache.prompt_cache import PromptCache
from edgespec.prefix_cache.prompt_rows import PromptRows
from tests.support.families import FAMILIES, make_model, save_folder

SYSTEM = [(7 * number) % 250 for number in range(40)]
OTHER_SYSTEM = [(11 * number + 3) % 250 for number in range(40)]
PROMPTS = [[*SYSTEM, 3, 4, 5], [*SYSTEM, 9, 8], [*OTHER_SYSTEM, 3, 4]]


def open_engine(target: Path, draft: Path) -> Engine:
    return Engine.from_pair(open_pair(target, draft), tree=TreeSettings(size=9), context_tokens=64)


def open_cache(engine: Engine, path: Path, wanted: list[int] | None = None) -> PromptCache:
    cache = PromptCache(path, engine.pair, engine.run_config)
    if wanted is not None:
        cache.keep_beginning([[*wanted, 0]])
    engine.prefix_cache.prompt_cache = cache
    return cache


def text(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    """Drawn evenly enough for any other row to show."""
    return engine.generate(prompt, max_new_tokens=12, temperature=2.0, seed=5).token_ids


def num_read(engine: Engine, prompt: list[int]) -> int:
    totals: list[int] = []
    engine.generate(prompt, max_new_tokens=1, on_prefill=lambda _, total: totals.append(total))
    return totals[-1]


@dataclass(frozen=True, slots=True)
class Files:
    """An engine, and files of what prompts begin with."""

    engine: Engine
    own: Path
    other_tokens: Path
    other_model: Path  # of the same shapes, and the tokens of its own


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    root = tmp_path_factory.mktemp("files")
    model, other = (
        save_folder(root / f"m{seed}" / "llama", make_model(FAMILIES["llama"](), seed=seed)) for seed in (0, 9)
    )
    with open_engine(other, model) as engine:
        open_cache(engine, root / "other_model", SYSTEM)
        text(engine, PROMPTS[0])
    with open_engine(model, other) as engine:
        for name, tokens in (("own", SYSTEM), ("other_tokens", OTHER_SYSTEM)):
            open_cache(engine, root / name, tokens)
            text(engine, [*tokens, 1])
        yield Files(engine, root / "own", root / "other_tokens", root / "other_model")


@pytest.fixture
def expected(files: Files) -> list[tuple[int, ...]]:
    files.engine.prefix_cache.prompt_cache = None
    return [text(files.engine, prompt) for prompt in PROMPTS]


def replace_by(source: Path, path: Path) -> None:
    shutil.copy(source, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def write_over(source: Path, path: Path) -> None:
    content = source.read_bytes()
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    with path.open("r+b") as file:
        file.write(content)


CHANGES: dict[str, tuple[Callable[[Files, Path], object], str]] = {
    "replaced by other tokens'": (lambda files, path: replace_by(files.other_tokens, path), ""),
    "written over with other tokens'": (lambda files, path: write_over(files.other_tokens, path), ""),
    "replaced by another model's": (lambda files, path: replace_by(files.other_model, path), "is of 'llama'"),
    "written over with another model's": (lambda files, path: write_over(files.other_model, path), "is of 'llama'"),
    "other rows under its header": (lambda _, path: damage(path), "is damaged"),
    "cut": (lambda _, path: os.truncate(path, path.stat().st_size - 100), "is cut"),
    "cut in its header": (lambda _, path: os.truncate(path, 50), "has no header"),
    "empty": (lambda _, path: os.truncate(path, 0), "has no header"),
    "removed": (lambda _, path: path.unlink(), "is gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_texts_are_those_without_it(
    change: str, files: Files, expected: list[tuple[int, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, path = files.engine, shutil.copy(files.own, tmp_path / "prompt")
    apply, warning = CHANGES[change]
    open_cache(engine, path, SYSTEM)
    assert text(engine, PROMPTS[0]) == expected[0]
    assert num_read(engine, PROMPTS[0]) == 3
    apply(files, path)
    left = path.read_bytes() if path.exists() else None
    assert [text(engine, prompt) for prompt in PROMPTS] == expected
    if warning:
        (record,) = caplog.records
        assert warning in record.message
        assert num_read(engine, PROMPTS[0]) == 43, "it is used no more"
        assert (path.read_bytes() if path.exists() else None) == left, "and stays as it is"
    else:
        assert caplog.records == []
        assert num_read(engine, PROMPTS[0]) == 3, "the run has put its own in the place of the other's"


@pytest.mark.parametrize("change", ["replaced by other tokens'", "written over with other tokens'", "cut", "removed"])
def test_a_change_while_rows_are_read_leaves_no_rows_of_two_files(
    change: str, files: Files, expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copy(files.own, tmp_path / "prompt")
    open_cache(files.engine, path)
    first, num_firsts = PromptRows.first, 0

    def changed(self: PromptRows, name: str, count: int | None = None) -> torch.Tensor:
        nonlocal num_firsts
        num_firsts += 1
        if num_firsts == 3:
            CHANGES[change][0](files, path)
        return first(self, name, count)

    monkeypatch.setattr(PromptRows, "first", changed)
    assert [text(files.engine, prompt) for prompt in PROMPTS] == expected
    assert num_firsts >= 3


def test_runs_that_need_other_beginnings_share_a_file_and_each_writes_once(
    files: Files, expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path = files.engine, tmp_path / "prompt"
    writes: list[PromptCache] = []
    write = PromptCache.write
    monkeypatch.setattr(PromptCache, "write", lambda self, rows: (writes.append(self), write(self, rows))[1])
    caches = [open_cache(engine, path, SYSTEM), open_cache(engine, path, OTHER_SYSTEM)]
    for number in (0, 2, 0, 1, 2, 1):
        engine.prefix_cache.prompt_cache = caches[number == 2]
        assert text(engine, PROMPTS[number]) == expected[number]
    assert writes == caches


def test_a_file_that_comes_in_a_run_is_used_and_another_models_stays_as_it_is(
    files: Files, expected: list[tuple[int, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "prompt"
    open_cache(files.engine, path)
    assert text(files.engine, PROMPTS[0]) == expected[0]
    shutil.copy(files.own, path)
    assert num_read(files.engine, PROMPTS[0]) == 3
    path.unlink()
    open_cache(files.engine, path, SYSTEM)
    shutil.copy(files.other_model, path)
    assert [text(files.engine, prompt) for prompt in PROMPTS] == expected
    assert path.read_bytes() == files.other_model.read_bytes()
    assert len(caplog.records) == 1
