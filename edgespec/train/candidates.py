"""Records of the candidate that the target takes at a node, and of acceptance by rank.

A node that the text went through has p and q, which are worth more than the one token that was drawn there: noise is
drawn afresh several times, and each time the draft's candidates and the target's token are seen. The same p and q say
what the child of every rank is worth under each draw. Legend: n nodes, r noises of each.
"""

import torch
from torch import Tensor

from edgespec.grow.acceptance import COLUMNS, NUM_CANDIDATES, Candidates, candidates_of
from edgespec.grow.children import best_children
from edgespec.sampling.draws import SMALLEST_UNIFORM, draw_without_replacement
from edgespec.train.records import chances_by_round
from edgespec.tree.token_tree import TokenTree, depths
from edgespec.verify import Acceptance

CandidateRecords = dict[str, Tensor]  # column -> [n * r, ...]

NUM_NOISES = 4
NUM_RANKS = 16


def candidate_records(
    q: Tensor, p: Tensor, depths: Tensor, *, temperature: float, generator: torch.Generator
) -> CandidateRecords:
    """Return records of nodes with the draft's q and the target's p, [n, vocab] each, so deep below their root.

    Columns: those of `candidates_of`; taken, the rank of the candidate that the target takes, or their number where it
    takes none; sampled_rates and chosen_rates [.., NUM_RANKS], the chance that the child of each rank is the one
    accepted where children are drawn so.
    """
    found = []
    for _ in range(NUM_NOISES if temperature > 0 else 1):
        uniform = torch.rand(p.shape, dtype=torch.float64, device=p.device, generator=generator)
        noise = uniform.clamp_(min=SMALLEST_UNIFORM).log_().neg_().reciprocal_() if temperature > 0 else None
        found.append(_of_one_noise(q, p, depths, noise, temperature=temperature, generator=generator))
    return {name: torch.cat([some[name] for some in found]) for name in found[0]}


def path_records(
    tree: TokenTree, p: Tensor, acceptance: Acceptance, *, temperature: float, generator: torch.Generator
) -> CandidateRecords:
    """Return the records of the nodes that the text went through and the draft expanded, for target p [n, vocab]."""
    assert tree.draft_probs is not None
    nodes = torch.tensor([0, *acceptance.path], device=p.device)
    nodes = nodes[tree.draft_rows[nodes] >= 0]
    q, below = tree.draft_probs[tree.draft_rows[nodes]], depths(tree.parents)[nodes] + 1
    return candidate_records(q, p[nodes], below, temperature=temperature, generator=generator)


def candidates_in(records: CandidateRecords) -> Candidates:
    """Return the columns of records that the networks read."""
    return {name: records[name].float() for name in COLUMNS}


def taken_rates(records: CandidateRecords) -> Tensor:
    """Return the acceptance by rank [n * r, NUM_RANKS] of coupled children: 1 for the one that was taken."""
    return (records["taken"][:, None] == torch.arange(NUM_RANKS)).double()


def _of_one_noise(
    q: Tensor, p: Tensor, depths: Tensor, noise: Tensor | None, *, temperature: float, generator: torch.Generator
) -> CandidateRecords:
    """Return the records of one noise [n, vocab] of each node."""
    tokens, perturbed = (_wide(found, NUM_CANDIDATES) for found in best_children(q, NUM_CANDIDATES, noise))
    drawn = p if noise is None else p.double() * noise
    is_taken = tokens == drawn.argmax(-1, keepdim=True)
    is_taken &= perturbed > 0
    taken = torch.where(is_taken.any(-1), is_taken.long().argmax(-1), NUM_CANDIDATES)
    row_noise = None if noise is None else noise.gather(1, tokens)
    columns = candidates_of(q, tokens, perturbed, row_noise, depth=depths[:, None], temperature=temperature)
    rows = q.shape[0]
    return {
        **{name: column.expand(rows, -1) for name, column in columns.items()},
        "taken": taken,
        "sampled_rates": _sampled_rates(q, p, generator),
        "chosen_rates": _chosen_rates(q, p),
    }


def _sampled_rates(q: Tensor, p: Tensor, generator: torch.Generator) -> Tensor:
    """Return the acceptance by rank [n, NUM_RANKS] of children that are drawn without replacement."""
    tokens, drawn = draw_without_replacement(q, NUM_RANKS, generator)
    return _wide(chances_by_round(p, q, tokens, drawn > 0), NUM_RANKS)


def _chosen_rates(q: Tensor, p: Tensor) -> Tensor:
    """Return the acceptance by rank [n, NUM_RANKS] of the best of q."""
    return _wide(p.gather(1, q.topk(min(NUM_RANKS, q.shape[1]), -1).indices).double(), NUM_RANKS)


def _wide(columns: Tensor, count: int) -> Tensor:
    """Return [n, c] with columns of 0 appended, up to `count`: a vocabulary may be smaller."""
    return torch.nn.functional.pad(columns, (0, count - columns.shape[1]))
