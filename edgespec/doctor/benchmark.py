"""Plain decoding and trees in turn, on one loaded pair and the same prompts: how fast is each?

Both use the target as it lies in memory, so that only the way of decoding differs. Every other text is begun
by the other one, so that a machine that slows down slows both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.config import SamplingSettings
from edgespec.engine import Engine
from edgespec.tree.settings import TreeSettings

MODES = ("plain", "tree")
WARM_UP_TOKENS = 8

Progress = Callable[[int, int], None]  # texts done, texts in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One continuation and what it took."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_s: float  # until the first token, from the prompt
    decode_s: float  # from there to the last
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All prompts once, in one mode."""

    texts: tuple[Text, ...]

    @property
    def num_tokens(self) -> int:
        """New ones behind each prompt's first."""
        return sum(len(text.token_ids) - 1 for text in self.texts)

    @property
    def tokens_per_s(self) -> float:
        """While decoding; the prompts' own passes are not in it."""
        return self.num_tokens / max(1e-9, sum(text.decode_s for text in self.texts))

    @property
    def prompt_tokens_per_s(self) -> float:
        """While prompts are read."""
        return sum(text.prompt_tokens for text in self.texts) / max(1e-9, sum(text.first_s for text in self.texts))

    @property
    def tokens_per_pass(self) -> float:
        """The bonus token included."""
        return self.num_tokens / max(1, sum(text.passes for text in self.texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The middle of some measurements, and their ends."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def compare_modes(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    sampling: SamplingSettings,
    max_new_tokens: int,
    repeats: int,
    seed: int,
    progress: Progress | None = None,
) -> dict[str, list[Round]]:
    """`repeats` rounds of each mode, after a short text of each that is not counted; the trees are the engine's."""
    trees = modes(engine)
    for tree in trees.values():
        continue_one(engine, prompts[0], tree, sampling=sampling, max_new_tokens=WARM_UP_TOKENS, seed=seed)
    rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
    done, total = 0, len(MODES) * repeats * len(prompts)
    for repeat in range(repeats):
        texts: dict[str, list[Text]] = {mode: [] for mode in MODES}
        for index, ids in enumerate(prompts):
            order = MODES if (repeat + index) % 2 == 0 else MODES[::-1]
            for mode in order:
                text = continue_one(
                    engine, ids, trees[mode], sampling=sampling, max_new_tokens=max_new_tokens, seed=seed + repeat
                )
                texts[mode].append(text)
                done += 1
                if progress:
                    progress(done, total)
        for mode in MODES:
            rounds[mode].append(Round(texts=tuple(texts[mode])))
    engine.use_tree(trees["tree"])
    return rounds


def modes(engine: Engine) -> dict[str, TreeSettings | None]:
    """Both ways of decoding; None is for the engine's own trees, which may tune themselves."""
    return {"plain": engine.tree.plain(), "tree": engine.pinned_tree}


def continue_one(
    engine: Engine,
    ids: list[int],
    tree: TreeSettings | None,
    *,
    sampling: SamplingSettings,
    max_new_tokens: int,
    seed: int,
) -> Text:
    """Continue a prompt with these trees, from its first token on."""
    engine.use_tree(tree)
    result = engine.generate(ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    return Text(
        token_ids=result.token_ids,
        prompt_tokens=len(ids),
        first_s=result.time_to_first_token_s,
        decode_s=result.total_s - result.time_to_first_token_s,
        passes=len(result.passes),
    )
