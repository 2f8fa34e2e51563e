"""Running texts share every pass: each has its own tree, and prompts are read beside them.

A step has four verbs: all trees grow together, one pass over the target's weights reads them, each text's verification
accepts a path, and the path becomes part of the text. What a text yields does not depend on the others. An error in
one text ends that text alone, and what breaks a pass leaves all texts as they were.
"""

import itertools
import math
import time
from collections import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.decode.accept import AcceptedTree, accept_batched, commit
from edgespec.decode.clock import StepClock
from edgespec.decode.draft_reading import DraftReading, asks_draft, num_unread
from edgespec.decode.gained import first_step, step_result
from edgespec.decode.near_ties import decide_near_ties
from edgespec.decode.reading import ReadPrompt, share_out, take_prompt_rows
from edgespec.decode.sequence import Sequence
from edgespec.draft.block import BlockDrafter, expand_blocks
from edgespec.draft.distributions import Distributions
from edgespec.draft.language_model import LanguageModelDrafter, expand_batched
from edgespec.errors import EdgespecError
from edgespec.grow import Growth
from edgespec.grow.batched import Expansion, grow_batched, one_by_one
from edgespec.tree.token_tree import TokenTree
from edgespec.tuning.lookup_choice import shares_of_end
from edgespec.tuning.prompt_parts import PromptParts
from edgespec.tuning.step import MOST_IDLE_STEPS, PassCost, StepResult

FIRST_IDLE_STEPS = 8  # of roots alone: to ask whether anything pays takes a part of a short step
_first_numbers = itertools.count(0, 1 << 40)  # of the steps of each batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step brought to one text; an error has ended it."""

    sequence: Sequence
    step: StepResult | None = None
    error: Exception | None = None


class Batch:
    """Running texts.

    What ends a step from outside, an interrupt or a lack of memory, may leave texts between two states. Their caches
    have the rows of all tokens that were returned: begin them again in another batch, after these tokens.
    """

    def __init__(self, parts: PromptParts | None = None) -> None:
        """Read prompts in these `parts`; None: whole, or as far as there is room beside trees."""
        self._parts = PromptParts(reads_once=True) if parts is None else parts
        self._drafts = DraftReading()
        self._prompts: list[ReadPrompt] = []
        self._running: list[Sequence] = []
        self._untold: list[Outcome] = []  # of texts that failed in a step that was not made
        self._numbers = itertools.count(next(_first_numbers))
        self._idle: tuple[list[Sequence], int] = ([], 0)  # texts that nothing is tuned for, and for how many steps
        self._idle_steps = FIRST_IDLE_STEPS  # when nothing is tuned for the next time: twice as many each time
        self._is_idle = False  # whether the running step is one of them
        self.others_wait = False  # whether a text that ends makes room for another

    @property
    def sequences(self) -> list[Sequence]:
        """The running texts."""
        return [*self._running, *(prompt.sequence for prompt in self._prompts)]

    @property
    def num_reading(self) -> int:
        """The number of texts whose prompt is not read yet, by the target or by the draft."""
        return len(self._prompts) + sum(sequence.reads_draft for sequence in self._running)

    def enter(self, sequence: Sequence, text: abc.Sequence[int]) -> None:
        """Begin a text; rows of its beginning that its caches hold are not read again.

        Where some of it is written already, it goes on with its last token for a root, as if it had never left.
        """
        sequence.begin(list(text))
        goes_on = sequence.settings.num_written > 0
        sequence.begin_target(sequence.prompt[:-1] if goes_on else sequence.prompt, needs_logits=not goes_on)
        if goes_on and not sequence.target.num_unread:
            self._go_on(sequence)
        else:
            self._prompts.append(ReadPrompt(sequence, goes_on=goes_on))

    def leave(self, sequence: Sequence) -> None:
        """End a text between two steps; its caches hold all of it but its last token."""
        self._idle = [], 0
        self._running = [other for other in self._running if other is not sequence]
        self._prompts = [prompt for prompt in self._prompts if prompt.sequence is not sequence]

    def step(self) -> list[Outcome]:
        """Make one pass for all texts, and return what each of them gained; those that ended have left."""
        self._drafts.begin_step(self._parts.by_itself_s)
        self._drafts.read([sequence for sequence in self._running if sequence.reads_draft])
        growths = self._growths()
        clock = StepClock(sum(num_unread(sequence) for sequence, _ in growths))
        with clock.verb("grow"):
            trees = self._grow(growths)
        with clock.verb("read"):
            unread = [prompt for prompt in self._prompts if prompt.sequence.target.num_unread]
            known = [prompt for prompt in self._prompts if not prompt.sequence.target.num_unread]  # cached whole
            prompts = share_out(unread, self._parts, has_trees=bool(trees))
            hidden, is_finite = _read(trees, prompts)
        hidden, is_finite, trees, prompts = _without_left(hidden, is_finite, trees, prompts)
        with clock.verb("accept"):
            accepted, failed = accept_batched(trees, hidden, is_finite)
        with clock.verb("decide"):
            accepted, undecided = decide_near_ties(accepted, num_rows=sum(tree.num_nodes for _, tree in trees))
        with clock.verb("commit"):
            gained, broken = commit(accepted)
        cost = clock.cost(
            [tree for _, tree in trees],
            drafted=[tree for sequence, tree in trees if sequence.has_drafted],
            num_prompt_rows=sum(prompt.rows for prompt in prompts),
        )
        self._parts.observe(cost)
        outcomes, self._untold = self._untold, []
        outcomes += [self._failed(sequence, error) for sequence, error in (*failed, *undecided, *broken)]
        if not trees:
            _observe([prompt.sequence for prompt in prompts], replace(cost, num_texts=len(prompts)))
        outcomes += self._stepped(gained, cost)
        outcomes += self._took_in(prompts, hidden[len(trees) :])
        outcomes += [self._begun(prompt) for prompt in known]
        return outcomes

    def _growths(self) -> list[tuple[Sequence, Growth]]:
        """Return the growth of each text's tree, but of those whose draft has to read first."""
        texts = [sequence for sequence in self._running if not sequence.reads_draft]
        self._begin_step(texts)
        if self._is_idle:
            return [(sequence, sequence.plain(sequence.root, 0)) for sequence in texts]
        for sequence in texts:
            if sequence.drafter is not None:
                sequence.drafter.rewind()  # the tree of a pass that was not made
        growths = [(sequence, sequence.growth()) for sequence in texts]
        self._drafts.read([sequence for sequence, growth in growths if asks_draft(sequence, growth)])
        return [(sequence, growth) for sequence, growth in growths if not sequence.reads_draft]

    def _begin_step(self, texts: abc.Sequence[Sequence]) -> None:
        if not texts:
            self._is_idle = False
            return
        number, num_texts = next(self._numbers), len(texts)
        idle_texts, left = self._idle
        self._is_idle = left > 0 and texts == idle_texts and not self._prompts
        if self._is_idle:
            self._idle = idle_texts, left - 1
            for sequence in texts:
                sequence.target.read_anew()
            return
        unread = sum(num_unread(sequence) for sequence in texts)
        if self.others_wait:
            shares = [1 / max(1, num_texts)] * num_texts
        else:
            shares = shares_of_end([one.num_left for one in sorted(self.sequences, key=lambda one: one.reads_draft)])
        for sequence, share in zip(texts, shares, strict=False):
            if sequence.tuning is not None:
                sequence.tuning.begin_step(number, num_texts, unread)
            if sequence.lookup is not None:
                sequence.lookup.begin_step(number, num_texts, share)
            sequence.target.read_anew()

    def _grow(self, growths: abc.Sequence[tuple[Sequence, Growth]]) -> list[tuple[Sequence, TokenTree]]:
        """Return every text's tree; where growth failed, the text has left."""
        found = grow_batched([(growth, sequence.drafter) for sequence, growth in growths], expand)
        trees: list[tuple[Sequence, TokenTree]] = []
        for (sequence, _), tree in zip(growths, found, strict=True):
            if isinstance(tree, TokenTree):
                if sequence.tuning is not None and sequence.has_drafted:
                    sequence.tuning.take_tree(tree)
                trees.append((sequence, tree))
            else:
                self._untold.append(self._failed(sequence, tree))
        return trees

    def _stepped(self, gained: abc.Sequence[AcceptedTree], cost: PassCost) -> list[Outcome]:
        """Return what texts have gained, and let their trees' tuning learn from it."""
        texts = [sequence for sequence, _, _ in gained]
        is_idle, outcomes = self._is_idle, []
        if not is_idle:
            _observe(texts, cost)
        for one in gained:
            sequence = one[0]
            step = step_result(one, cost)
            if sequence.tuning is not None and not is_idle:
                sequence.tuning.learn(step)
            if sequence.lookup is not None and not is_idle:
                sequence.lookup.learn(step)
            if sequence.finish is not None:
                self.leave(sequence)
            outcomes.append(Outcome(sequence=sequence, step=step))
        if not is_idle:
            self._begin_idle(texts)
        return outcomes

    def _begin_idle(self, texts: list[Sequence]) -> None:
        """Let nothing be tuned in the next steps, where nothing is to be learned from them."""
        if all(map(_is_idle, texts)):
            self._idle = texts, self._idle_steps
            self._idle_steps = min(2 * self._idle_steps, MOST_IDLE_STEPS)
        else:
            self._idle, self._idle_steps = ([], 0), FIRST_IDLE_STEPS

    def _took_in(self, prompts: abc.Sequence[ReadPrompt], hidden: abc.Sequence[Tensor]) -> list[Outcome]:
        """Take in rows of prompts; the last ones of each bring its first token."""
        outcomes = []
        for prompt, states in zip(prompts, hidden, strict=True):
            sequence = prompt.sequence
            try:
                take_prompt_rows(sequence, states, prompt.rows)
            except Exception as error:
                outcomes.append(self._failed(sequence, error))
                continue
            sequence.num_reading = 0
            if sequence.target.num_unread:
                continue
            if prompt.goes_on:
                self._prompts.remove(prompt)
                self._go_on(sequence)
                continue
            sequence.target.end_prompt(states)
            outcomes.append(self._begun(prompt))
        return outcomes

    def _begun(self, prompt: ReadPrompt) -> Outcome:
        """Return the first token of a text whose prompt is read."""
        sequence = prompt.sequence
        try:
            step = first_step(sequence, time.perf_counter() if prompt.started is None else prompt.started)
        except Exception as error:
            return self._failed(sequence, error)
        self._prompts.remove(prompt)
        if sequence.finish is None:
            self._running.append(sequence)
        return Outcome(sequence=sequence, step=step)

    def _go_on(self, sequence: Sequence) -> None:
        sequence.go_on()
        self._running.append(sequence)

    def _failed(self, sequence: Sequence, error: Exception) -> Outcome:
        self.leave(sequence)
        return Outcome(sequence=sequence, error=error)


def _read(
    trees: abc.Sequence[tuple[Sequence, TokenTree]], prompts: abc.Sequence[ReadPrompt]
) -> tuple[list[Tensor], list[bool]]:
    """Return the last hidden states of all trees and then of prompts, and whether each text's are finite."""
    texts = [*(sequence for sequence, _ in trees), *(prompt.sequence for prompt in prompts)]
    if not texts:
        return [], []
    parts = [sequence.target.tree_rows(tree) for sequence, tree in trees]
    parts += [prompt.sequence.target.text_rows(prompt.rows) for prompt in prompts]
    for sequence, _ in trees:
        sequence.noise.make_ahead()
    hidden = texts[0].target.read(parts)
    # One wait for the device: verification would wait a moment later, and so the times are honest.
    largest = torch.stack([states.amax() for states in hidden]).tolist()
    return hidden, [math.isfinite(number) for number in largest]


def _is_idle(sequence: Sequence) -> bool:
    """Return whether a text's steps are of its root alone, and nothing is to be learned from the next ones."""
    tuning, lookup = sequence.tuning, sequence.lookup
    is_plain = sequence.drafter is None if tuning is None else tuning.is_idle
    return is_plain and (lookup is None or lookup.is_idle)


def _observe(sequences: abc.Sequence[Sequence], cost: PassCost) -> None:
    """Let the tuning of texts learn what a pass took that they shared."""
    tuned = next((sequence.tuning for sequence in sequences if sequence.tuning is not None), None)
    looked_up = next((sequence.lookup for sequence in sequences if sequence.lookup is not None), None)
    if tuned is not None:
        tuned.observe(cost)
    elif looked_up is not None:
        looked_up.observe(cost)


def _without_left(
    hidden: abc.Sequence[Tensor],
    is_finite: abc.Sequence[bool],
    trees: abc.Sequence[tuple[Sequence, TokenTree]],
    prompts: abc.Sequence[ReadPrompt],
) -> tuple[list[Tensor], list[bool], list[tuple[Sequence, TokenTree]], list[ReadPrompt]]:
    """Return what a pass gave, its trees and its prompts without those that it went on without."""
    stays = [not sequence.target.is_left_out for sequence, _ in trees]
    reads = [not prompt.sequence.target.is_left_out for prompt in prompts]
    return (
        list(itertools.compress(hidden, [*stays, *reads])),
        list(itertools.compress(is_finite, [*stays, *reads])),
        list(itertools.compress(trees, stays)),
        list(itertools.compress(prompts, reads)),
    )


def expand(expansions: abc.Sequence[Expansion]) -> abc.Sequence[Distributions | EdgespecError]:
    """Expand the drafts of all texts at once where they are one model."""
    blocks = [(drafter, tokens, rows) for drafter, tokens, rows in expansions if isinstance(drafter, BlockDrafter)]
    if len(blocks) == len(expansions):
        return expand_blocks(blocks)
    models = [drafter for drafter, _, _ in expansions if isinstance(drafter, LanguageModelDrafter)]
    if len(models) == len(expansions):
        return expand_batched(
            [(drafter, tokens, rows) for drafter, (_, tokens, rows) in zip(models, expansions, strict=True)]
        )
    return one_by_one(expansions)
