"""What passes and growing trees cost here and now, learned from a run's own steps.

Seconds are those of a curve times a speed. The curve forgets slowly; the speed is the median of the last steps, so a
machine that is slow for a while is slow at all sizes. One hiccup moves neither.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.draft.calls import BY_LAYER, DraftCalls
from edgespec.tuning.lookup_gain import LookupGain
from edgespec.tuning.step import PassCost
from edgespec.tuning.tokens_by_size import MeanTree

REMEMBERED = 9  # times of a size: the median of an odd number
SPEED_STEPS = 5
OLD_PASSES = 48  # after this number of others, all times of a size count as one
MEMORY = 0.97  # of the sums that growth is fitted to, a tree
PRIOR = 0.5  # of a tree: how much is made of the first guess
NODES_A_CALL = 16  # that cost about as much as a draft call, until it is known
READ_ROWS = 256  # that a draft has to read for its seconds to count as much as all before them
SWEEPS = 4  # of the fit, which starts where the last one ended
MAX_SURPRISE = 1.0  # of a tree's log of seconds
FEW = 4  # rows whose cost is that of a row more
NEAR = 8  # times the rows
FIRST_ROW = 0.25  # of a text's share of a step: what a row more is taken to add until one is timed
FLAT = 0.75  # of the seconds of the most rows that were timed: the fewest take at least as long
SURE = 3  # times from which a median counts against its neighbours
MAX_ABOVE = 2.0  # that one time may be above the proportion of the next smaller size: more is a hiccup


@dataclass(slots=True)
class _Size:
    """Rows of nearly one count."""

    rows: float = 0.0
    logs: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # of seconds at the speed of then
    median: float = 0.0
    least_s: float = math.inf  # that any has taken
    last_pass: int = 0

    @property
    def state(self) -> tuple[float, float, int]:
        """What a curve takes from it."""
        return self.rows, self.median, min(len(self.logs), SURE)

    def add(self, rows: float, log_s: float) -> None:
        """Note one time; of two, the shorter one counts, because hiccups are long."""
        self.logs.append(log_s)
        self.rows += (rows - self.rows) / len(self.logs)
        self.median = statistics.median_low(self.logs)


class Speed:
    """The ratio of the last steps' seconds to the expected ones."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=SPEED_STEPS)
        self.log, self.factor = 0.0, 1.0

    def add(self, log_ratio: float) -> None:
        """Note one step."""
        self._logs.append(log_ratio)
        self.log = statistics.median_low(self._logs)
        self.factor = math.exp(self.log)


class PassCosts:
    """Seconds of a pass over its rows: medians of few sizes. `known` are rows and seconds from elsewhere."""

    def __init__(self, known: Iterable[tuple[float, float]] = ()) -> None:
        self._sizes: dict[int, _Size] = {}
        self._speed = Speed()
        self._num_passes = 0
        self._points: list[tuple[float, float]] = []  # rows ascending, seconds at speed 1; none: to be made
        self._seconds: dict[float, float] = {}  # of rows at speed 1, until the points change
        for rows, seconds in known:
            for _ in range(SURE):
                self._sizes.setdefault(_size_of(rows), _Size()).add(rows, math.log(seconds))

    def observe(self, rows: float, seconds: float) -> None:
        """Learn from one pass."""
        log_s = math.log(max(seconds, 1e-9))
        self._num_passes += 1
        size = self._sizes.get(_size_of(rows))
        if size is None:
            size = self._sizes[_size_of(rows)] = _Size()
        if self._num_passes - size.last_pass > OLD_PASSES:
            size.logs = deque([size.median] if size.logs else [], REMEMBERED)
        size.last_pass = self._num_passes
        if len(size.logs) >= SURE:
            self._speed.add(log_s - size.median)
        before = size.state
        size.add(rows, log_s - self._speed.log)
        size.least_s = min(size.least_s, seconds)
        if size.state != before:
            self._points, self._seconds = [], {}

    @property
    def is_known(self) -> bool:
        """Return whether any pass has been timed."""
        return bool(self._sizes)

    @property
    def is_flat(self) -> bool:
        """Return whether passes of several sizes have been timed, and twice the rows take hardly longer."""
        points = self._points = self._points or self._curve()
        if len(points) < 2 or points[-1][0] < 2 * points[0][0]:
            return False
        return points[0][1] >= FLAT * points[-1][1]

    def is_timed_within(self, rows: float) -> bool:
        """Return whether any pass of at most about this number of rows has been timed."""
        return any(size <= _size_of(rows) for size in self._sizes)

    def is_timed_above(self, rows: float) -> bool:
        """Return whether passes of some more rows have been timed; those of far more say little of these."""
        found = (
            len(known.logs) for size, known in self._sizes.items() if _size_of(rows) < size <= _size_of(NEAR * rows)
        )
        return sum(found) >= SURE

    def times_seen(self, rows: float) -> int:
        """Return the number of known times of about this number of rows."""
        size = self._sizes.get(_size_of(rows))
        return 0 if size is None else len(size.logs)

    def slowness(self, rows: float) -> float:
        """Return how many times the least seconds of about this number of rows they take now; 1 where none is known."""
        size = self._sizes.get(_size_of(rows))
        return 1.0 if size is None or size.least_s == math.inf else max(1.0, self.seconds(rows) / size.least_s)

    def seconds(self, rows: float) -> float:
        """Return the present seconds of this number of rows: a line between known sizes, which goes on beyond them."""
        found = self._seconds.get(rows)
        if found is None:
            found = self._seconds[rows] = self._line(rows) if self._sizes else 0.0
        return found * self._speed.factor

    def _line(self, rows: float) -> float:
        points = self._points = self._points or self._curve()
        if len(points) == 1:
            return points[0][1]
        end = min(max(1, bisect_left(points, (rows,))), len(points) - 1)  # of the line's two points
        left, right = points[end - 1], points[end]
        slope = (right[1] - left[1]) / (right[0] - left[0])
        if rows > right[0]:
            # Of the two the flatter line: one pass more than it takes to find out is soon over.
            slope = min(slope, (right[1] - points[0][1]) / (right[0] - points[0][0]))
            return right[1] + max(0.0, slope) * (rows - right[0])
        if rows < left[0]:
            # Passes of a row alone may never be seen; rows that are left out save no more than their share.
            return max(left[1] - max(0.0, slope) * (left[0] - rows), left[1] * rows / left[0])
        return left[1] + slope * (rows - left[0])

    def points(self) -> list[tuple[float, float]]:
        """Return rows and seconds of the sizes that are known, as they are now."""
        return [(rows, seconds * self._speed.factor) for rows, seconds in self._curve()]

    def _curve(self) -> list[tuple[float, float]]:
        """Return the curve's points; sizes that were timed once or twice are limited by their neighbours."""
        sizes = sorted(self._sizes.values(), key=lambda size: size.rows)
        seconds = [math.exp(size.median) for size in sizes]
        for index, size in enumerate(sizes):
            if index > 0 and len(size.logs) < SURE:
                most = MAX_ABOVE * seconds[index - 1] * size.rows / sizes[index - 1].rows
                seconds[index] = min(seconds[index], most)
        for index in reversed(range(len(sizes) - 1)):
            if len(sizes[index].logs) < SURE:
                seconds[index] = min(seconds[index], seconds[index + 1])
        return [(size.rows, time_s) for size, time_s in zip(sizes, seconds, strict=True)]


def _size_of(rows: float) -> int:
    """Return the number of the size: two an octave, which end at 1, 2, 3, 4, 6, 8, 12, 16 and so on.

    Kernels take rows in blocks that end there: a pass of nine can take a quarter longer than one of eight.
    """
    octave = math.ceil(math.log2(max(rows, 1.0)))
    return 2 * octave - int(rows <= 0.75 * 2.0**octave)


class GrowthCosts:
    """Seconds of growing a tree: some for the tree, some for each layer, some for each node.

    A draft call belongs to each layer, or to the tree, as the draft's `calls` have it.
    """

    def __init__(self, known: tuple[float, float, float] | None = None, *, calls: DraftCalls = BY_LAYER) -> None:
        """Begin with `known` seconds of a tree, a layer and a node, or with none."""
        self._calls = calls
        self.row_s = 0.0  # of a token that the draft has not read
        self._called = 1 if calls.num_places is None else 0  # the part that a draft call belongs to
        self._speed = Speed()
        self._seconds = list(known or (0.0, 0.0, 0.0))  # of a tree, a layer, a node, at speed 1
        self._guess = list(self._seconds)
        self._num_trees = 0 if known is None else SURE
        self._products = [[0.0] * 3 for _ in range(3)]  # of the relative errors' least squares
        self._sums = [0.0] * 3

    @property
    def num_trees(self) -> int:
        """Return the number of steps whose trees have been timed."""
        return self._num_trees

    @property
    def is_known(self) -> bool:
        """Return whether any tree has been timed."""
        return self._num_trees > 0

    def observe(self, layers: float, nodes: float, seconds: float) -> None:
        """Learn from one tree."""
        seconds = max(seconds, 1e-9)
        counts = (1.0, layers, nodes)
        few = nodes if self._called == 1 else layers + nodes  # what costs little beside a call
        call_s = seconds / (self._calls.of(layers) + few / NODES_A_CALL)
        self._num_trees += 1
        if self._num_trees == 1 or (self._num_trees <= SURE and call_s < self._guess[self._called] / 2):
            # The first tree, or one that shows that those before it were hiccups
            own_s = call_s / NODES_A_CALL
            self._guess = self._seconds = [0.0, call_s, own_s] if self._called == 1 else [call_s, own_s, own_s]
            self._speed = Speed()
            self._products, self._sums = [[0.0] * 3 for _ in range(3)], [0.0] * 3
        # A fit to trees with nodes may give a call alone no cost.
        expected_s = _dot(self._seconds, counts) or seconds
        log_ratio = math.log(seconds / expected_s)
        self._speed.add(log_ratio)
        surprise = min(MAX_SURPRISE, max(-MAX_SURPRISE, log_ratio - self._speed.log))
        usual_s = expected_s * math.exp(surprise)
        scaled = [count / usual_s for count in counts]
        for row, value in enumerate(scaled):
            self._sums[row] = MEMORY * self._sums[row] + value
            self._products[row] = [
                MEMORY * old + value * other for old, other in zip(self._products[row], scaled, strict=True)
            ]
        self._seconds = self._fitted()

    def observe_read(self, num_unread: int, seconds: float) -> None:
        """Learn what the draft took to read so many tokens."""
        self.row_s += num_unread / (num_unread + READ_ROWS) * (max(0.0, seconds) / num_unread - self.row_s)

    def seconds(self, layers: float, nodes: float) -> float:
        """Return what such a tree would take now."""
        return _dot(self._seconds, (1.0, self._calls.layers(layers), nodes)) * self._speed.factor

    def parts(self) -> tuple[float, float, float]:
        """Return the seconds of a tree, a layer and a node, as they are now."""
        tree_s, layer_s, node_s = (part * self._speed.factor for part in self._seconds)
        return tree_s, layer_s, node_s

    def _fitted(self) -> list[float]:
        """Return the least squares, drawn a little to the first guess, with no cost below 0."""
        found = list(self._seconds)
        call_s = self._guess[self._called] or self._guess[2] or 1e-9
        own_s = call_s / NODES_A_CALL
        scales = [call_s, call_s if self._called == 1 else self._guess[1] or own_s, self._guess[2] or own_s]
        for _ in range(SWEEPS):
            for row in range(3):
                weight = PRIOR / scales[row] ** 2
                rest = sum(self._products[row][other] * found[other] for other in range(3) if other != row)
                wanted = self._sums[row] - rest + weight * self._guess[row]
                found[row] = max(0.0, wanted / (self._products[row][row] + weight))
        return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))


@dataclass(slots=True)
class StepCosts:
    """The seconds of passes and draft calls, of all texts and samplings."""

    known_passes: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)  # by texts
    growth: GrowthCosts = field(default_factory=GrowthCosts)
    gain: LookupGain = field(default_factory=LookupGain)  # of looked up text
    gain_left: LookupGain = field(default_factory=LookupGain)  # and in the steps that it leaves to a draft
    _passes: dict[int, PassCosts] = field(default_factory=dict)  # by the octave of texts
    _plain_s: dict[int, float] = field(default_factory=dict)  # of the last pass of roots alone, by their number
    _roots: dict[int, tuple[float, float]] = field(default_factory=dict)  # by their number, until another pass is timed

    def passes(self, num_texts: int) -> PassCosts:
        """Return the costs of passes that about this number of texts share; at first, those of the nearest number."""
        octave = num_texts.bit_length()
        found = self._passes.get(octave)
        if found is None or not found.is_known:
            points = {texts.bit_length(): list(known) for texts, known in self.known_passes.items()}
            points |= {other: costs.points() for other, costs in self._passes.items()}
            points = {other: known for other, known in points.items() if known}
            near = min(points, key=lambda other: abs(other - octave), default=octave)
            found = self._passes[octave] = PassCosts(points.get(near, ()))
        return found

    def points(self) -> dict[int, list[tuple[float, float]]]:
        """Return the rows and seconds of passes, as they are now, by the number of texts that share them."""
        return {1 << (octave - 1): found for octave, costs in self._passes.items() if (found := costs.points())}

    def observe(self, cost: PassCost) -> None:
        """Learn from a pass of all texts."""
        seconds = cost.target_s + cost.rest_s
        self._roots.clear()
        # A prompt's rows take about what a tree's do: before the first tree they show what many rows cost.
        num_rows = cost.num_rows + cost.num_prompt_rows
        self.passes(max(1, cost.num_texts)).observe(num_rows, seconds)
        if num_rows == cost.num_texts:
            self._plain_s[num_rows] = seconds

    def roots(self, num_texts: int, most: int) -> tuple[float, float]:
        """Return what a step of roots takes, and what a row more adds to it: of few or of `most`, whichever is less."""
        found = self._roots.get(num_texts)
        if found is None:
            step_s = self.plain_s(num_texts)
            row_s = min(self.rows_s(num_texts, more) / more for more in (FEW, most))
            found = self._roots[num_texts] = step_s, max(0.0, row_s)
        return found

    def rows_s(self, num_texts: int, more: int) -> float:
        """Return what so many rows more add to a step of roots; in company none are nearly free before a few are."""
        passes, step_s = self.passes(num_texts), self.plain_s(num_texts)
        added_s = passes.seconds(num_texts + more) - step_s
        if num_texts == 1 or not passes.is_known or passes.is_timed_above(num_texts):
            return added_s
        return max(added_s, FIRST_ROW * more * step_s / num_texts)

    def row_share(self, num_texts: int) -> float:
        """Return what a row more adds to a text's part of a step of roots, by a line to the next size of passes."""
        step_s = self.plain_s(num_texts)
        added_s = self.passes(num_texts).seconds(num_texts + FEW) - step_s
        return num_texts * added_s / FEW / step_s if step_s else 0.0

    def least_plain_s(self, num_texts: int) -> float:
        """Return the least seconds of a pass of this number of texts' roots, from the timed ones.

        A pass of fewer rows takes at least its share of one of more.
        """
        return max((seconds * min(1.0, num_texts / timed) for timed, seconds in self._plain_s.items()), default=0.0)

    def of(self, tree: MeanTree, num_texts: int) -> float:
        """Return the seconds of a step with such trees, one a text."""
        nodes = num_texts * tree.nodes
        return self.passes(num_texts).seconds(num_texts + nodes) + self.growth.seconds(tree.layers, nodes)

    def plain_s(self, num_texts: int) -> float:
        """Return the seconds of a step without trees."""
        return self.passes(num_texts).seconds(num_texts)
