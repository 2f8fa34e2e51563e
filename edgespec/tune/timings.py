"""What a loaded pair's steps cost: callables for `profiles.measure` to time.

All are timed at one text, so that attention has something to look back at. Each ends in a wait for
the device, as the step itself does. In a step the two models take turns, and each finds the caches full
of the other's weights: where that matters, `takes_turns` lets the other model run before.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edgespec.config import SamplingSettings
from edgespec.decode.batch import Batch
from edgespec.decode.loop import decode
from edgespec.decode.sequence import Sequence, TextSettings
from edgespec.decode.start import start_sequence
from edgespec.draft.open_drafter import open_drafter
from edgespec.engine import Engine
from edgespec.grow import batched
from edgespec.grow.policies import OpenPolicy, make_grow
from edgespec.model.target import Target
from edgespec.sampling.noise import TextNoise, generator_at
from edgespec.tree.token_tree import TokenTree, depths
from edgespec.tune.samples import Text
from edgespec.tuning.step import StepResult
from edgespec.verify.rows import refuse_nan
from profiles.measure import Task

CHILDREN = 2  # of the nodes of a tree that is only timed


def verify_tasks(
    engine: Engine, text: Text, counts: abc.Sequence[int], *, seed: int, takes_turns: bool
) -> dict[int, Task]:
    """Return tasks that time the target's passes over trees of so many nodes below the root."""
    trees = {count: _random_tree(engine, text, count, seed) for count in counts}
    prepare = functools.partial(_draft_root, engine, text) if takes_turns else _nothing

    def run(tree: TokenTree) -> Callable[[], None]:
        return lambda: refuse_nan(text.target.look(tree).amax(-1))

    return {count: Task(run=run(tree), prepare=prepare) for count, tree in trees.items()}


def prefetch_tasks(engine: Engine, text: Text, *, pause_s: float, seed: int) -> dict[str, Task]:
    """Return two tasks: a pass right after the last one, and one after a pause in which the stream could read ahead."""
    at_once = verify_tasks(engine, text, [0], seed=seed, takes_turns=False)[0]
    return {"at once": at_once, "after a pause": Task(run=at_once.run, prepare=lambda: time.sleep(pause_s))}


def draft_tasks(engine: Engine, text: Text, counts: abc.Sequence[int], *, seed: int) -> dict[int, Task]:
    """Return tasks that time draft calls of so many rows, all below the root."""
    generator = torch.Generator().manual_seed(seed)
    vocab = text.target.vocab

    def run(count: int) -> Callable[[], None]:
        tokens = torch.randint(vocab, (count,), generator=generator).to(engine.device)
        parents = torch.zeros(count, dtype=torch.long, device=engine.device)
        return lambda: refuse_nan(text.drafter.expand(tokens, parents).amax(-1))

    return {count: Task(run=run(count), prepare=functools.partial(_draft_root, engine, text)) for count in counts}


@dataclass(slots=True)
class Grown:
    """The tree that a timed growth made last."""

    tree: TokenTree | None = None
    rows: int = 0  # that the draft computed

    @property
    def num_nodes(self) -> int:
        """Count the nodes below the root."""
        assert self.tree is not None
        return self.tree.num_nodes - 1

    def inner(self) -> list[float]:
        """Count the nodes that have children, by layer from the root's on; the draft always reads the root."""
        assert self.tree is not None
        has_children = torch.zeros(self.tree.num_nodes, dtype=torch.bool, device=self.tree.tokens.device)
        has_children[0] = True
        has_children[self.tree.parents[1:]] = True
        counts: list[float] = torch.bincount(depths(self.tree.parents)[has_children]).double().tolist()
        return counts


def growth_task(
    engine: Engine,
    text: Text,
    policy: OpenPolicy,
    *,
    sampling: SamplingSettings,
    generator: torch.Generator,
    takes_turns: bool,
) -> tuple[Task, Grown]:
    """Return a task that grows one tree, and the object that holds the tree after each run."""
    noise = TextNoise(seed=0, key=0, vocab=text.target.vocab, device=engine.device)
    grow = make_grow(policy, text.drafter, sampling=sampling, device=engine.device, generator=generator, noise=noise)
    grown, plain = Grown(), _random_tree(engine, text, 0, 0)

    def prepare() -> None:
        if takes_turns:
            text.target.look(plain)
        text.drafting(policy.settings, sampling)

    def run() -> None:
        tree = batched.grown(grow(text.root, policy.settings.num_layers), text.drafter)
        int(tree.tokens[-1])  # what a pass would wait for
        grown.tree, grown.rows = tree, text.drafter.num_rows

    return Task(run=run, prepare=prepare), grown


def run_steps(
    engine: Engine, ids: abc.Sequence[int], policy: OpenPolicy, *, sampling: SamplingSettings, steps: int, seed: int
) -> list[StepResult]:
    """Run so many real steps behind a prompt; the prompt's own pass is not among them."""
    sequence = _sequence(engine, ids, policy, sampling=sampling, steps=steps, seed=seed)
    return list(itertools.islice(decode(sequence, ids), 1, steps + 1))


def run_steps_together(
    engine: Engine,
    prompts: abc.Sequence[abc.Sequence[int]],
    policy: OpenPolicy,
    *,
    sampling: SamplingSettings,
    steps: int,
    seed: int,
) -> list[list[StepResult]]:
    """Run so many real steps of texts that share each pass, and return what each step brought to the texts left."""
    batch = Batch()
    for number, ids in enumerate(prompts):
        batch.enter(_sequence(engine, ids, policy, sampling=sampling, steps=steps, seed=seed + number), ids)
    found: list[list[StepResult]] = []
    while len(found) < steps and batch.sequences:
        outcomes = batch.step()
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        gained = [outcome.step for outcome in outcomes if outcome.step is not None and not outcome.step.is_prefill]
        found += [gained] if gained else []
    return found


def _sequence(
    engine: Engine, ids: abc.Sequence[int], policy: OpenPolicy, *, sampling: SamplingSettings, steps: int, seed: int
) -> Sequence:
    """Return a text with room for so many steps, whichever paths they take."""
    settings = policy.settings
    target = Target(engine.target_model)
    drafter = None
    if settings.policy != "none":
        assert engine.draft_model is not None
        drafter = open_drafter(engine.draft_model, target, sampling=settings.draft_sampling(sampling))
    generator = generator_at(seed, 0, len(ids), engine.device)
    noise = TextNoise(seed=seed, key=0, vocab=target.vocab, device=engine.device)
    room = (steps + 1) * (settings.num_layers + 1)
    text = TextSettings(sampling=sampling, max_new_tokens=room)
    return start_sequence(target, drafter, policy, text, generator, noise)


def _draft_root(engine: Engine, text: Text) -> None:
    root = torch.tensor([text.root], device=engine.device)
    text.drafter.rewind()
    text.drafter.expand(root, torch.full_like(root, -1))


def _nothing() -> None:
    pass


def _random_tree(engine: Engine, text: Text, count: int, seed: int) -> TokenTree:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(text.target.vocab, (count + 1,), generator=generator)
    return TokenTree(
        tokens=tokens.to(engine.device),
        parents=((torch.arange(count + 1) + CHILDREN - 1) // CHILDREN - 1).to(engine.device),
        ranks=torch.zeros(count + 1, dtype=torch.long, device=engine.device),
        draw="sampled",
        draft_rows=torch.full((count + 1,), -1, device=engine.device),
    )
