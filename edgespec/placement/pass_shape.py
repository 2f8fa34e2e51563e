"""The rows that a pass reads at most, and what a draft that reads the target's hidden states keeps of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from edgespec.draft.agreement import CHECK_TOKENS
from edgespec.draft.own_parts import has_readings, reads_features, taps_of
from edgespec.draft.readings import MOST_READINGS
from edgespec.model.causal_model import CHUNK_ROWS
from edgespec.model.pass_rows import ALL_PROMPT_ROWS
from offload.skeleton import Skeleton


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The rows of one forward, over prompts or over trees, and the keys that they see."""

    prompt_rows: int
    tree_rows: int
    keys: int  # that a tree's rows are masked for
    prompt_keys: int | None = None  # that a prompt's rows are masked for; None: all of the prompt
    probs_rows: int = 0  # rows of all texts whose distributions exist at once (`draft_probs_rows`)
    num_texts: int = 1
    scores_prompts: bool = False  # whether log-probabilities of a prompt's tokens may be made of its rows
    layer_rows: int = CHUNK_ROWS  # that pass a layer at once; attention takes no more than CHUNK_ROWS

    @property
    def all_prompt_rows(self) -> int:
        """The most rows of prompts that a pass reads."""
        return max(self.prompt_rows, min(self.num_texts * self.prompt_rows, ALL_PROMPT_ROWS))


def block_rows(draft: Skeleton) -> int:
    """Return the rows of a draft's pass over a block, whose distributions all exist at once; 0 where it has none."""
    block = getattr(draft.model, "block", None)
    return 0 if block is None else int(block.size)


def least_rows(draft: Skeleton | None) -> int:
    """Return the rows of the pass in which a published draft is checked, where it is one."""
    return CHECK_TOKENS if draft is not None and has_readings(draft.model) else 0


def feature_uses(
    target: PretrainedConfig, draft: Skeleton, shape: PassShape, *, held_rows: int, dtype: torch.dtype
) -> dict[str, int]:
    """Return what the features of so many rows of all texts take, and the states that they are made of in a pass."""
    if not reads_features(draft.model):
        return {}
    width = int(draft.model.config.get_text_config(decoder=True).hidden_size)
    uses = {"target: features": held_rows * width * dtype.itemsize}
    taps = taps_of(draft.model)
    num_taps = int(has_readings(draft.model)) if taps is None else len(taps.layers)  # a reading may take one
    if num_taps:
        rows = max(shape.all_prompt_rows, shape.num_texts * shape.tree_rows, MOST_READINGS * CHECK_TOKENS)
        numbers = num_taps * (rows + CHUNK_ROWS) * int(target.hidden_size) + rows * width
        uses["target: states between layers"] = numbers * dtype.itemsize
    return uses
