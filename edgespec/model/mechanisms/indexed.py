"""Indexes that choose single keys for each row, by keys of their own, which stay with the text.

transformers' own code chooses, by a mask of what each row sees: it is called for few rows at once.
"""

from collections.abc import Callable, Collection
from inspect import signature
from typing import Any, ClassVar

from torch import Tensor
from transformers import PretrainedConfig

from edgespec.model.layer_kinds import kinds_of
from edgespec.model.mechanisms.first_of_equal import FirstOfEqual
from edgespec.model.mechanisms.mechanism import Mechanism, ModelParts, Uninstall, wrap_forwards
from edgespec.model.row_shares import RowShare, joined_outputs

INDEXED = "indexed_attention"
POOLED = ("index_kpool", "indexer_compress_ratio")  # keys of an index of which several make one
SCORE_BYTES = 128 << 20  # of an index's scores that exist at once
FLOAT32_BYTES = 4
SMALL_TOPK = 8  # keys that a narrow copy chooses: fewer than a trial's texts have


def layers_with(config: PretrainedConfig, kinds: Collection[str]) -> list[int]:
    """Return the layers of some kinds that keep what an index of their own is made of.

    Others may share what the index of an earlier one chose.
    """
    modes = getattr(config, "indexer_types", None) or ["full"] * len(kinds_of(config))
    pairs = enumerate(zip(kinds_of(config), modes, strict=True))
    return [layer for layer, (kind, mode) in pairs if kind in kinds and mode == "full"]


def pooled_keys(config: PretrainedConfig) -> int:
    """Return how many keys of an index make one of a block; 0 where all stay."""
    return next((getattr(config, name) for name in POOLED if getattr(config, name, None)), 0)


class KeyIndex(Mechanism):
    """Indexes of single keys."""

    kinds = frozenset({INDEXED})
    small_sizes: ClassVar = {"index_topk": SMALL_TOPK}

    def is_read(self, config: PretrainedConfig) -> bool:
        """Return whether indexes choose single keys, and no blocks."""
        return self.has_layers(config) and not pooled_keys(config)

    def unread_kinds(self, config: PretrainedConfig) -> dict[str, str]:
        """Return the kind of an older transformers, whose cache is not in our form."""
        return {"deepseek_sparse_attention": "only a newer transformers keeps in a form that is read here"}

    def install(self, parts: ModelParts) -> Uninstall:
        """Let indexes score few rows at once, and choose the first of equal keys."""
        indexers = [getattr(module, "indexer", None) for module in parts.layers.modules()]
        return wrap_forwards(
            [indexer for indexer in indexers if indexer is not None],
            lambda indexer: _in_score_chunks(indexer.forward, num_heads=indexer.n_heads),
        )

    def row_numbers(self, config: PretrainedConfig) -> list[int]:
        """Return those of a key of each index."""
        width = getattr(config, "index_head_dim", None) or 0
        return [] if pooled_keys(config) else [width for _ in layers_with(config, self.kinds)]

    def layer_facts(self, config: PretrainedConfig, layer: int) -> object:
        """Return whether a layer has an index of its own: others share what an earlier one chose."""
        return layer in layers_with(config, set(kinds_of(config)))


def _in_score_chunks(forward: Callable[..., Tensor], *, num_heads: int) -> Callable[..., Any]:
    """Return the forward of an index, which chooses keys [1, rows, k], so that it scores few rows at once.

    It has a score for each row, key and head. A chunk's own keys are the last ones that it may choose.
    """
    parameters = signature(forward)

    def chosen(*arguments: Any, **named: Any) -> Any:
        given = parameters.bind(*arguments, **named).arguments
        mask = given["attention_mask"]  # [1, rows, keys]
        _, num_rows, num_keys = mask.shape
        at_once = max(1, SCORE_BYTES // (num_heads * num_keys * FLOAT32_BYTES))
        found = []
        for first in range(0, num_rows, at_once):
            end = min(num_rows, first + at_once)
            share = RowShare(num_rows, first, end, mask)
            share.own_mask = mask[:, first:end, : num_keys - num_rows + end]
            with FirstOfEqual():
                found.append(forward(**{name: share.of(value) for name, value in given.items()}))
        return joined_outputs(found)

    return chosen
