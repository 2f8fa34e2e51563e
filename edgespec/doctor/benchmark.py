"""Plain decoding and trees in turn, on one loaded pair and the same prompts: how fast is each?

All use the target as it lies in memory, so that only the way of decoding differs. Each in turn begins with a text,
so that a machine that slows down slows all.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.engine import Engine
from edgespec.text.request import TextOptions
from edgespec.tree.policies import policy_named
from edgespec.tree.settings import TreeSettings

WARM_UP_TOKENS = 8

Progress = Callable[[int, int], None]  # texts done, texts in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A continuation, and the seconds and passes that it took."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_s: float  # until the first token, from the prompt
    decode_s: float  # from there to the last
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The continuations of all prompts in one mode."""

    tree: TreeSettings
    texts: tuple[Text, ...]

    @property
    def num_tokens(self) -> int:
        """The number of new tokens, without the first one of each prompt."""
        return sum(len(text.token_ids) - 1 for text in self.texts)

    @property
    def tokens_per_s(self) -> float:
        """The rate of decoding, without the passes that read prompts."""
        return self.num_tokens / max(1e-9, sum(text.decode_s for text in self.texts))

    @property
    def prompt_tokens_per_s(self) -> float:
        """The rate at which prompts are read."""
        return sum(text.prompt_tokens for text in self.texts) / max(1e-9, sum(text.first_s for text in self.texts))

    @property
    def tokens_per_pass(self) -> float:
        """The tokens that a pass yields, the bonus token included."""
        return self.num_tokens / max(1, sum(text.passes for text in self.texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of some measurements, and their extremes."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def compare_modes(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    policies: Sequence[str] = (),
    options: TextOptions,
    repeats: int,
    progress: Progress | None = None,
) -> dict[str, list[Round]]:
    """Return `repeats` rounds of each mode, after a short text of each that is not counted.

    The trees are the engine's, and those of other `policies` of the same size; `options` have a seed. Raises
    EdgespecError for trees that do not fit the memory.
    """
    trees, own = modes(engine, policies), engine.tree
    for tree in trees.values():
        continue_one(engine, prompts[0], tree, options={**options, "max_new_tokens": WARM_UP_TOKENS})
    rounds: dict[str, list[Round]] = {mode: [] for mode in trees}
    done, total = 0, len(trees) * repeats * len(prompts)
    for repeat in range(repeats):
        texts: dict[str, list[Text]] = {mode: [] for mode in trees}
        for index, ids in enumerate(prompts):
            first = (repeat + index) % len(trees)
            for mode in [*trees][first:] + [*trees][:first]:
                seed = (options["seed"] or 0) + repeat
                texts[mode].append(continue_one(engine, ids, trees[mode], options={**options, "seed": seed}))
                done += 1
                if progress:
                    progress(done, total)
        for mode, found in texts.items():
            rounds[mode].append(Round(tree=trees[mode] or own, texts=tuple(found)))
    engine.use_tree(trees["tree"])
    return rounds


def modes(engine: Engine, policies: Sequence[str] = ()) -> dict[str, TreeSettings | None]:
    """Return the ways of decoding by name; None is for the engine's own trees, which may tune themselves."""
    own = {"plain": engine.tree.plain(), "tree": engine.pinned_tree}
    return own | {policy: tree_of(policy, engine.tree.num_nodes) for policy in policies}


def tree_of(policy: str, size: int) -> TreeSettings:
    """Return trees of a policy with `size` nodes, where it has a size; a chain has its own length."""
    limits: dict[str, Any] = {"size": size} if policy_named(policy).budget == "size" else {}
    return TreeSettings(policy=policy, **limits)


def continue_one(engine: Engine, ids: list[int], tree: TreeSettings | None, *, options: TextOptions) -> Text:
    """Continue a prompt with these trees, from its first token on."""
    engine.use_tree(tree)
    result = engine.generate(ids, **options)
    return Text(
        token_ids=result.token_ids,
        prompt_tokens=len(ids),
        first_s=result.time_to_first_token_s,
        decode_s=result.total_s - result.time_to_first_token_s,
        passes=len(result.passes),
    )
