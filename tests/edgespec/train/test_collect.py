"""Collecting: prompts are continued as they would be, and every pass leaves records."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.errors import EdgespecError
from edgespec.grow.acceptance import NUM_CANDIDATES
from edgespec.pair.pair import open_pair
from edgespec.train import collect as collect_module
from edgespec.train.candidates import NUM_NOISES
from edgespec.train.collect import RecordRun, acceptance_settings, classifier_settings, collect, stop_settings
from edgespec.train.record_files import load_records
from edgespec.tree.token_tree import TokenTree
from edgespec.verify import Acceptance

TRUNCATED = SamplingSettings(top_p=0.9)
SEED = 5


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tree = TreeSettings(policy="opt-tree", size=16)
    with Engine.from_pair(open_pair(None, None), tree=tree, context_tokens=256, self_check=False) as made:
        yield made


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TokenTree, Acceptance]]:
    """The trees that were recorded, with what became of them."""
    found: list[tuple[TokenTree, Acceptance]] = []
    right = collect_module.path_records

    def remember(tree: TokenTree, p: Any, acceptance: Acceptance, **options: Any) -> Any:
        found.append((tree, acceptance))
        return right(tree, p, acceptance, **options)

    monkeypatch.setattr(collect_module, "path_records", remember)
    return found


def test_acceptance_is_learned_from_all_tokens_and_from_those_that_the_model_is_sampled_from() -> None:
    found = acceptance_settings(size=32, temperatures=[0.0, 0.6, 1.0], truncated=TRUNCATED)
    sampled = [(setting.sampling.temperature, setting.sampling.top_p) for setting in found]
    assert sampled == [(0.0, 1.0), (0.6, 1.0), (0.6, 0.9), (1.0, 1.0), (1.0, 0.9)]
    without = acceptance_settings(size=32, temperatures=[0.0, 0.6], truncated=SamplingSettings(temperature=0.7))
    assert [setting.sampling.temperature for setting in without] == [0.0, 0.6]


def test_acceptance_is_learned_from_drafts_as_adaptive_trees_have_them() -> None:
    for setting in acceptance_settings(size=32, temperatures=[0.0, 0.6, 1.0], truncated=TRUNCATED):
        assert setting.tree.draft_sampling(setting.sampling) == TreeSettings().draft_sampling(setting.sampling)
        assert not setting.tree.uses("acceptance"), "what is to be learned does not decide on what is seen"


def test_settings_of_a_temperature_are_told_apart_by_their_labels() -> None:
    """What was collected before an interruption is found by them."""
    temperatures = [0.6, 1.0]
    for found in (
        acceptance_settings(size=32, temperatures=temperatures, truncated=TRUNCATED),
        classifier_settings(temperatures=temperatures),
        stop_settings(temperatures=temperatures),
    ):
        assert len({(setting.label, setting.sampling.temperature) for setting in found}) == len(found)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_nodes_on_the_texts_way_are_recorded_and_the_text_is_plain_decodings(
    temperature: float, engine: Engine, tmp_path: Path, passes: list[tuple[TokenTree, Acceptance]]
) -> None:
    ids = engine.encode("def read_lines(path):\n    ")
    settings = acceptance_settings(size=16, temperatures=[temperature], truncated=SamplingSettings())
    collect(engine, [ids], tmp_path, settings, run=RecordRun(kind="acceptance", max_new_tokens=12, seed=SEED))
    columns, (header,) = load_records(tmp_path)

    on_path = [1 + int((tree.draft_rows[list(acceptance.path)] >= 0).sum()) for tree, acceptance in passes]
    assert columns["taken"].shape == (sum(on_path) * (NUM_NOISES if temperature else 1),)
    assert 0 <= int(columns["taken"].min()) <= int(columns["taken"].max()) <= NUM_CANDIDATES
    assert columns["depth"].min() == 1
    torch.testing.assert_close(columns["temperature"], torch.full_like(columns["temperature"], temperature))
    assert (header.draw, header.num_trees) == ("coupled", len(passes))
    lengths = [1 + len(acceptance.path) for _, acceptance in passes]
    assert header.tokens == pytest.approx(sum(lengths) / len(lengths))

    tokens = [int(passes[0][0].tokens[0])]
    for tree, acceptance in passes:
        tokens += [*tree.tokens[list(acceptance.path)].tolist(), acceptance.next_token]
    plain = engine.generate(
        ids, max_new_tokens=len(tokens), sampling=SamplingSettings(temperature=temperature), seed=SEED
    )
    assert tuple(tokens) == plain.token_ids


def test_without_a_draft_there_is_nothing_to_collect(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = stop_settings(temperatures=[1.0])
    with (
        Engine.from_pair(open_pair(pair_folders[0], None), context_tokens=64, self_check=False) as plain,
        pytest.raises(EdgespecError, match="no draft"),
    ):
        collect(plain, [[1, 2]], tmp_path, settings, run=RecordRun(kind="hidden", max_new_tokens=4, seed=0))
