"""What is derived from a tree's parents, against walks up the tree."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from edgespec.tree.token_tree import all_on_path, ancestors_mask, depths, depths_on_host, root_only


@st.composite
def random_parents(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 60))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


def path_to_root(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path


@given(random_parents())
def test_depths_and_ancestors_are_those_of_a_walk_to_the_root(parents: list[int]) -> None:
    depth, mask = depths(torch.tensor(parents)), ancestors_mask(torch.tensor(parents))
    for node in range(len(parents)):
        path = path_to_root(parents, node)
        assert depth[node] == depths_on_host(parents)[node] == len(path) - 1
        assert mask[node].nonzero().flatten().tolist() == sorted(path)


def test_a_chain_of_768_reaches_its_root() -> None:
    parents = torch.arange(-1, 768)
    assert depths(parents).tolist() == list(range(769))
    assert torch.equal(ancestors_mask(parents), torch.ones(769, 769).tril().bool())


@given(random_parents(), st.integers(0, 2**60 - 1))
def test_all_on_path_holds_where_every_ancestor_holds(parents: list[int], bits: int) -> None:
    flags = [bool(bits >> node & 1) for node in range(len(parents))]
    found = all_on_path(torch.tensor(flags), torch.tensor(parents))
    assert found.tolist() == [all(flags[a] for a in path_to_root(parents, n)) for n in range(len(parents))]


def test_root_only_is_one_node() -> None:
    tree = root_only(7, draw="chosen", device=torch.device("cpu"))
    assert tree.num_nodes == 1
    assert tree.parents.tolist() == [-1]
