"""The texts that are under way share every pass: each has its own tree, and prompts are read beside them.

A step grows all trees together, reads them in one pass over the target's weights, and lets each text take its path.
What a text yields does not depend on its company. An error in one text ends that text alone.
"""

from __future__ import annotations

import itertools
import time
from collections import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from edgespec.decode.accept import accept_batched
from edgespec.decode.sequence import AcceptedPath, Sequence
from edgespec.draft.distributions import Distributions
from edgespec.draft.language_model import LanguageModelDrafter, expand_batched
from edgespec.errors import EdgespecError
from edgespec.grow.batched import Expansion, grow_batched, one_by_one
from edgespec.model.pass_rows import ALL_PROMPT_ROWS
from edgespec.tree.token_tree import TokenTree, depths
from edgespec.tuning.step import PassCost, StepResult
from edgespec.verify.rows import refuse_nan

PROMPT_ROWS = 2048  # that are read beside trees in a pass; without trees it may be more

_step_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step brought to one text; an error has ended it."""

    sequence: Sequence
    step: StepResult | None = None
    error: Exception | None = None


@dataclass(slots=True)
class _Reading:
    """A text whose prompt is being read."""

    sequence: Sequence
    goes_on: bool = False  # its root is known
    started: float | None = None
    rows: int = 0  # in the pass under way


class Batch:
    """Texts under way.

    What ends a step from outside, an interrupt or a lack of memory, may leave texts between two states. Their caches
    have the rows of all tokens that were handed out: begin them again in another batch, behind these tokens.
    """

    def __init__(self) -> None:
        self._reading: list[_Reading] = []
        self._running: list[Sequence] = []
        self._untold: list[Outcome] = []  # of texts that failed in a step that was not made

    @property
    def sequences(self) -> list[Sequence]:
        """The texts under way."""
        return [*self._running, *(reading.sequence for reading in self._reading)]

    @property
    def num_reading(self) -> int:
        """The number of texts whose prompt is not read yet."""
        return len(self._reading)

    def enter(self, sequence: Sequence, text: abc.Sequence[int]) -> None:
        """Begin a text; rows of its beginning that its caches hold are not read again.

        Where some of it is written already, it goes on with its last token for a root, as if it had never left.
        """
        sequence.begin(list(text))
        goes_on = sequence.settings.num_written > 0 and not sequence.rules.needs_logits
        text = sequence.prompt[:-1] if goes_on else sequence.prompt
        prompt_tokens = len(sequence.prompt) - sequence.settings.num_written
        sequence.target.begin(text, needs_logits=not goes_on, prompt_tokens=prompt_tokens)
        if sequence.target.num_unread:
            self._reading.append(_Reading(sequence, goes_on=goes_on))
        else:
            self._go_on(sequence)

    def leave(self, sequence: Sequence) -> None:
        """End a text between two steps; its caches hold all of it but its last token."""
        self._running = [other for other in self._running if other is not sequence]
        self._reading = [reading for reading in self._reading if reading.sequence is not sequence]

    def step(self) -> list[Outcome]:
        """Make one pass for all texts, and return what each of them gained; those that ended have left."""
        number = next(_step_numbers)
        for sequence in self._running:
            if sequence.tuning is not None:
                sequence.tuning.begin_step(number, len(self._running))
            sequence.target.read_anew()
        started = time.perf_counter()
        num_pending = sum(_num_pending(sequence) for sequence in self._running)
        trees = self._grow()
        grown = time.perf_counter()
        self._share_out_prompt_rows(has_trees=bool(trees))
        reading = [reading for reading in self._reading if reading.rows]
        for waiting in reading:
            waiting.started = grown if waiting.started is None else waiting.started
        parts = [sequence.target.tree_rows(tree) for sequence, tree in trees]
        parts += [waiting.sequence.target.text_rows(waiting.rows) for waiting in reading]
        hidden = (trees[0][0] if trees else reading[0].sequence).target.read(parts) if parts else []
        # One wait for the device: verification would wait a moment later, and so the times are honest.
        is_finite = torch.stack([states.amax().isfinite() for states in hidden]).tolist() if hidden else []
        looked = time.perf_counter()
        gained, failed = accept_batched(trees, hidden, is_finite)
        outcomes = [*self._untold, *(self._failed(sequence, error) for sequence, error in failed)]
        self._untold = []
        verified = time.perf_counter()
        cost = PassCost(
            num_texts=len(trees),
            num_rows=sum(tree.num_nodes for _, tree in trees),
            num_prompt_rows=sum(waiting.rows for waiting in reading),
            num_layers=max((int(depths(tree.parents)[-1]) for _, tree in trees), default=0),
            num_pending=num_pending,
            grow_s=grown - started,
            target_s=looked - grown,
            rest_s=verified - looked,
        )
        tuned = next((sequence.tuning for sequence, _, _ in gained if sequence.tuning is not None), None)
        if tuned is not None:
            tuned.observe(cost)
        outcomes += [self._stepped(sequence, tree, accepted, cost) for sequence, tree, accepted in gained]
        for waiting, states in zip(reading, hidden[len(trees) :], strict=True):
            found = self._read(waiting, states)
            outcomes += [] if found is None else [found]
        return outcomes

    def _grow(self) -> list[tuple[Sequence, TokenTree]]:
        """Return every text's tree; where growth failed, the text has left."""
        for sequence in self._running:
            if sequence.drafter is not None:
                sequence.drafter.rewind()  # the tree of a pass that was not made
        growths = [(sequence.rules.growth(sequence), sequence.drafter) for sequence in self._running]
        found = grow_batched(growths, _expand)
        trees: list[tuple[Sequence, TokenTree]] = []
        for sequence, tree in zip(list(self._running), found, strict=True):
            if isinstance(tree, TokenTree):
                trees.append((sequence, tree))
            else:
                self._untold.append(self._failed(sequence, tree))
        return trees

    def _share_out_prompt_rows(self, *, has_trees: bool) -> None:
        """Let prompts have rows in the pass, the first to come first."""
        room = PROMPT_ROWS if has_trees else ALL_PROMPT_ROWS
        for index, reading in enumerate(self._reading):
            unread = reading.sequence.target.num_unread
            reading.rows = unread if index == 0 and not has_trees else min(unread, max(0, room))
            room -= reading.rows

    def _stepped(self, sequence: Sequence, tree: TokenTree, accepted: AcceptedPath, cost: PassCost) -> Outcome:
        step = StepResult(
            tokens=accepted.tokens,
            logprobs=accepted.logprobs,
            finish=sequence.finish,
            num_started=accepted.num_started,
            num_accepted=accepted.num_proposed,
            num_drafted=tree.num_nodes - 1,
            path=accepted.path,
            is_prefill=False,
            num_texts=cost.num_texts,
            grow_s=cost.grow_s,
            target_s=cost.target_s,
            rest_s=cost.rest_s,
        )
        if sequence.tuning is not None:
            sequence.tuning.learn(step)
        if sequence.finish is not None:
            self.leave(sequence)
        return Outcome(sequence=sequence, step=step)

    def _read(self, reading: _Reading, hidden: Tensor) -> Outcome | None:
        """Take in rows of a prompt; the last ones bring the first token."""
        sequence = reading.sequence
        sequence.target.took_in(reading.rows)
        if sequence.target.num_unread:
            return None
        if reading.goes_on:
            self._reading.remove(reading)
            self._go_on(sequence)
            return None
        looked = time.perf_counter()
        try:
            logits = sequence.target.logits(hidden[-1:])[0]
            refuse_nan(logits.amax())
            tokens = sequence.rules.begin(sequence, logits)
            logprobs = sequence.logprobs(logits[None], tokens)
        except Exception as error:
            return self._failed(sequence, error)
        self._reading.remove(reading)
        if sequence.finish is None:
            self._running.append(sequence)
        assert reading.started is not None
        return Outcome(
            sequence=sequence,
            step=StepResult(
                tokens=tokens,
                logprobs=logprobs,
                finish=sequence.finish,
                num_cached=sequence.target.num_kept,
                num_drafted=0,
                is_prefill=True,
                grow_s=0.0,
                target_s=looked - reading.started,
                rest_s=time.perf_counter() - looked,
            ),
        )

    def _go_on(self, sequence: Sequence) -> None:
        sequence.rules.go_on(sequence)
        self._running.append(sequence)

    def _failed(self, sequence: Sequence, error: Exception) -> Outcome:
        self.leave(sequence)
        return Outcome(sequence=sequence, error=error)


def _num_pending(sequence: Sequence) -> int:
    """Return how many of the text's tokens the draft has not read."""
    return sequence.drafter.num_pending if isinstance(sequence.drafter, LanguageModelDrafter) else 0


def _expand(expansions: abc.Sequence[Expansion]) -> abc.Sequence[Distributions | EdgespecError]:
    """Ask the drafts of all texts at once where they are one model."""
    models = [drafter for drafter, _, _ in expansions if isinstance(drafter, LanguageModelDrafter)]
    if len(models) == len(expansions):
        return expand_batched(
            [(drafter, tokens, rows) for drafter, (_, tokens, rows) in zip(models, expansions, strict=True)]
        )
    return one_by_one(expansions)
