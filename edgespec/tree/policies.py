"""Each policy has one record of the facts that hold for all its settings. This module is free of torch.

A policy is dynamic if the draft's distributions decide on the shape of its trees, static if the shape is fixed
beforehand, looked up if it is what the text has had before, without a draft, or none. The value of a dynamic policy's
nodes is in `grow/`.
"""

from dataclasses import dataclass
from typing import Literal

from edgespec.config import require

# Children are the best of q under the text's own noise, or drawn from q with fresh noise, or the best of q.
Draw = Literal["coupled", "sampled", "chosen"]
DRAWS: tuple[Draw, ...] = ("coupled", "sampled", "chosen")
DEFAULT_POLICY = "adaptive"

_SAMPLED_FIRST: tuple[Draw, ...] = ("sampled", "chosen", "coupled")  # as published
_EVERY_POLICYS = {"policy", "draw", "draft_temperature", "lookup"}
_LIMITS = frozenset({"size", "depth", "max_children"})
_EARLY_EXIT = frozenset({"stop_model", "confidence"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The facts of a policy."""

    name: str
    kind: Literal["dynamic", "static", "looked up", "none"]
    draws: tuple[Draw, ...] = DRAWS  # of DRAWS, the default first
    settings: frozenset[str]  # names of the tree settings that it uses, those of every policy left out
    has_classifier: bool = False  # that of the built-in pair, where none is given
    default_width: int | None = 16  # children of a node; None: as many as the tree has nodes
    default_confidence: float = 0.4  # as in Improving-MCSD
    # Rows of a finished tree, at the most that was seen on the built-in pair at 768 nodes
    drafted_per_node: int = 2
    # Of six temperatures the one of most tokens a pass on the built-in pair, for a greedy target. What adaptive trees
    # are predicted by was measured at theirs; 0.2 is of shapes whose children are not ranked by q.
    greedy_draft_temperature: float = 0.2

    def uses(self, setting: str) -> bool:
        """Return whether a tree setting means something to the policy."""
        return setting in self.settings or setting in _EVERY_POLICYS

    @property
    def needs_draft(self) -> bool:
        """Return whether its trees are grown by a draft."""
        return self.kind in {"dynamic", "static"}

    @property
    def budget(self) -> Literal["size", "draft_tokens"] | None:
        """The setting that limits the number of nodes; None where the shape alone decides it."""
        if "size" in self.settings:
            return "size"
        return "draft_tokens" if "draft_tokens" in self.settings else None


_ALL = (
    Policy(
        name="adaptive",
        kind="dynamic",
        draws=("coupled",),
        default_width=32,  # as many as are looked at together
        settings=_LIMITS | {"threshold", "stop_gain", "acceptance"},
        drafted_per_node=4,
        greedy_draft_temperature=0.6,
    ),
    Policy(
        name="dyspec",
        kind="dynamic",
        draws=("sampled",),
        settings=_LIMITS | {"threshold"},
        drafted_per_node=3,
        greedy_draft_temperature=0.6,
    ),
    Policy(
        name="opt-tree",
        kind="dynamic",
        draws=("coupled", "chosen"),
        settings=_LIMITS | {"stop_gain"},
        default_width=None,
        drafted_per_node=7,
        greedy_draft_temperature=0.8,
    ),
    Policy(
        name="eagle2",
        kind="dynamic",
        draws=("coupled", "chosen"),
        settings=_LIMITS | {"reranked", "stop_depths", "stop_log_probability"},
        default_width=10,  # the paper's own
        greedy_draft_temperature=0.8,
    ),
    Policy(
        name="c2t",
        kind="dynamic",
        draws=("coupled", "chosen"),
        settings=_LIMITS | {"classifier", "confidence"},
        has_classifier=True,
        default_width=15,  # the paper's own
        default_confidence=0.5,
        greedy_draft_temperature=0.8,
    ),
    Policy(name="sequoia", kind="static", draws=_SAMPLED_FIRST, settings=_LIMITS | {"acceptance"}),
    Policy(name="specinfer", kind="static", draws=_SAMPLED_FIRST, settings=_EARLY_EXIT | {"branching"}),
    Policy(
        name="mcsd", kind="static", draws=_SAMPLED_FIRST, settings=_EARLY_EXIT | {"branching", "fork", "target_width"}
    ),
    Policy(name="chain", kind="static", settings=_EARLY_EXIT | {"draft_tokens", "classifier"}),
    Policy(name="static", kind="static", settings=_EARLY_EXIT | {"tree_file"}),
    Policy(name="lookup", kind="looked up", draws=("coupled",), settings=frozenset({"size"})),
    Policy(name="none", kind="none", draws=("coupled",), settings=frozenset()),
)
POLICIES = {policy.name: policy for policy in _ALL}  # in the order in which people are shown them


def policy_named(name: str) -> Policy:
    """Return the record of a policy; raises EdgespecError for an unknown name."""
    require(name in POLICIES, f"`policy={name}` is unknown.", f"Choose one of: {', '.join(POLICIES)}.")
    return POLICIES[name]


def users_of(setting: str) -> str:
    """Return names of the policies that a tree setting means something to."""
    return ", ".join(policy.name for policy in _ALL if policy.uses(setting))
