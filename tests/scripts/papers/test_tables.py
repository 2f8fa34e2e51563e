"""Tables of single papers: what they print follows from what their contexts have noted."""

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.papers.tables import dyspec, mcsd, opt_tree, sequoia, specinfer
from scripts.papers.tables.boosted_draft import tune
from scripts.papers.tables.speeds import COSTS


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of a table's rows, without its heading."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:] if line.startswith("|")]


def test_a_delta_that_follows_from_mu_is_held_against_none_and_the_best() -> None:
    """Three layers for 3 tokens; at a delta of 0.2, one for 2; thresholds from costs find the better one."""
    grid = [(2.0, 1.0) if gain == 0.2 else (3.0, 4.0) for gain in opt_tree.STOP_GAINS]
    of_costs = [(2.0, 1.0) if cost > 0.2 else (3.0, 4.0) for cost in COSTS]
    rows = rows_of(opt_tree.show_by_cost([[grid + of_costs] * 2] * 4))
    assert len(rows) == 2 * len(COSTS)
    for row, cost in zip(rows, COSTS, strict=False):
        few, many = 2 / (1 + cost), 3 / (1 + 4 * cost)
        followed = few if cost > 0.2 else many
        assert row[3].startswith(f"{followed:.2f}")
        assert row[4].startswith(f"{followed / many:.3f}")
        assert row[6].startswith(f"{followed / max(few, many):.3f}")


def test_trees_of_a_threshold_are_the_first_slots_of_the_largest() -> None:
    long, short = (
        torch.tensor([[0.5, 0.5], *([score, 0.01] for _ in range(count))]).double()
        for score, count in ((0.02, 300), (0.002, 300))
    )
    rows = {row[0]: row for row in rows_of(dyspec.show_thresholds([long, short] * 4))}
    assert rows["0.1"][1:4] == ["1.0 (1.0 to 1.0)", "1", "1"]
    assert rows["0.01"][2:4] == ["1", "301"]
    assert rows["0.01"][4].startswith("3.00"), "4.5 and 1.5"
    assert rows["0.01"][5] == "3.00 (3.00 to 3.00) of 151", "both have 150 of the small ones"
    assert rows["281 to 768"][1] == "4"
    assert rows["1 to 160"][1] == "4"


def test_decided_chains_are_held_against_the_same_ones_without_a_decision_model() -> None:
    names = list(mcsd._decided_trees(Path("stop.safetensors")))
    assert len(names) == len(mcsd.DECIDED_WIDTHS) * (1 + len(mcsd.CONFIDENCES))
    assert names[:2] == ["1 x 5", "1 x 5, decided at 0.4"]
    found = [[(0.5, (1.5, 1.0) if "decided at 0.6" in name else (2.0, 5.0)) for name in names]] * 3
    gains = [line for line in mcsd.show_decided(found) if "decided one over" in line]
    assert len(gains) == len(mcsd.DECIDED_WIDTHS)
    assert f"{1.5 / 1.5 / (2.0 / 3.5):.3f} (" in gains[0].split("mu 0.3")[1], "at mu 0.5"


def test_merged_trees_have_their_size_and_what_both_drafts_give_counts_once() -> None:
    first = [(1,), (1, 2), (3,), (1, 2, 4), (5,), (6,)]
    second = [(1,), (7,), (7, 8), (9,)]
    own, given = specinfer.merged(first, second, size=5, share=3)
    assert given == {(1,), (7,), (7, 8)}
    assert own == {(1,), (1, 2), (3,)}
    assert len(own | given) == 5
    assert specinfer.merged(first, [], size=4, share=2) == (set(first[:4]), set())


def test_what_followed_the_same_words_before_is_looked_up() -> None:
    ids = [5, 1, 2, 3, 7, 8, 1, 2, 3, 9, 9, 1, 2, 3]
    assert specinfer.looked_up(ids)[:2] == [(9,), (9, 9)], "the last time of the longest end"
    assert specinfer.looked_up([1, 2, 3, 4]) == []
    assert len(specinfer.looked_up(list(range(40)) * 2)) == specinfer.LOOKED_UP


def test_a_learned_branching_promises_most_of_all_of_its_nodes() -> None:
    acceptance, size = (0.5, 0.2, 0.1), 12

    def promised(branching: tuple[int, ...]) -> float:
        tokens, reached = 1.0, 1.0
        for count in branching:
            reached *= sum(acceptance[:count])
            tokens += reached
        return tokens

    every = [
        branching
        for length in range(1, 8)
        for branching in product((1, 2, 3), repeat=length)
        if specinfer.num_nodes(branching) <= size
    ]
    found = specinfer.learned_branching(acceptance, size)
    assert specinfer.num_nodes(found) <= size
    assert promised(found) == pytest.approx(max(map(promised, every)))
    assert specinfer.num_nodes(specinfer.PAPERS) == 20


def test_a_boosted_draft_learns_only_what_it_is_asked_for() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config)
    windows = torch.randint(16, (16, 6), generator=torch.Generator().manual_seed(0))
    wanted = torch.full_like(windows, -100)
    before = model(input_ids=windows).logits.argmax(-1)
    wanted[:, 3] = 7
    for _ in range(3):
        tune(model, windows, wanted, generator=torch.Generator().manual_seed(0))
    after = model(input_ids=windows).logits.argmax(-1)
    assert (after[:, 3] == 7).all()
    assert (before[:, 3] != 7).any()
    assert not (after[:, 5] == 0).any(), "what is left out is no token"


def test_sequoias_choice_is_smaller_where_nodes_cost_and_flatter_where_layers_do() -> None:
    chosen = sequoia.chosen()
    for costs in sequoia.NODE_COSTS:
        assert all(left >= right for left, right in pairwise(chosen[costs, layer_s][1] for layer_s in COSTS))
    for layer_s in COSTS:
        assert all(
            left > right for left, right in pairwise(chosen[node_s, layer_s][0] for node_s in sequoia.NODE_COSTS)
        )


def test_sequoias_table_divides_tokens_by_the_seconds_of_each_clock() -> None:
    found = [[(2.0, 3.0)] * len(sequoia.CLOCKS)] * 3
    for row, (node_s, layer_s) in zip(rows_of(sequoia.show(found)), sequoia.CLOCKS, strict=True):
        size, depth = sequoia.chosen()[node_s, layer_s]
        assert row[2] == f"{size} x {depth}"
        assert row[6].startswith(f"{2 / (1 + node_s * size + layer_s * depth):.2f}")
