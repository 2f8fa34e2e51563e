"""Settings of a step's token tree, which are frozen, checked when made, and free of torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgespec.config import MAX_TREE_SIZE, MIN_TEMPERATURE, DraftSampling, SamplingSettings, require
from edgespec.tree.policies import DEFAULT_POLICY, DRAWS, POLICIES, Draw, policy_named, users_of
from edgespec.tree.shapes import PRESETS, SMALLER, TreeShape, chain, expansion, read_shape
from edgespec.validation import check_kinds, checked

SMALLEST_SHRUNK = 8  # nodes of a tree that memory ran out for: below, plain decoding is as good
MAX_LOOKED_UP_LAYERS = 64
DEFAULT_SIZE = 64
DEFAULT_BRANCHING = (4, 2, 2, 1)
DEFAULT_DRAFT_TOKENS = 4
# Of coupled children, where any q is lossless. On the built-in pair a draft of 0.85 of the target's temperature has the
# target's token first a percent more often, at 0.6 to 1; and where the target truncates, a draft that leaves the
# truncated tokens a twentieth of its mass has the token among its 8 best 1 to 5 percent more often, and first as often.
COUPLED_DRAFT_TEMPERATURE = 0.85
COUPLED_TAIL_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """The shape of a step's token tree, fixed before the step begins: only then is the output unbiased.

    A setting that the policy does not use must be left at its default.
    """

    policy: str = DEFAULT_POLICY
    draw: Draw | None = None  # coupled | sampled | chosen; None: the policy's own
    size: int = DEFAULT_SIZE  # nodes below the root: the budget
    depth: int = 24  # layers below the root
    threshold: float = 0.0  # a slot is drawn only while its expected value reaches this
    max_children: int | None = None  # of a node; None: the policy's own
    branching: tuple[int, ...] = ()  # children of every node, by layer
    fork: tuple[int, int] | None = None  # number and length of chains
    draft_tokens: int | None = None  # length of a chain
    tree_file: Path | None = None  # a preset tree
    stop_gain: float = 0.0  # OPT-Tree's delta: draft on while a layer adds as many expected tokens
    reranked: bool = True  # without it all that EAGLE-2 drafts is verified, whatever the size: to learn from
    stop_depths: tuple[int, ...] = ()  # where Dynamic Depth Decoding looks whether to stop
    stop_log_probability: float = -1.0  # and the log-probability below which it does
    classifier: Path | None = None  # C2T's; None: the one fitted on the built-in pair
    stop_model: Path | None = None  # Improving-MCSD's decision model
    confidence: float | None = None  # beta of the classifier or of the decision model
    acceptance: Path | None = None  # measured acceptance; None: that of the built-in pair
    target_width: int = 1  # branches that the target starts; more than 1 is lossy
    draft_temperature: float | None = None  # None: the target's, or the policy's own when that is greedy
    lookup: bool = True  # what the text has had before joins the tree, where that changes no text

    def __post_init__(self) -> None:
        check_kinds(self)
        policy_named(self.policy)
        for own in fields(self):
            if getattr(self, own.name) != own.default:
                _require_used(own.name, self.policy)
        require(
            1 <= self.size <= MAX_TREE_SIZE,
            f"`size={self.size}` is not in [1, {MAX_TREE_SIZE}].",
            "Use `policy=none` to decode without a tree.",
        )
        for name, fix in {"depth": "Try 24.", "max_children": "Try 16.", "target_width": "1 is lossless."}.items():
            value = getattr(self, name)
            require(value is None or value >= 1, f"`{name}={value}` is below 1.", fix)
        require(0 <= self.threshold < 1, f"`threshold={self.threshold}` is not in [0, 1).", "0 is off.")
        self._check_draw()
        require(
            all(count >= 1 for count in self.branching),
            f"`branching={','.join(map(str, self.branching))}` has a number below 1.",
            "Write the children of a node, layer by layer: 4,2,2,1.",
        )
        if self.fork is not None:
            fork = f"`fork={'x'.join(map(str, self.fork))}`"
            require(min(self.fork) >= 1, f"{fork} has a number below 1.", "Write chains x length: 16x5.")
            is_small = math.prod(self.fork) <= MAX_TREE_SIZE
            require(is_small, f"{fork} has more than {MAX_TREE_SIZE} nodes.", SMALLER)
        require(not (self.fork and self.branching), "`fork` and `branching` are two shapes.", "Give one of them.")
        require(
            self.draft_tokens is None or 1 <= self.draft_tokens <= MAX_TREE_SIZE,
            f"`draft_tokens={self.draft_tokens}` is not in [1, {MAX_TREE_SIZE}].",
            "Try 4.",
        )
        require(self.stop_gain >= 0, f"`stop_gain={self.stop_gain}` is negative.", "0 is off.")
        require(
            all(depth >= 1 for depth in self.stop_depths),
            f"`stop_depths={','.join(map(str, self.stop_depths))}` has a depth below 1.",
            "Write depths: 4,6,8.",
        )
        require(
            math.isfinite(self.stop_log_probability) and self.stop_log_probability <= 0,
            f"`stop_log_probability={self.stop_log_probability}` is no log of a probability.",
            "Try -1.",
        )
        require(
            self.confidence is None or 0 <= self.confidence <= 1,
            f"`confidence={self.confidence}` is not in [0, 1].",
            "Try 0.5.",
        )
        require(self.lookup or self.policy != "lookup", "`policy=lookup` has `lookup` off.", "Use `policy=none`.")
        require(
            not (self.classifier and self.stop_model), "`classifier` and `stop_model` both stop a chain.", "Give one."
        )
        if self.policy == "static":
            require(
                self.tree_file is not None,
                "`policy=static` needs a tree.",
                f"Name its file, or {' or '.join(PRESETS)}: `tree_file=FILE`.",
            )
        if self.confidence is not None and not POLICIES[self.policy].has_classifier:
            require(
                self.classifier is not None or self.stop_model is not None,
                "`confidence` has nothing to decide on.",
                "Give `stop_model=FILE`, or for a chain `classifier=FILE`.",
            )
        preset_shape(self)  # a shape that is too large, or a file that is none, is named now
        require(
            self.draft_temperature is None
            or self.draft_temperature == 0
            or MIN_TEMPERATURE <= self.draft_temperature < 100,
            f"`draft_temperature={self.draft_temperature}` is neither 0 nor in [{MIN_TEMPERATURE}, 100).",
            "Leave it out to follow `temperature`.",
        )

    def _check_draw(self) -> None:
        require(self.draw in {None, *DRAWS}, f"`draw={self.draw}` is unknown.", f"Choose one of: {', '.join(DRAWS)}.")
        own = POLICIES[self.policy].draws
        drawn_so = [policy.name for policy in POLICIES.values() if self.draw in policy.draws]
        require(
            self.draw is None or self.draw in own,
            f"`policy={self.policy}` has no children of `draw={self.draw}`.",
            f"Its own: {', '.join(own)}. Policies with {self.draw} children: {', '.join(drawn_so)}.",
        )
        require(
            self.target_width == 1 or self.draw != "coupled",
            f"`target_width={self.target_width}` takes the longest of several branches, which `draw=coupled` has not.",
            "Use `draw=sampled` or `draw=chosen`.",
        )

    def uses(self, setting: str) -> bool:
        """Return whether a setting means something to the policy."""
        return POLICIES[self.policy].uses(setting)

    @property
    def children(self) -> Draw:
        """How children are drawn: by the setting, or by the policy's default."""
        return self.draw or POLICIES[self.policy].draws[0]

    @property
    def width(self) -> int:
        """The most children of a node."""
        if self.max_children is not None:
            return self.max_children
        own = POLICIES[self.policy].default_width
        return self.size if own is None else own

    @property
    def num_nodes(self) -> int:
        """The most nodes below the root."""
        if self.policy == "none":
            return 0
        if not self.reranked:
            return self.width + (self.depth - 1) * self.width**2
        shape = preset_shape(self)
        return self.size if shape is None else shape.num_nodes - 1

    @property
    def num_drafted(self) -> int:
        """The number of rows that the draft may need.

        It is more than the tree keeps, where nodes are expanded that do not stay.
        """
        return POLICIES[self.policy].drafted_per_node * (self.num_nodes + 1)

    @property
    def num_layers(self) -> int:
        """The most layers below the root."""
        if self.policy == "none":
            return 0
        if self.policy == "lookup":
            return min(self.size, MAX_LOOKED_UP_LAYERS)
        shape = preset_shape(self)
        return self.depth if shape is None else shape.depth

    @property
    def needs_draft(self) -> bool:
        """Return whether the trees are grown by a draft."""
        return POLICIES[self.policy].needs_draft

    @property
    def shares_budget(self) -> bool:
        """Return whether trees of several texts that tune themselves are the best nodes of all of them."""
        return POLICIES[self.policy].kind == "dynamic" and self.children != "sampled"

    @property
    def beta(self) -> float:
        """The confidence that a policy requires of a node."""
        return self.confidence if self.confidence is not None else POLICIES[self.policy].default_confidence

    @property
    def is_lossless(self) -> bool:
        """Return whether the output has the target's distribution."""
        return self.target_width == 1

    def within(self, largest: TreeSettings) -> TreeSettings:
        """Return these settings, or `largest`, of the same policy, if they have more nodes than that."""
        budget = POLICIES[self.policy].budget
        return largest if budget is not None and self.num_nodes > largest.num_nodes else self

    def up_to(self, deepest: int | None) -> TreeSettings:
        """Return these settings with so many layers at most, where their depth is a limit; None: any number."""
        if deepest is None or deepest >= self.depth or not self.uses("depth"):
            return self
        return replace(self, depth=deepest)

    def plain(self) -> TreeSettings:
        """Return the settings of plain decoding, which grows no tree."""
        return TreeSettings(policy="none", draft_temperature=self.draft_temperature, lookup=self.lookup)

    def smaller(self) -> TreeSettings | None:
        """Return the settings to use after memory ran out: a quarter of the nodes, then no tree, then None."""
        if self.policy == "none":
            return None
        if self.uses("size") and self.size > SMALLEST_SHRUNK:
            return replace(self, size=max(SMALLEST_SHRUNK, self.size // 4))
        return self.plain()

    def draft_sampling(self, sampling: SamplingSettings) -> DraftSampling:
        """Return how the draft proposes children: with the target's own truncation, so that q stays close to p."""
        temperature = self.draft_temperature
        if sampling.temperature == 0:
            # A greedy target ignores truncation, and still needs several different children: the draft is not greedy.
            # A classifier reads q as it was when C2T's trees were recorded, on chains too.
            own = POLICIES["c2t" if self.classifier else self.policy].greedy_draft_temperature
            return DraftSampling(temperature=own if temperature is None else temperature)
        is_coupled = self.children == "coupled"
        if temperature is None:
            temperature = sampling.temperature * (COUPLED_DRAFT_TEMPERATURE if is_coupled else 1.0)
        return DraftSampling(
            temperature=max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            tail_share=COUPLED_TAIL_SHARE if is_coupled else 0.0,
        )


@functools.lru_cache(maxsize=8)
def preset_shape(settings: TreeSettings) -> TreeShape | None:
    """Return the shape that the settings alone determine; None where size and depth are limits."""
    if settings.uses("branching"):
        layers = settings.branching or DEFAULT_BRANCHING
        if settings.fork:
            width, length = settings.fork
            layers = (width, *[1] * (length - 1))
        # The target's own branches come first: they are nodes of the pass like the draft's.
        return expansion((settings.target_width, *layers) if settings.target_width > 1 else layers)
    if settings.uses("draft_tokens"):
        return chain(settings.draft_tokens or DEFAULT_DRAFT_TOKENS)
    return read_shape(settings.tree_file) if settings.tree_file else None


def _require_used(setting: str, policy: str) -> None:
    """Raise EdgespecError for a setting that the policy does not use: it would have no effect."""
    require(
        POLICIES[policy].uses(setting),
        f"`{setting}` is not used by `policy={policy}`.",
        f"It belongs to: {users_of(setting)}.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """What a user says of trees: the settings that are given, and the profile that gives the others.

    Raises EdgespecError for settings that do not go together, or that the policy does not use.
    """

    explicit: Mapping[str, Any] = field(default_factory=dict)
    profile: str = "none"  # auto, none, or a file
    settings: TreeSettings = field(init=False)

    def __post_init__(self) -> None:
        checked("profile", self.profile, str)
        object.__setattr__(self, "settings", TreeSettings(**self.explicit))
        for name in self.explicit:
            _require_used(name, self.settings.policy)
