"""Memory that runs out in a pass: the text goes on with smaller trees, and stays the text that it would have been."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import Engine, TreeSettings
from edgespec.errors import is_out_of_memory
from edgespec.model.pass_rows import PassRows
from edgespec.model.target import Target
from edgespec.pair.pair import open_pair
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.draft_worth import DraftWorth
from edgespec.tuning.settings import TuningSettings
from edgespec.tuning.tuner import Tuner

PROMPT = "def read(path):\n    return "
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 30}
# Whose draft grows in every step: beside looked up text, the clock may leave it out
TREE = TreeSettings(policy="adaptive", size=64, lookup=False)


def watch_trees(monkeypatch: pytest.MonkeyPatch, after_pass: Callable[[int], None]) -> None:
    """Have `after_pass` called with the nodes of the largest tree of each pass, when its rows are in the caches."""
    tree_rows, read, sizes = Target.tree_rows, Target.read, list[int]()

    def counted(self: Target, tree: TokenTree) -> PassRows:
        sizes.append(tree.num_nodes - 1)
        return tree_rows(self, tree)

    def watched(self: Target, parts: Sequence[PassRows]) -> list[torch.Tensor]:
        hidden = read(self, parts)
        if sizes:
            largest = max(sizes)
            sizes.clear()
            after_pass(largest)
        return hidden

    monkeypatch.setattr(Target, "tree_rows", counted)
    monkeypatch.setattr(Target, "read", watched)


def fail_above(monkeypatch: pytest.MonkeyPatch, most_nodes: int, *, after: int = 2) -> None:
    """Passes of larger trees run out of memory, behind the first few."""
    numbers = itertools.count(1)

    def limited(num_nodes: int) -> None:
        if next(numbers) > after and num_nodes > most_nodes:
            raise torch.OutOfMemoryError("no more")

    watch_trees(monkeypatch, limited)


@pytest.mark.parametrize(("most_nodes", "size"), [(20, 16), (8, 8), (0, 0)])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_text_goes_on_with_smaller_trees_and_stays_the_same(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, most_nodes: int, size: int, reuse: bool
) -> None:
    with Engine.from_pair(open_pair(*pair_folders), tree=TREE, context_tokens=128, self_check=False) as engine:
        expected = engine.generate(PROMPT, **OPTIONS).token_ids
        fail_above(monkeypatch, most_nodes)
        result = engine.generate(PROMPT, reuse=reuse, **OPTIONS)
        assert result.token_ids == expected
        assert engine.tree.num_nodes == size
        assert [step.is_prefill for step in result.steps].count(True) == 1
        assert engine.generate(PROMPT, reuse=reuse, **OPTIONS).token_ids == expected  # and the next one is whole


@pytest.mark.parametrize("policy", ["none", TREE.policy])
def test_a_text_that_a_stop_string_ended_takes_no_part_in_later_passes(
    pair_folders: tuple[Path, Path], policy: str
) -> None:
    tree = TREE if policy == TREE.policy else TreeSettings(policy=policy)
    with Engine.from_pair(
        open_pair(*pair_folders), tree=tree, context_tokens=128, self_check=False, parallel=2
    ) as engine:
        expected = engine.generate(PROMPT, **OPTIONS)
        assert len(engine.generate(PROMPT, **OPTIONS, stop=expected.text[4]).token_ids) < len(expected.token_ids) / 2
        again = engine.generate(PROMPT, reuse=True, **OPTIONS)  # on the rows that the stopped text has left
        assert {step.num_texts for step in again.steps} == {1}
        assert again.token_ids == expected.token_ids


@pytest.mark.parametrize(("most_nodes", "most"), [(9, 8), (0, 0)])
def test_trees_that_tune_themselves_stay_below_what_did_not_fit(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, most_nodes: int, most: int
) -> None:
    tuning = TuningSettings(min_change=1e9, hopeless=0.0, first_trees=10**6)  # trees go on, unlimited
    monkeypatch.setattr("edgespec.text.trees.Tuner", functools.partial(Tuner, tuning=tuning))
    monkeypatch.setattr(DraftWorth, "is_known", False)  # or the clock leaves out some
    monkeypatch.setattr("edgespec.text.trees.first_growth", lambda *_, **_options: None)  # or the first ones
    with Engine.from_pair(open_pair(*pair_folders), context_tokens=128, self_check=False) as engine:
        expected = engine.generate(PROMPT, **OPTIONS).token_ids
        assert (engine.is_tuned, engine.largest_tree.num_nodes) == (True, 256)
        fail_above(monkeypatch, most_nodes)
        for _ in range(2):
            assert engine.generate(PROMPT, **OPTIONS).token_ids == expected
        # Of two sizes the clock chooses: trees that have come to fit are no longer halved.
        assert most <= engine.largest_tree.num_nodes <= 2 * most


def test_memory_that_is_too_little_for_one_row_is_an_error(
    pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.from_pair(open_pair(*pair_folders), tree=TREE, context_tokens=128, self_check=False) as engine:
        fail_above(monkeypatch, -1)
        with pytest.raises(torch.OutOfMemoryError):
            engine.generate(PROMPT, **OPTIONS)


def test_another_failure_is_not_tried_again(pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def broken(num_nodes: int) -> None:
        passes.append(num_nodes)
        raise RuntimeError("broken")

    watch_trees(monkeypatch, broken)
    with (
        Engine.from_pair(open_pair(*pair_folders), tree=TREE, context_tokens=128, self_check=False) as engine,
        pytest.raises(RuntimeError, match="broken"),
    ):
        engine.generate(PROMPT, **OPTIONS)
    assert len(passes) == 1
    assert not is_out_of_memory(RuntimeError("broken"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory"),  # a kernel that is loaded, a graph
        RuntimeError("CUDA driver error: out of memory"),  # segments that grow
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_memory_that_ran_out_is_known_in_all_its_forms(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_lossy_trees_wait_for_the_texts_of_lossless_ones_and_these_for_theirs(pair_folders: tuple[Path, Path]) -> None:
    """Each text is the one that it is alone: the two kinds have loops of their own, and never the same passes."""
    lossy = TreeSettings(policy="mcsd", branching=(2, 2), target_width=2)
    pair = open_pair(*pair_folders)
    with Engine.from_pair(pair, tree=TREE, context_tokens=128, parallel=3, self_check=False) as engine:
        expected = []
        for tree in (TREE, lossy):
            engine.use_tree(tree)
            expected.append(engine.generate(PROMPT, **OPTIONS).token_ids)
        assert expected[0] != expected[1]
        for before, after in ((TREE, lossy), (lossy, TREE)):
            engine.use_tree(before)
            first = engine.submit(engine.request(PROMPT, **OPTIONS))
            assert engine.advance() == 1
            engine.use_tree(after)
            second = engine.submit(engine.request(PROMPT, **OPTIONS))
            while first.state != "done":
                assert (engine.advance(), second.state) == (first.state != "done", "waiting")
            found = {before: first.result().token_ids, after: second.result().token_ids}
            assert [found[tree] for tree in (TREE, lossy)] == expected


def test_a_text_waits_until_there_is_room_for_all_its_tokens(pair_folders: tuple[Path, Path]) -> None:
    with Engine.from_pair(
        open_pair(*pair_folders), tree=TREE, context_tokens=128, parallel=3, self_check=False
    ) as engine:
        texts = [engine.submit(engine.request(f"{number}{PROMPT}", **OPTIONS)) for number in range(3)]
        engine._texts._max_tokens = texts[0].num_tokens + texts[1].num_tokens
        assert engine.advance() == 2
        assert [text.state == "waiting" for text in texts] == [False, False, True]
        assert all(text.result().token_ids for text in texts)
