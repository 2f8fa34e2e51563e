"""Records against the literal statement of the rules, and against what verification does."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.train import records as records_module
from edgespec.train.record_files import RecordsHeader, load_records, read_headers, save_records
from edgespec.train.records import expected_tokens, node_values, slot_records, stop_records
from edgespec.tree.policies import Draw
from edgespec.tree.token_tree import TokenTree, depths, root_only
from edgespec.verify import accept_alone
from edgespec.verify.rejection import verify_rejection
from tests.edgespec.verify.test_walks import DenseRows, random_tree

HEADER = RecordsHeader(
    target="big",
    draft="small",
    prompt=3,
    tree="opt-tree",
    draw="chosen",
    temperature=0.6,
    draft_temperature=0.6,
    num_trees=1,
    tokens=2.5,
)


def random_p(tree: TokenTree, generator: torch.Generator, *, one_hot: bool = False) -> Tensor:
    logits = 2 * torch.randn(tree.draft_probs.shape, generator=generator, dtype=torch.float64)
    if one_hot:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return logits.softmax(-1)


def example(seed: int, draw: Draw = "sampled", *, nodes: int = 24, vocab: int = 6) -> TokenTree:
    tree = random_tree(torch.Generator().manual_seed(seed), nodes=nodes, vocab=vocab)
    return dataclasses.replace(tree, draw=draw)


def literal_acceptance(tree: TokenTree, p: Tensor) -> dict[int, tuple[float, float]]:
    """Of every node below the root: its acceptance given that it is tried, the chance that it is tried."""
    found: dict[int, tuple[float, float]] = {}
    value = {0: 1.0}
    for node in range(tree.num_nodes):  # parents come before their children
        target, draft = p[node].clone(), tree.draft_probs[int(tree.draft_rows[node])].clone()
        tried = value[node]
        for child in range(1, tree.num_nodes):
            if tree.parents[child] != node:
                continue
            token = int(tree.tokens[child])
            if tree.draw == "chosen":
                found[child] = float(p[node, token]), value[node]
                value[child] = value[node] * found[child][0]
                continue
            chance = min(1.0, float(target[token] / draft[token]))
            found[child] = chance, tried
            value[child] = tried * chance
            tried *= 1 - chance
            target = (target - draft).clamp(min=0)
            target = target / target.sum() if target.sum() > 0 else target
            draft[token] = 0
            draft = draft / draft.sum()
    return found


@pytest.mark.parametrize("draw", ["sampled", "chosen"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_labels_and_weights_are_those_of_the_literal_loop(
    draw: Draw, one_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "CHUNK_ELEMENTS", 3 * 6)  # three nodes at once
    for seed in range(10):
        tree = example(seed, draw)
        p = random_p(tree, torch.Generator().manual_seed(seed), one_hot=one_hot)
        literal = literal_acceptance(tree, p)
        expected = torch.tensor([literal[node] for node in range(1, tree.num_nodes)], dtype=torch.float64)
        if draw == "chosen":
            found = slot_records(tree, p, temperature=0.6)
            torch.testing.assert_close(found["acceptance"], expected[:, 0])
            torch.testing.assert_close(found["parent_value"], expected[:, 1])
        sum_of_values = 1 + float((expected[:, 0] * expected[:, 1]).sum())
        assert expected_tokens(tree, p) == pytest.approx(sum_of_values)
        torch.testing.assert_close(node_values(tree, p)[1:], expected.prod(1))


def test_the_mean_accepted_length_is_what_verification_comes_to() -> None:
    tree = example(1, nodes=30)
    generator = torch.Generator().manual_seed(0)
    p = 0.7 * tree.draft_probs + 0.3 * random_p(tree, generator)
    draws = 4000
    lengths = [1 + len(accept_alone(verify_rejection(tree, DenseRows(p), generator)).path) for _ in range(draws)]
    mean, spread = torch.tensor(lengths).double().mean(), torch.tensor(lengths).double().std()
    assert abs(float(mean) - expected_tokens(tree, p)) < 4 * float(spread) / draws**0.5


def test_columns_say_what_growth_knew() -> None:
    tree = example(2, "chosen")
    found = slot_records(tree, random_p(tree, torch.Generator().manual_seed(0)), temperature=0.6)
    for node in range(1, tree.num_nodes):
        at, parent, token = node - 1, int(tree.parents[node]), int(tree.tokens[node])
        q = tree.draft_probs[parent]
        earlier = [i for i in range(1, node) if tree.parents[i] == parent]
        assert found["rank"][at] == len(earlier)
        assert found["q"][at] == q[token]
        assert found["entropy"][at] == pytest.approx(-float((q * q.log()).sum()))
        assert found["top_q"][at] == q.max()
        path_probability, walk = 1.0, node
        while walk:
            path_probability *= float(tree.draft_probs[int(tree.parents[walk]), tree.tokens[walk]])
            walk = int(tree.parents[walk])
        assert found["path_probability"][at] == pytest.approx(path_probability)
    assert found["depth"].tolist() == depths(tree.parents)[1:].tolist()
    assert set(found["temperature"].tolist()) == {0.6}


def test_equal_distributions_accept_the_first_draw() -> None:
    tree = example(4)
    assert tree.draft_probs is not None
    values = node_values(tree, tree.draft_probs)
    torch.testing.assert_close(values[1:][tree.ranks[1:] == 0], values[tree.parents[1:]][tree.ranks[1:] == 0])
    assert values[tree.ranks > 0].max() == 0


@pytest.mark.parametrize("draw", ["coupled", "sampled"])
def test_slots_are_those_of_chosen_children(draw: Draw) -> None:
    tree = example(4, draw)
    with pytest.raises(ValueError, match=f"not of draw '{draw}'"):
        slot_records(tree, random_p(tree, torch.Generator()), temperature=1.0)


def test_coupled_children_have_no_chance_of_their_own() -> None:
    tree = example(4, "coupled")
    for value in (node_values, expected_tokens):
        with pytest.raises(ValueError, match="no matter of chance"):
            value(tree, random_p(tree, torch.Generator()))


def test_a_root_alone_has_no_records() -> None:
    tree = root_only(3, draw="chosen", device=torch.device("cpu"))
    tree = dataclasses.replace(tree, draft_probs=torch.empty(0, 5))
    p = torch.full((1, 5), 0.2)
    found = slot_records(tree, p, temperature=1.0)
    assert {column.shape for column in found.values()} == {(0,)}
    assert expected_tokens(tree, p) == 1


def test_decision_models_learn_whether_a_child_is_accepted() -> None:
    draws: tuple[Draw, ...] = ("sampled", "chosen")
    for draw in draws:
        tree = example(7, draw)
        p = random_p(tree, torch.Generator().manual_seed(1))
        values = node_values(tree, p)
        nodes, found = stop_records(tree, p)
        for row, node in enumerate(nodes.tolist()):
            accepted = values[tree.parents == node].sum()
            assert found["acceptance"][row] * values[node] == pytest.approx(float(accepted))
            assert found["weight"][row] == values[node]


def test_parts_are_put_together_with_their_prompts(tmp_path: Path) -> None:
    tree = example(5, "chosen")
    assert tree.draft_probs is not None
    found = slot_records(tree, tree.draft_probs, temperature=1.0)
    other = dataclasses.replace(HEADER, prompt=8)
    assert read_headers(tmp_path / "none") == []
    assert save_records(tmp_path, found, HEADER).name == "part-00001.safetensors"
    assert save_records(tmp_path, found, other).name == "part-00002.safetensors"
    columns, headers = load_records(tmp_path)
    assert headers == [HEADER, other]
    assert headers[1].setting == (8, "opt-tree", 0.6)
    count = found["rank"].shape[0]
    assert columns["prompt"].tolist() == [3] * count + [8] * count
    assert torch.equal(columns["acceptance"][count:], found["acceptance"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-00001.safetensors", "part-00002.safetensors"]


def test_records_of_several_pairs_are_refused(tmp_path: Path) -> None:
    save_records(tmp_path, {"rank": torch.zeros(2)}, HEADER)
    save_records(tmp_path, {"rank": torch.zeros(2)}, dataclasses.replace(HEADER, target="other"))
    with pytest.raises(EdgespecError, match="several pairs: big with small, other with small") as caught:
        load_records(tmp_path)
    assert caught.value.code == "E_RECORDS"


def test_what_is_no_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match="no records"):
        load_records(tmp_path)
    path = save_records(tmp_path, {"rank": torch.zeros(2)}, HEADER)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(EdgespecError, match=r"part-00001.*no part of records"):
        load_records(tmp_path)
    with pytest.raises(EdgespecError) as caught:
        save_records(path, {"rank": torch.zeros(2)}, HEADER)  # a file where the folder should be
    assert caught.value.code == "E_OUTPUT"


def test_columns_must_agree(tmp_path: Path) -> None:
    save_records(tmp_path, {"rank": torch.zeros(2)}, HEADER)
    save_records(tmp_path, {"depth": torch.zeros(2)}, HEADER)
    with pytest.raises(EdgespecError, match="differ from those of the first"):
        load_records(tmp_path)
