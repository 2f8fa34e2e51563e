"""Every policy with every rule it may use is lossless; what is not, is caught.

One sampling setting a form here, 4,000 texts; scripts/check_lossless.py runs all of them with 20,000. A right
policy fails with probability 1e-4 (the seeds are fixed); the planted faults fall below 1e-6.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec.config import SamplingSettings
from edgespec.grow import best_first
from edgespec.grow.policies import open_policy
from edgespec.sampling import draw_without_replacement
from edgespec.tree_settings import POLICIES, TreeSettings
from edgespec.verify import rejection
from scripts.check_lossless import SAMPLINGS, TableDrafter, is_greedy, p_value, total_variation, tree_settings

TEXTS = 4_000
with tempfile.TemporaryDirectory() as _folder:
    FORMS = list(tree_settings(Path(_folder)))
PLAIN = SamplingSettings(temperature=1.0)
DYSPEC = TreeSettings(policy="dyspec", size=6, depth=3)


def test_every_policy_has_a_form() -> None:
    assert {name.split()[0] for name in FORMS} == {*POLICIES} - {"none"}


@pytest.mark.parametrize(("index", "form"), list(enumerate(FORMS)), ids=FORMS)
def test_texts_have_the_targets_distribution(index: int, form: str, tmp_path: Path) -> None:
    sampling = list(SAMPLINGS.values())[index % len(SAMPLINGS)]
    assert p_value(open_policy(tree_settings(tmp_path)[form]), sampling, count=TEXTS) > 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_greedy_texts_are_the_targets_token_by_token(form: str, tmp_path: Path) -> None:
    assert is_greedy(open_policy(tree_settings(tmp_path)[form]), count=20)


@pytest.mark.parametrize("settings", [DYSPEC, TreeSettings(policy="adaptive", draw="sampled", size=6, depth=3)])
def test_pruning_by_a_nodes_own_token_is_caught(settings: TreeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    right = best_first._slot_values

    def by_value(*arguments: Any) -> tuple[Tensor, Tensor]:
        _, child_values = right(*arguments)
        return child_values, child_values

    monkeypatch.setattr(best_first, "_slot_values", by_value)
    assert p_value(open_policy(settings), PLAIN, count=TEXTS) < 1e-6


def test_verifying_with_q_before_its_truncation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection._try_children

    def untruncated(p: Tensor, q: Tensor | None, *arguments: Any) -> tuple[int | None, Tensor]:
        return right(p, None if q is None else (q + 0.1) / (q + 0.1).sum(), *arguments)

    monkeypatch.setattr(rejection, "_try_children", untruncated)
    assert p_value(open_policy(DYSPEC), SamplingSettings(temperature=1.0, top_p=0.9), count=TEXTS) < 1e-6


def test_noise_that_is_used_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, prefill = [0], TableDrafter.prefill

    def count_texts(self: TableDrafter, ids: Tensor, *, capacity: int) -> None:
        texts[0] += 1
        prefill(self, ids, capacity=capacity)

    def same_noise(q: Tensor, count: int, _generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return draw_without_replacement(q, count, torch.Generator().manual_seed(texts[0]))

    monkeypatch.setattr(TableDrafter, "prefill", count_texts)
    monkeypatch.setattr(best_first, "draw_without_replacement", same_noise)
    assert p_value(open_policy(DYSPEC), PLAIN, count=TEXTS) < 1e-6


def test_several_branches_of_the_target_are_lossy_and_one_is_not() -> None:
    assert total_variation(width=1, count=3_000) < 0.05
    assert total_variation(width=3, count=3_000) > 0.1
