"""The cost of a step: measured points made into curves, and the formula over them.

    growth(tree) = sum over draft calls of draft(rows of the call) + base_s + layer_s * calls + node_s * nodes
    step(tree)   = growth + verify(nodes) - min(growth, prefetch_s) + rest_s

Texts that share a pass share its draft calls too: rows and nodes are those of all of them.

A pass over streamed layers is `max(stream, compute)`: the verify curve was measured through the stream,
so it is flat while the link is the slower one and rises where computing takes over. `prefetch_s` is
what a pass saves when the stream had time to read ahead while the tree grew.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression, nnls

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a count (nodes, or rows of a draft call), from at least one measured point.

    More never costs less: the points are made monotone (isotonic regression), the curve between them keeps
    that (PCHIP), and beyond the last point it goes on with the last slope.
    """

    counts: tuple[float, ...]  # ascending
    seconds: tuple[float, ...]

    def __call__(self, counts: ArrayLike) -> Floats:
        """Return the seconds at `counts`, in their shape."""
        wanted = np.asarray(counts, dtype=np.float64)
        if len(self.counts) == 1:
            return np.full_like(wanted, self.seconds[0])
        inside = np.clip(wanted, self.counts[0], self.counts[-1])
        beyond = np.maximum(wanted - self.counts[-1], 0) * self.slope(self.counts[-1])
        found: Floats = _interpolator(self)(inside) + beyond
        return found

    def slope(self, count: float) -> float:
        """Return the seconds that one more costs at `count`, from the measured points around it."""
        if len(self.counts) == 1:
            return 0.0
        seconds = _monotone(self)
        right = int(np.clip(np.searchsorted(self.counts, count, side="right"), 1, len(self.counts) - 1))
        return float((seconds[right] - seconds[right - 1]) / (self.counts[right] - self.counts[right - 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthCost:
    """The cost of a policy's growth beside the draft's own calls."""

    base_s: float
    layer_s: float  # a draft call
    node_s: float  # a node of the finished tree
    rows_per_inner: float  # rows that the draft computes for each node that has children in the end

    def seconds(
        self, draft: Curve, inner: ArrayLike, calls: ArrayLike, nodes: ArrayLike, *, num_texts: int = 1
    ) -> Floats:
        """Return the seconds of trees [t] with `inner` [t, layers] nodes that have children, by layer.

        The root's layer is the first. So many texts have such a tree each, and share the calls.
        """
        rows = np.asarray(inner, dtype=np.float64) * self.rows_per_inner
        rows[..., 0] = np.minimum(rows[..., 0], 1.0)  # the root alone
        drafting = np.where(rows > 0, draft(np.maximum(num_texts * rows, 1)), 0.0).sum(-1)
        node_s = num_texts * self.node_s
        found: Floats = drafting + self.base_s + self.layer_s * np.asarray(calls) + node_s * np.asarray(nodes)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The costs of a machine and a pair that all policies share, for so many texts."""

    verify: Curve  # over nodes below the root
    draft: Curve  # over rows of a call
    rest_s: float  # probabilities, verification, commit
    plain_step_s: float  # of a step without a tree
    prefetch_s: float = 0.0  # that a pass saves when the stream could read ahead
    num_texts: int = 1  # that share a pass; `verify` is then over the nodes of all of them

    def step(self, growth_s: Floats, nodes: ArrayLike) -> Floats:
        """Return the seconds of steps with trees of `nodes`, one a text, that took `growth_s` to grow together."""
        pass_s = self.verify(self.num_texts * np.asarray(nodes))
        found: Floats = growth_s + pass_s - np.minimum(growth_s, self.prefetch_s) + self.rest_s
        return found


def fit_growth(
    draft: Curve, inner: Sequence[Sequence[float]], nodes: Sequence[float], seconds: Sequence[float], rows: float
) -> GrowthCost:
    """Fit the cost of growth to timed trees by least squares, no cost below 0; `rows` is `rows_per_inner`."""
    width = max(1, *map(len, inner))  # a policy may see nothing worth drafting in any text
    padded = np.array([[*layers, *[0.0] * (width - len(layers))] for layers in inner], dtype=np.float64)
    calls = (padded > 0).sum(1)
    free = GrowthCost(base_s=0.0, layer_s=0.0, node_s=0.0, rows_per_inner=rows)
    left = np.maximum(np.asarray(seconds) - free.seconds(draft, padded, calls, nodes), 0)
    # Relative errors count: a small tree's milliseconds matter as much as a large one's.
    scale = 1 / np.maximum(np.asarray(seconds), 1e-9)
    columns = np.stack([np.ones(len(nodes)), calls, np.asarray(nodes, dtype=np.float64)], 1)
    (base_s, layer_s, node_s), _ = nnls(columns * scale[:, None], left * scale)
    return GrowthCost(base_s=float(base_s), layer_s=float(layer_s), node_s=float(node_s), rows_per_inner=rows)


@functools.lru_cache(maxsize=64)
def _interpolator(curve: Curve) -> PchipInterpolator:
    return PchipInterpolator(curve.counts, _monotone(curve))


@functools.lru_cache(maxsize=64)
def _monotone(curve: Curve) -> Floats:
    found: Floats = isotonic_regression(curve.seconds).x
    return found
