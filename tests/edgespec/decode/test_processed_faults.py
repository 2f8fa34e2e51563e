"""Planted faults of penalties and grammars: the texts of `test_processed_texts` notice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from edgespec.decode import accept
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.processors import LogitProcessors
from edgespec.tree.token_tree import TokenTree
from edgespec.verify.rows import TargetRows
from tests.edgespec.decode.test_processed_texts import (
    NUM_TOKENS,
    ToyMatcher,
    draw_of,
    fits,
    processed_session,
    reference,
    text_of,
    texts_together,
)
from tests.edgespec.grow.tables import VOCAB


def texts_one_by_one() -> tuple[list[list[int]], list[list[int]]]:
    """Texts alone, with trees, and what the definition says of each."""
    found, expected = [], []
    for number in range(24):
        tree, sampling, has_grammar = draw_of(number)
        prompt = [number % VOCAB, 3, number % 4]
        found.append(text_of(processed_session(tree, sampling, seed=number, has_grammar=has_grammar), prompt))
        expected.append(
            reference(number, sampling, prompt, seed=number, has_grammar=has_grammar, num_tokens=NUM_TOKENS)
        )
    return found, expected


def without_ancestors(processors: LogitProcessors, _tree: TokenTree) -> Callable[[Tensor, int], Tensor]:
    return lambda logits, _node: processors(logits)


def with_a_sibling(processors: LogitProcessors, tree: TokenTree) -> Callable[[Tensor, int], Tensor]:
    def process(logits: Tensor, node: int) -> Tensor:
        path: list[int] = []
        while node > 0:
            same = (tree.parents == tree.parents[node]).nonzero().flatten().tolist()
            path = [int(tree.tokens[same[0]]), *([int(tree.tokens[node])] if same[0] != node else []), *path]
            node = int(tree.parents[node])
        return processors(logits, path)

    return process


def counts_the_prompt(self: LogitProcessors, prompt: Sequence[int], new: Sequence[int]) -> None:
    counted, matcher = self._counts, self._matcher
    if self._seen is not None:
        self._seen[self._ids(prompt)] = True
    if counted is not None:
        self._counts = counted.index_add(0, self._ids(prompt), torch.ones(len(prompt), dtype=torch.long))
    self._matcher = matcher
    self.add(new)


def parents_state(self: ToyMatcher, path: Sequence[int]) -> Tensor:
    return fits([*self.new, *path[:-1]])


def penalised_behind_truncation(self: TargetRows, node: int) -> Tensor:
    p = to_probs(self._own_logits(node), self._sampling)
    return (p if self._process is None else self._process(p.log(), node).softmax(-1))[0]


def of_the_neighbour(processors: LogitProcessors, tree: TokenTree) -> Callable[[Tensor, int], Tensor]:
    """The first text's processors for all others."""
    neighbours.append(processors)
    return right_paths(neighbours[0], tree)


neighbours: list[LogitProcessors] = []
right_paths = accept.on_paths
FAULTS: dict[str, tuple[object, str, object]] = {
    "the path's ancestors are not counted": (accept, "on_paths", without_ancestors),
    "a sibling is counted": (accept, "on_paths", with_a_sibling),
    "presence and frequency count the prompt": (LogitProcessors, "begin", counts_the_prompt),
    "the mask is the parent's": (ToyMatcher, "allowed", parents_state),
    "penalties come behind truncation": (TargetRows, "probs", penalised_behind_truncation),
    "the neighbour's penalties": (accept, "on_paths", of_the_neighbour),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_these_texts_notice_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    neighbours.clear()
    owner, name, wrong = FAULTS[fault]
    run = (lambda: texts_together(24)) if "neighbour" in fault else texts_one_by_one
    found, expected = run()
    assert found == expected
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        found, expected = run()
    assert found != expected
