"""Who waits for a draft that has a long text to read: it is read in parts, and other texts go on between them."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.decode import batch, draft_reading
from edgespec.model.pass_rows import PassRows
from edgespec.text.handle import TextHandle
from edgespec.tuning.prompt_parts import PromptParts
from tests.edgespec.draft.contract import open_engine
from tests.edgespec.draft.dflash_drafter import Drafter, write_drafter
from tests.edgespec.draft.eagle3_head import TARGET as BLOCKS_TARGET
from tests.edgespec.draft.mtp_target import write_target
from tests.support.families import FAMILIES, RECURRENT, make_model, save_folder

UNIT = 8  # tokens of a part
WHOLE = 1 << 12
LONG = [7 * number % 250 for number in range(90)]
OTHER = [11 * number % 250 for number in range(40)]
SHORT = [1, 2, 3]
TREES = {
    "adaptive": TreeSettings(size=6, lookup=False),
    "sampled": TreeSettings(policy="dyspec", size=5, lookup=False),
    "mcsd": TreeSettings(policy="mcsd", fork=(3, 3), target_width=2),
}
TREE = TREES["adaptive"]


def write_pair(folder: Path, kind: str) -> tuple[Path, Path | None]:
    """A target and a draft: the target again, its packed copy, a layer of its own, or one that guesses a block."""
    if kind == "block":
        target = save_folder(folder / "target", make_model(BLOCKS_TARGET))
        return target, write_drafter(folder / "drafter", Drafter())
    if kind == "mtp":
        return write_target(folder / "target", "qwen3_5_text", share=0.1)[0], Path("mtp")
    family, is_copy = kind.removeprefix("copy of "), kind.startswith("copy of ")
    target = save_folder(folder / "target", make_model({**FAMILIES, **RECURRENT}[family]()))
    return target, Path("self:nf4") if is_copy else target


@contextmanager
def opened(pair: tuple[Path, Path | None], tree: TreeSettings = TREE, **options: Any) -> Iterator[Engine]:
    with open_engine(*pair, tree=tree, **{"context_tokens": 256, "parallel": 4, **options}) as engine:
        assert engine.draft_model is not None
        for model in (engine.target_model, engine.draft_model):
            model._chunk_rows = model.layer_rows = UNIT
        yield engine


def read_in(monkeypatch: pytest.MonkeyPatch, rows: int, *, step_s: float = 1e-9) -> None:
    monkeypatch.setattr(PromptParts, "num_rows", lambda _self, _unit, *, is_shared: rows)
    monkeypatch.setattr(PromptParts, "by_itself_s", 0.0)
    monkeypatch.setattr(draft_reading, "SHARED_S", step_s)


def submitted(engine: Engine, prompt: list[int], **options: Any) -> TextHandle:
    given = {"max_new_tokens": 10, "seed": 3, "ignore_eos": True, "temperature": 0.0, **options}
    return engine.submit(engine.request(prompt, **given))


def hear_draft(monkeypatch: pytest.MonkeyPatch, engine: Engine, act: Callable[[], object] = lambda: None) -> list[int]:
    """Note the rows of each pass of the draft, and do something in each."""
    heard: list[int] = []
    read = engine.draft_model.read

    def hearing(parts: list[PassRows]) -> list[torch.Tensor]:
        heard.append(sum(part.count for part in parts))
        act()
        return read(parts)

    monkeypatch.setattr(engine.draft_model, "read", hearing)
    return heard


def trees_of(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    grown: list[list[int]] = []
    grow = batch.grow_batched

    def hearing(*arguments: Any) -> Any:
        found = grow(*arguments)
        grown.extend(tree.tokens.tolist() for tree in found if not isinstance(tree, Exception))
        return found

    monkeypatch.setattr(batch, "grow_batched", hearing)
    return grown


@pytest.mark.parametrize(
    ("kind", "tree", "dtype"),
    [
        (kind, tree, ("float32", "bfloat16")[(number + place) % 2])
        for number, kind in enumerate(["llama", "gemma3", "qwen3.5", "copy of llama", "block", "mtp"])
        for place, tree in enumerate(TREES)
    ],
)
def test_parts_change_no_text_and_no_tree(
    kind: str, tree: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temperature = 0.0 if tree == "adaptive" else 0.8
    grown = trees_of(monkeypatch)
    with opened(write_pair(tmp_path, kind), TREES[tree], dtype=dtype) as engine:
        heard = hear_draft(monkeypatch, engine)
        read_in(monkeypatch, WHOLE)
        whole = submitted(engine, LONG, temperature=temperature).result()
        expected, passes = list(grown), list(heard)
        for rows in (UNIT, 3 * UNIT):
            del heard[:], grown[:]
            read_in(monkeypatch, rows)
            found = submitted(engine, LONG, temperature=temperature).result()
            assert found.token_ids == whole.token_ids
            assert [step.path for step in found.steps] == [step.path for step in whole.steps]
            assert grown == expected
            assert max(passes) >= len(LONG) - 1
            assert max(heard) <= rows + 1  # the root
            assert sum(heard) == sum(passes), "no row is read twice"


def test_others_go_on_between_the_parts_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(write_pair(tmp_path, "llama")) as engine:
        read_in(monkeypatch, WHOLE)
        expected = [submitted(engine, prompt, max_new_tokens=60).result() for prompt in (SHORT, LONG, OTHER)]
        read_in(monkeypatch, 2 * UNIT)
        short = submitted(engine, SHORT, max_new_tokens=60)
        engine.advance()
        handles = [short, submitted(engine, LONG, max_new_tokens=60), submitted(engine, OTHER, max_new_tokens=60)]
        while not all(handle.added for handle in handles):
            engine.advance()
        heard, had = hear_draft(monkeypatch, engine), []
        while len(handles[1].added) == 1:
            had.append(len(short.added))
            engine.advance()
        assert max(heard) <= 2 * UNIT + 3, "one part, and roots"
        assert len(had) > 4
        assert all(before < after for before, after in itertools.pairwise(had)), "it gained in every step"
        for handle, alone in zip(handles, expected, strict=True):
            assert handle.result().token_ids == alone.token_ids


def test_one_that_comes_meanwhile_has_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(write_pair(tmp_path, "llama")) as engine:
        read_in(monkeypatch, WHOLE)
        expected = submitted(engine, LONG).result()
        read_in(monkeypatch, UNIT)
        long = submitted(engine, LONG)
        while not long.added:
            engine.advance()
        heard = hear_draft(monkeypatch, engine)
        engine.advance()
        short = submitted(engine, SHORT)
        engine.advance()
        assert (heard, len(long.added), len(short.added)) == ([UNIT, UNIT], 1, 1)
        assert long.result().token_ids == expected.token_ids


@pytest.mark.parametrize("leaves", [False, True])
def test_a_draft_reads_no_further_for_a_text_that_ended(
    leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a step that has time for all parts; the others' texts are theirs, and what was read is kept."""
    with opened(write_pair(tmp_path, "llama")) as engine:
        read_in(monkeypatch, WHOLE)
        expected = [submitted(engine, prompt, max_new_tokens=60).result() for prompt in (SHORT, LONG)]
        read_in(monkeypatch, UNIT, step_s=100.0)
        for texts in ([LONG], [SHORT, LONG]):
            handles = [submitted(engine, prompt, max_new_tokens=60) for prompt in texts]
            while not handles[-1].added:
                engine.advance()
            with monkeypatch.context() as patched:
                heard = hear_draft(
                    patched,
                    engine,
                    lambda left=handles[-1]: len(heard) == 3 and left.cancel(leaves=leaves),  # noqa: B023
                )
                engine.advance()
                assert heard[:3] == [UNIT] * 3
                assert sum(heard[3:]) < UNIT * 3, "the trees of others"
            assert handles[-1].result().finish_reason == "interrupted"
            assert len(handles[-1].added) == 1
            for handle in handles[:-1]:
                assert handle.result().token_ids == expected[0].token_ids
        assert submitted(engine, LONG, max_new_tokens=60).result().token_ids == expected[1].token_ids


def test_a_text_that_needs_no_tree_has_its_draft_read_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_in(monkeypatch, UNIT)
    with opened(write_pair(tmp_path, "llama"), TreeSettings(policy="chain", draft_tokens=3, lookup=False)) as engine:
        heard = hear_draft(monkeypatch, engine)
        submitted(engine, LONG, max_new_tokens=2).result()
        assert heard == []
