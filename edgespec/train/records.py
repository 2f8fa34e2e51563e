"""From a verified tree to training records: the exact chance that each of its slots is accepted.

One verification accepts by chance; p and q give what it accepts on average,
for every node of the tree, also where verification did not come. Legend: n nodes with the root, so
n - 1 slots that hold a token, one row of a record each, in node order; k nodes that have children,
c children the most that any has. V(node) is the chance that verification accepts the node.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.sampling.distribution import entropy_of_top
from edgespec.tree.token_tree import TokenTree, depths, product_on_path
from edgespec.verify.rejection import acceptance_of, reject

CHUNK_ELEMENTS = 1 << 22  # numbers of p that are worked on at once

Records = dict[str, Tensor]  # column -> [n - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Families:
    """The parents and children of a tree, as tables, and what verification makes of them for target p."""

    parents: Tensor  # [k], nodes that have children
    row: Tensor  # [n - 1], of every node below the root: where it stands in tables
    column: Tensor  # [n - 1]

    q: Tensor  # [k, c], of every child's token; 0 where there is no child
    chances: Tensor  # [k, c], that a child is accepted, given that its parent is; 0 where there is no child
    values: Tensor  # [n], V of every node

    def by_node(self, table: Tensor) -> Tensor:
        """Return a table's values [k, c] in node order: [n - 1]."""
        return table[self.row, self.column]


def slot_records(tree: TokenTree, p: Tensor, *, temperature: float) -> Records:
    """Return a row for each node below the root, in columns [n - 1], for target p [n, vocab] of that temperature.

    acceptance: chance that the token is accepted, given that its parent is; parent_value: V of the parent; rank,
    depth (1 below the root); q of the token; entropy (nats) and top_q of the parent's q; path_probability: q along the
    path, the token included; temperature. Raises ValueError for children that were not chosen.
    """
    if tree.draw != "chosen":
        raise ValueError(f"records of slots are of chosen children, not of draw '{tree.draw}'")
    families = _families(tree, p)
    entropy, top_q = _of_rows(_kept(tree), tree.draft_rows[families.parents])
    q = families.by_node(families.q)
    return {
        "acceptance": families.by_node(families.chances),
        "parent_value": families.values[tree.parents[1:]],
        "rank": tree.ranks[1:],
        "depth": depths(tree.parents)[1:],
        "q": q,
        "entropy": entropy[families.row],
        "top_q": top_q[families.row],
        "path_probability": product_on_path(torch.cat([q.new_ones(1), q]), tree.parents)[1:],
        "temperature": torch.full_like(q, temperature),
    }


def stop_records(tree: TokenTree, p: Tensor) -> tuple[Tensor, Records]:
    """Return, for decision models, the nodes that have children [k], and columns [k] about them.

    acceptance: chance that one of the node's children is accepted, given that the node is (for a
    chain min(1, p/q), the label of Improving-MCSD, section 3.3); weight: V of the node.
    """
    families = _families(tree, p)
    one_of_them = families.chances.sum(1).clamp(max=1)
    return families.parents, {"acceptance": one_of_them, "weight": families.values[families.parents]}


def node_values(tree: TokenTree, p: Tensor) -> Tensor:
    """Return V of every node, [n], for target p [n, vocab]; the root's is 1.

    Raises ValueError for coupled children: there the noise decides, and V is 1 along the path that was walked.
    """
    if tree.draw == "coupled":
        raise ValueError("which coupled children are accepted is no matter of chance")
    return _families(tree, p).values


def expected_tokens(tree: TokenTree, p: Tensor) -> float:
    """Return the average tokens that verification yields for target p [n, vocab]: 1 + the sum of V below the root."""
    return float(node_values(tree, p).sum())


def _families(tree: TokenTree, p: Tensor) -> _Families:
    """Return tables of siblings in the order in which verification tries them, which is that of their numbers."""
    below = tree.parents[1:]
    parents, row, counts = below.unique(return_inverse=True, return_counts=True)
    # Stable, so that siblings keep their order; their places count from the first of their family.
    order = row.argsort(stable=True)
    column = torch.empty_like(row)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    column[order] = torch.arange(row.shape[0], device=row.device) - first
    width = int(counts.max()) if counts.numel() else 0
    children = torch.full((parents.shape[0], width), -1, dtype=torch.long, device=row.device)
    children[row, column] = torch.arange(1, tree.num_nodes, device=row.device)
    is_child, tokens = children >= 0, tree.tokens[children.clamp(min=0)]
    if tree.draw == "chosen":
        chances = p[parents[:, None], tokens].masked_fill(~is_child, 0)
    else:
        chances = torch.zeros(tokens.shape, dtype=p.dtype, device=p.device)
        for some in _chunks(parents.shape[0], p.shape[-1]):
            q = _kept(tree)[tree.draft_rows[parents[some]]]
            chances[some] = chances_by_round(p[parents[some]], q, tokens[some], is_child[some]).to(p.dtype)
    by_node = chances[row, column]
    return _Families(
        parents=parents,
        row=row,
        column=column,
        q=_kept(tree)[tree.draft_rows[parents][:, None], tokens].masked_fill(~is_child, 0),
        chances=chances,
        values=product_on_path(torch.cat([by_node.new_ones(1), by_node]), tree.parents),
    )


def _kept(tree: TokenTree) -> Tensor:
    assert tree.draft_probs is not None, "records need trees that keep the draft's distributions"
    return tree.draft_probs


def chances_by_round(p: Tensor, q: Tensor, tokens: Tensor, is_child: Tensor) -> Tensor:
    """Return the chance that a child is the one accepted, in draw order: float64 [k, c]."""
    acceptance = acceptance_by_round(p, q, tokens, is_child)
    rejected = torch.cumprod(1 - acceptance, 1)
    return acceptance * torch.cat([torch.ones_like(rejected[:, :1]), rejected[:, :-1]], 1)


def acceptance_by_round(p: Tensor, q: Tensor, tokens: Tensor, is_child: Tensor) -> Tensor:
    """Return the acceptance of children in draw order, given that they are tried: float64 [k, c].

    This does the rounds of `verify_rejection` for all nodes together; p and q are [k, vocab], tokens [k, c].
    """
    acceptance = torch.zeros(tokens.shape, dtype=torch.float64, device=p.device)
    rows = torch.arange(p.shape[0], device=p.device)
    residual, remaining = p.double(), q.double()
    for rank in range(tokens.shape[1]):
        goes_on = is_child[rows, rank].nonzero().flatten()  # fewer in every round
        rows, residual, remaining = rows[goes_on], residual[goes_on], remaining[goes_on]
        token = tokens[rows, rank]
        acceptance[rows, rank] = acceptance_of(residual, remaining, token)
        residual, remaining = reject(residual, remaining, token)
    return acceptance


def _of_rows(draft_probs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return two columns [k] about rows of `draft_probs`: the entropy of the top 1000, and the largest probability."""
    entropy, top_q = draft_probs.new_empty(rows.shape[0]), draft_probs.new_empty(rows.shape[0])
    for some in _chunks(rows.shape[0], draft_probs.shape[-1]):
        q = draft_probs[rows[some]]
        entropy[some], top_q[some] = entropy_of_top(q), q.amax(-1)
    return entropy, top_q


def _chunks(num_rows: int, vocab: int) -> list[slice]:
    """Return the rows in chunks, each of which is worked on at once."""
    at_once = max(1, CHUNK_ELEMENTS // max(1, vocab))
    return [slice(start, start + at_once) for start in range(0, num_rows, at_once)]
