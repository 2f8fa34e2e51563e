"""Running texts share every pass: each has its own tree, and prompts are read beside them.

A step has four verbs: all trees grow together, one pass over the target's weights reads them, each text's verification
accepts a path, and the path becomes part of the text. What a text yields does not depend on the others. An error in
one text ends that text alone, and what breaks a pass leaves all texts as they were.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgespec.decode.accept import AcceptedTree, accept_batched, commit
from edgespec.decode.clock import StepClock
from edgespec.decode.expand import expand
from edgespec.decode.prompt_logprobs import take_prompt_rows
from edgespec.decode.reading import ReadPrompt, share_out
from edgespec.decode.sequence import Sequence
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.grow.batched import grow_batched
from edgespec.tree.token_tree import TokenTree, depths_on_host
from edgespec.tuning.lookup_choice import shares_of_end
from edgespec.tuning.prompt_parts import PromptParts
from edgespec.tuning.step import PassCost, StepResult
from edgespec.verify.rows import refuse_nan

_step_numbers = itertools.count()


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
        self._prompts: list[ReadPrompt] = []
        self._running: list[Sequence] = []
        self._untold: list[Outcome] = []  # of texts that failed in a step that was not made
        self.others_wait = False  # whether a text that ends makes room for another

    @property
    def sequences(self) -> list[Sequence]:
        """The running texts."""
        return [*self._running, *(prompt.sequence for prompt in self._prompts)]

    @property
    def num_reading(self) -> int:
        """The number of texts whose prompt is not read yet."""
        return len(self._prompts)

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
        self._running = [other for other in self._running if other is not sequence]
        self._prompts = [prompt for prompt in self._prompts if prompt.sequence is not sequence]

    def step(self) -> list[Outcome]:
        """Make one pass for all texts, and return what each of them gained; those that ended have left."""
        num_behind = sum(_num_behind(sequence) for sequence in self._running)
        self._begin_step(num_behind)
        clock = StepClock(num_behind)
        with clock.verb("grow"):
            trees = self._grow()
        with clock.verb("read"):
            unread = [prompt for prompt in self._prompts if prompt.sequence.target.num_unread]
            known = [prompt for prompt in self._prompts if not prompt.sequence.target.num_unread]  # cached whole
            prompts = share_out(unread, self._parts, has_trees=bool(trees))
            hidden, is_finite = _read(trees, prompts)
        hidden, is_finite, trees, prompts = _without_left(hidden, is_finite, trees, prompts)
        with clock.verb("accept"):
            accepted, failed = accept_batched(trees, hidden, is_finite)
        with clock.verb("commit"):
            gained, broken = commit(accepted)
        cost = clock.cost(
            [tree for _, tree in trees],
            drafted=[tree for sequence, tree in trees if sequence.has_drafted],
            num_prompt_rows=sum(prompt.rows for prompt in prompts),
        )
        self._parts.observe(cost)
        outcomes, self._untold = self._untold, []
        outcomes += [self._failed(sequence, error) for sequence, error in (*failed, *broken)]
        if not trees:
            _observe([prompt.sequence for prompt in prompts], replace(cost, num_texts=len(prompts)))
        outcomes += self._stepped(gained, cost)
        outcomes += self._took_in(prompts, hidden[len(trees) :])
        outcomes += [self._begun(prompt) for prompt in known]
        return outcomes

    def _begin_step(self, num_behind: int) -> None:
        number, num_texts = next(_step_numbers), len(self._running)
        if self.others_wait:
            shares = [1 / max(1, num_texts)] * num_texts
        else:
            shares = shares_of_end([sequence.num_left for sequence in self.sequences])
        for sequence, share in zip(self._running, shares, strict=False):
            if sequence.tuning is not None:
                sequence.tuning.begin_step(number, num_texts, num_behind)
            if sequence.lookup is not None:
                sequence.lookup.begin_step(num_texts, share)
            sequence.target.read_anew()

    def _grow(self) -> list[tuple[Sequence, TokenTree]]:
        """Return every text's tree; where growth failed, the text has left."""
        for sequence in self._running:
            if sequence.drafter is not None:
                sequence.drafter.rewind()  # the tree of a pass that was not made
        found = grow_batched([(sequence.growth(), sequence.drafter) for sequence in self._running], expand)
        trees: list[tuple[Sequence, TokenTree]] = []
        for sequence, tree in zip(list(self._running), found, strict=True):
            if isinstance(tree, TokenTree):
                if sequence.tuning is not None and sequence.has_drafted:
                    sequence.tuning.take_tree(tree)
                trees.append((sequence, tree))
            else:
                self._untold.append(self._failed(sequence, tree))
        return trees

    def _stepped(self, gained: abc.Sequence[AcceptedTree], cost: PassCost) -> list[Outcome]:
        """Return what texts have gained, and let their trees' tuning learn from it."""
        _observe([sequence for sequence, _, _ in gained], cost)
        outcomes = []
        for one in gained:
            sequence = one[0]
            step = step_result(one, cost)
            if sequence.tuning is not None:
                sequence.tuning.learn(step)
            if sequence.lookup is not None:
                sequence.lookup.learn(step)
            if sequence.finish is not None:
                self.leave(sequence)
            outcomes.append(Outcome(sequence=sequence, step=step))
        return outcomes

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


def step_result(accepted: AcceptedTree, cost: PassCost) -> StepResult:
    """Return what a text gained by its tree, in a step of this cost."""
    sequence, tree, path = accepted
    counts = Counter(depths_on_host(tree.parents.tolist()))  # on the host, after verification has waited
    return StepResult(
        tokens=path.tokens,
        from_draft=path.from_draft,
        from_lookup=path.from_lookup,
        logprobs=path.logprobs,
        finish=sequence.finish,
        num_drafted=tree.num_nodes - 1,
        num_by_depth=tuple(counts[depth] for depth in range(1, len(counts))),
        path=path.path,
        is_prefill=False,
        num_texts=cost.num_texts,
        grow_s=cost.grow_s,
        target_s=cost.target_s,
        rest_s=cost.rest_s,
    )


def first_step(sequence: Sequence, started: float) -> StepResult:
    """Return what a text gains by its prompt, which is read, and was begun to be at a time."""
    read = time.perf_counter()
    logits = sequence.target.logits(sequence.target.prompt_end)[0]
    refuse_nan(logits.amax())
    tokens: tuple[int, ...] = ()
    if sequence.num_left:
        tokens = sequence.begin_tokens(logits)
    else:
        sequence.finish = "length"
    return StepResult(
        tokens=tokens,
        logprobs=sequence.logprobs(logits[None], tokens) if tokens else (),
        prompt_logprobs=sequence.prompt_logprobs,
        finish=sequence.finish,
        num_cached=sequence.target.num_kept,
        num_drafted=0,
        is_prefill=True,
        grow_s=0.0,
        target_s=read - started,
        rest_s=time.perf_counter() - read,
    )


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
    return hidden, torch.stack([states.amax().isfinite() for states in hidden]).tolist()


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


def _num_behind(sequence: Sequence) -> int:
    """Return how many of the text's tokens, from before the last step, the draft has not read."""
    return sequence.drafter.num_behind if isinstance(sequence.drafter, LanguageModelDrafter) else 0
