"""The tables of scripts/papers/run.py: what contexts note becomes means, and a draft call has its price."""

import re

import pytest
import torch

from edgespec.config import SamplingSettings
from edgespec.grow.classifier import DEFAULT_FILE, default_classifier
from edgespec.tree.settings import TreeSettings
from scripts.papers.compare_c2t import CONFIDENCES, EAGLE2, c2t, compared, nodes_at, points_by_score
from scripts.papers.compare_policies import Bench
from scripts.papers.fit_classifiers import blind_to
from scripts.papers.run import MODULES, TABLES
from scripts.papers.tables.c2t import CONFIDENCES as CHAIN_CONFIDENCES
from scripts.papers.tables.c2t import LENGTHS, LONGEST, RULES, c2t_tree, chain_points, ends, show_chains
from scripts.papers.tables.paper_table import Context, in_bins, in_words, shares
from scripts.papers.tables.speeds import COSTS, show_gain, show_speeds

GREEDY = SamplingSettings()
DRAFTED_AT = EAGLE2.draft_sampling(GREEDY).temperature  # as the classifier's records were


def test_every_table_has_a_name_of_its_own() -> None:
    assert len(TABLES) == sum(len(module.TABLES) for module in MODULES)


def test_bins_hold_weighted_sums() -> None:
    where, what = torch.tensor([0.05, 0.09, 0.95, 1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    sums = in_bins(where, what, torch.tensor([3.0, 1.0, 1.0, 1.0]))
    assert sums[0].tolist() == [3.0, 4.0]
    assert sums[9].tolist() == [2.0, 2.0]
    assert shares([sums, sums])[:2] == ["0.750 (0.750 to 0.750)", "-"]


def test_intervals_are_of_contexts() -> None:
    assert in_words([2.0] * 9) == "2.00 (2.00 to 2.00)"
    mean, low, high = map(float, re.findall(r"[\d.]+", in_words([1.0, 3.0] * 50)))
    assert mean == 2.0
    assert 1.7 < low < 1.9
    assert 2.1 < high < 2.3


def test_speeds_count_a_pass_and_its_draft_calls() -> None:
    found = [[(2.0, 1.0), (3.0, 5.0)]] * 4  # two tokens a pass from one layer, three from five
    short, long = show_speeds("tree", ["short", "long"], found)[2:]
    for column, cost in enumerate(COSTS):
        first, second = (row.split("|")[4 + column].strip() for row in (short, long))
        assert first.strip("*").startswith(f"{2 / (1 + cost):.2f}")
        assert second.strip("*").startswith(f"{3 / (1 + 5 * cost):.2f}")
        assert first.startswith("**") == (2 / (1 + cost) >= 3 / (1 + 5 * cost))
    assert "1.391 (1.391 to 1.391) at mu 0.02" in show_gain("long over short", [1], [0], found)


@pytest.fixture(scope="module")
def context() -> Context:
    bench = Bench(None, None, 0)
    bench.start(bench.engine.encode("import os\n\ndef read_lines(path):\n    with open(path) as file:\n        "))
    return Context(bench=bench, number=0, seed=0)


def test_one_chain_tells_where_the_classifier_ends_chains_of_the_library(context: Context) -> None:
    points = chain_points(context)[RULES.index("C2T") + 1]
    lengths = []
    for confidence in CHAIN_CONFIDENCES[::6]:
        settings = TreeSettings(policy="chain", draft_tokens=LONGEST, draw="chosen", classifier=DEFAULT_FILE,
                                confidence=confidence, draft_temperature=DRAFTED_AT)  # fmt: skip
        tree = context.grow(settings, GREEDY)
        lengths.append([1.0 + context.num_accepted(tree, GREEDY), tree.num_nodes - 1.0])
    assert points[::6].tolist() == lengths
    assert len({nodes for _, nodes in lengths}) > 2


def test_chains_end_behind_the_first_token_that_falls_short() -> None:
    assert ends(torch.tensor([[0.9, 0.3, 0.9]]))[0, :: len(CHAIN_CONFIDENCES) - 1].tolist() == [4, 1]
    assert ends(torch.tensor([[0.9, 0.3, 0.9]]))[0, CHAIN_CONFIDENCES.index(0.5)] == 2


def test_one_tree_of_c2t_is_those_of_all_confidences(context: Context) -> None:
    smallest = context.grow(c2t(DEFAULT_FILE, confidence=min(CONFIDENCES)), GREEDY)
    points = points_by_score(smallest, context.path(smallest, GREEDY))
    for confidence in (0.8, 0.5, 0.3):
        tree = context.grow(c2t(DEFAULT_FILE, confidence=confidence), GREEDY)
        alone = [1.0 + context.num_accepted(tree, GREEDY), tree.num_nodes - 1.0]
        assert points[CONFIDENCES.index(confidence)].tolist() == alone


def test_the_tables_tree_is_the_librarys(context: Context) -> None:
    ours, librarys = c2t_tree(context, beta=0.5), context.grow(c2t(DEFAULT_FILE, confidence=0.5), GREEDY)
    assert ours.tokens.tolist() == librarys.tokens.tolist()
    assert c2t_tree(context, beta=0.2, width=20).num_nodes > c2t_tree(context, beta=0.2).num_nodes
    assert c2t_tree(context, beta=0.5, count=2).num_nodes != ours.num_nodes


def test_nodes_are_read_off_between_points_and_not_beyond() -> None:
    curve = torch.tensor([[2.0, 10.0], [4.0, 30.0]])
    assert nodes_at([2.0, 3.0], curve).tolist() == [10.0, 20.0]
    assert nodes_at([1.0, 5.0], curve).isnan().all()


def test_classifiers_are_compared_at_equal_length() -> None:
    eagle2 = torch.tensor([[[1.0, 0.0], [5.0, 40.0]]]).double().expand(9, 2, 2)
    half = eagle2 * torch.tensor([1.0, 0.5])
    row = compared(["EAGLE-2", "half", "all"], [eagle2, half, eagle2])[3]
    assert row.split(" | ")[-2:] == ["1.00 (1.00 to 1.00)", "2.00 (2.00 to 2.00) |"]


def test_a_blind_classifier_does_not_read_the_feature() -> None:
    asked = {"path_probability": torch.tensor([[0.3, 0.1]]), "entropy": torch.tensor([1.0]), "depth": 2}
    classifier = default_classifier()
    blind = blind_to(classifier, "entropy")
    other = {**asked, "entropy": torch.tensor([4.0])}
    assert torch.equal(blind.confidence(**asked), blind.confidence(**other))
    assert not torch.equal(classifier.confidence(**asked), classifier.confidence(**other))
    assert not torch.equal(blind.confidence(**asked), blind.confidence(**{**asked, "depth": 5}))


def test_chains_are_compared_at_the_lengths_that_fixed_ones_have() -> None:
    """DyMax needs as many nodes as the fixed chains, the others half."""
    fixed = torch.tensor([[1.0 + length, length] for length in (*LENGTHS, *[9.0] * (len(CHAIN_CONFIDENCES) - 8))])
    points = torch.stack([fixed, fixed, *[fixed * torch.tensor([1.0, 0.5])] * 2]).double()
    row = show_chains([points] * 9)[2]
    assert row == "| 2 | 3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) |" + " 1.00 (1.00 to 1.00) |" * 3
