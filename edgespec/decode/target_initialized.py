"""Target-initialised trees: the target starts w branches, and the longest accepted one wins. LOSSY for w > 1.

Source: Improving-MCSD, section 3.1. After a pass the target's distribution is known where the accepted
path ends. Instead of one token, w are drawn from it, and each starts a branch of the next tree. Taking
the branch that was accepted furthest favours tokens that are easy to continue: the output has no
longer the target's distribution.

The last token of the path stays uncommitted and is the root of the next tree, whose children are the
w tokens; so trees, masks and caches are those of every other policy, for one row more a pass.

These texts have a loop of their own, and make their steps one by one.
"""

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edgespec.decode.accept import commit, tokens_at
from edgespec.decode.batch import Batch, Outcome
from edgespec.decode.clock import StepClock
from edgespec.decode.draft_reading import DraftReading
from edgespec.decode.gained import first_step, step_result
from edgespec.decode.reading import take_prompt_rows
from edgespec.decode.sequence import AcceptedPath, Sequence
from edgespec.errors import EdgespecError
from edgespec.grow import Growth
from edgespec.grow.batched import grown
from edgespec.model.pass_rows import MOST_PROMPT_ROWS
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.draws import draw_without_replacement
from edgespec.to_device import on_device
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree, ancestors_mask
from edgespec.tuning.prompt_parts import PromptParts
from edgespec.verify import accept_alone
from edgespec.verify.paths import ProcessNode, on_paths
from edgespec.verify.rows import TargetRows, refuse_nan


@dataclass(slots=True, kw_only=True, eq=False)
class BranchedSequence(Sequence):
    """A text whose trees begin with `width` tokens of the target's; its first step yields none of them."""

    width: int
    grow_below: Callable[[int, int, Tensor], Growth]  # the root, most layers, and the root's children [w]
    branches: Tensor = field(default_factory=lambda: torch.empty(0))  # [w], the root's children
    started: float | None = None  # when the prompt was begun to be read

    def begin_tokens(self, logits: Tensor) -> tuple[int, ...]:
        """Draw the first branches from logits [vocab]; the prompt's last token is the root."""
        self.noise.start(len(self.prompt) - 1)
        self.target.uncommit_last()
        assert self.drafter is not None
        self.drafter.begin(self.prompt[:-1])
        p = to_probs(self.processed(logits[None]), self.settings.sampling)  # [1, vocab]
        self.branches = _draw(p, self.width, self.generator)
        self.root = self.prompt[-1]
        return ()


class BranchedBatch(Batch):
    """Running texts with target-initialised trees, which make their steps one by one."""

    @property
    def num_reading(self) -> int:
        """The number of texts whose prompt is not read yet, by the target or by the draft."""
        return sum(sequence.target.num_unread > 0 or sequence.reads_draft for sequence in self._running)

    def enter(self, sequence: Sequence, text: abc.Sequence[int]) -> None:
        """Begin a text; its branches need the logits after its last token, also where it continues."""
        sequence.begin(list(text))
        sequence.begin_target(sequence.prompt, needs_logits=True)
        self._running.append(sequence)

    def step(self) -> list[Outcome]:
        """Make the step of each text; those that ended have left."""
        self._drafts.begin_step(self._parts.by_itself_s)
        outcomes, self._untold = self._untold, []
        try:
            for sequence in list(self._running):
                outcomes += self._outcomes(sequence)
        except BaseException:
            self._untold = outcomes  # the next step hands them out
            raise
        for outcome in outcomes:
            if outcome.error is not None or outcome.sequence.finish is not None:
                self.leave(outcome.sequence)
        return outcomes

    def _outcomes(self, sequence: Sequence) -> list[Outcome]:
        assert isinstance(sequence, BranchedSequence)
        try:
            return _step(sequence, self._parts, self._drafts)
        except EdgespecError as error:
            return [Outcome(sequence=sequence, error=error)]


def batch_of(tree: TreeSettings) -> type[Batch]:
    """Return the loop of texts with such trees: those that share each pass, or the lossy ones' own."""
    return Batch if tree.is_lossless else BranchedBatch


def _step(sequence: BranchedSequence, parts: PromptParts, drafts: DraftReading) -> list[Outcome]:
    """Grow, read, accept and commit, or read of the prompt; raises EdgespecError where the text has failed."""
    target, drafter = sequence.target, sequence.drafter
    assert drafter is not None
    target.read_anew()
    if target.num_unread or sequence.started is None:
        return _read_prompt(sequence, parts)
    drafter.rewind()  # the tree of a pass that was not made
    drafts.read([sequence])
    if sequence.reads_draft:
        return []
    clock = StepClock()
    with clock.verb("grow"):
        depth = max(1, sequence.max_depth(sequence.num_left))
        tree = grown(sequence.grow_below(sequence.root, depth, sequence.branches), drafter)
    with clock.verb("read"):
        (hidden,) = target.read([target.tree_rows(tree)])
        refuse_nan(hidden.amax())
    with clock.verb("accept"):
        accepted, branches = _accept(sequence, tree, hidden)
    with clock.verb("commit"):
        gained, failed = commit([(sequence, tree, accepted)])
    cost = clock.cost([tree], drafted=[tree])
    sequence.branches = branches
    return [
        *(Outcome(sequence=sequence, step=step_result(one, cost)) for one in gained),
        *(Outcome(sequence=sequence, error=error) for _, error in failed),
    ]


def _read_prompt(sequence: BranchedSequence, parts: PromptParts) -> list[Outcome]:
    target = sequence.target
    if sequence.started is None:
        sequence.started = time.perf_counter()
    if target.num_unread:  # else the caches have the whole prompt
        most = parts.num_rows(target.part_rows, is_shared=True)
        count = sequence.num_reading = target.rows_within(MOST_PROMPT_ROWS if most is None else most)
        (hidden,) = target.read([target.text_rows(count)])
        take_prompt_rows(sequence, hidden, count)
        sequence.num_reading = 0
        if target.num_unread:
            return []
        target.end_prompt(hidden)
    return [Outcome(sequence=sequence, step=first_step(sequence, sequence.started))]


def _accept(sequence: BranchedSequence, tree: TokenTree, hidden: Tensor) -> tuple[AcceptedPath, Tensor]:
    """Return the longest branch, ended at the first stop token, and the next branches [w], drawn at its end."""
    process = None if sequence.processors is None else on_paths(sequence.processors, tree)
    path, end_token = _longest(sequence, tree, hidden, process)
    rows = _rows_of(sequence, hidden, process)
    branches = _branches_after(rows.probs(path[-1]), end_token, sequence.width, sequence.generator)
    tokens = _until_stop(tokens_at(tree, path), sequence.settings.stop_tokens)[: sequence.num_left]
    path = path[: len(tokens) - 1]
    count = sequence.settings.num_logprobs
    accepted = AcceptedPath(
        path=path,
        tokens=tokens,
        from_draft=(False, *[True] * len(path)),  # the first is the target's, drawn in the pass before
        from_lookup=(False,) * len(tokens),
        logprobs=() if count is None else rows.logprobs((0, *path), tokens, count),
    )
    return accepted, branches


def _until_stop(tokens: tuple[int, ...], stop_tokens: frozenset[int]) -> tuple[int, ...]:
    """Return the tokens up to the first that ends the text, that one included."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in stop_tokens), len(tokens))
    return tokens[:end]


def _longest(
    sequence: BranchedSequence, tree: TokenTree, hidden: Tensor, process: ProcessNode | None
) -> tuple[tuple[int, ...], int]:
    """Return the longest accepted path, its branch's first token included, and the token drawn at its end."""
    ancestors = ancestors_mask(tree.parents)
    best: tuple[tuple[int, ...], int] = ((), -1)
    for branch in (tree.parents == 0).nonzero().flatten().tolist():  # w, two or three
        nodes = ancestors[:, branch].nonzero().flatten()
        rows = _rows_of(sequence, hidden[nodes], _renumbered(process, nodes.tolist()))
        acceptance = accept_alone(sequence.verify(_subtree(tree, nodes), rows, sequence.generator))
        path = (branch, *nodes[on_device(acceptance.path, nodes.device)].tolist())
        if len(path) > len(best[0]):
            best = (path, acceptance.next_token)
    return best


def _rows_of(sequence: Sequence, hidden: Tensor, process: ProcessNode | None) -> TargetRows:
    target = sequence.target
    return TargetRows(hidden, target.logits, sequence.settings.sampling, vocab=target.vocab, process=process)


def _renumbered(process: ProcessNode | None, nodes: list[int]) -> ProcessNode | None:
    """Return the processing of the logits after some nodes of a tree [k], numbered from 0."""
    return None if process is None else lambda logits, node: process(logits, nodes[node])


def _subtree(tree: TokenTree, nodes: Tensor) -> TokenTree:
    """Return the tree of some nodes [k], ascending; the first is the root."""
    number = torch.full_like(tree.parents, -1)
    number[nodes] = torch.arange(nodes.shape[0], device=nodes.device)
    parents = number[tree.parents[nodes]]
    parents[0] = -1
    return replace(
        tree,
        tokens=tree.tokens[nodes],
        parents=parents,
        ranks=tree.ranks[nodes],
        draft_rows=tree.draft_rows[nodes],
        ancestors=None,
    )


def _draw(p: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Draw distinct tokens of p [1, vocab]: [w], fewer where p has fewer."""
    tokens, probs = draw_without_replacement(p, width, generator)
    return tokens[0, probs[0] > 0]


def _branches_after(p: Tensor, first: int, width: int, generator: torch.Generator) -> Tensor:
    """Return the token that verification drew, and `width` - 1 others drawn from p [vocab]."""
    others = p.clone()
    others[first] = 0
    return torch.cat([on_device([first], p.device), _draw(others[None], width - 1, generator)])
