"""Whether a target's own layer drafts where nobody has named a draft: memory must allow it, and it must be able to pay.

The layer is taken where some small tree would pay at the acceptance by which several drafts are compared, too
(`acceptance.py`): as named, as earlier runs here have learned it, or as published. The steps of the run decide from
there on (`tuning/`); what `edgespec profile` has measured counts above all. The sums are those of estimates
(`step_seconds.py`), at the rates of the machine (`kept_speed.py`), and come before loading.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.errors import EdgespecError
from edgespec.grow.sequoia import sequoia_table
from edgespec.placement.acceptance import AssumedAcceptance, acceptance_of_draft
from edgespec.placement.kept_speed import hardware_here
from edgespec.placement.place import PairWeights, PlacedWeights
from edgespec.placement.run_config import RunConfig
from edgespec.placement.step_seconds import pair_load, step_seconds
from edgespec.tree.settings import TreeSettings
from offload.checkpoint import Checkpoint
from profiles.hardware import Assumptions, Hardware
from profiles.roofline import achieved_rates

SIZES = (1, 2, 4, 8, 16, 32, 64)  # nodes of trees that are tried
_NAMED = "the target's own multi-token-prediction layer"

StepOf = Callable[[int, int, float], float]  # the seconds of a step with so many nodes and layers a text, and tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLayer:
    """Whether a target's own layer drafts, and why, in a line for people."""

    drafts: bool
    why: str


def acceptance_of_layer(weights: PairWeights, tree: TreeSettings, temperature: float | None) -> AssumedAcceptance:
    """Return acceptance by rank of a target's own layer; a file that has nothing of these children counts as none.

    Raises EdgespecError for a file that cannot be read.
    """
    found = acceptance_of_draft(weights, tree, temperature or None)
    return found if found.rates else acceptance_of_draft(weights, replace(tree, acceptance=None), None)


def weigh_own_layer(
    tree: TreeSettings,
    place: Callable[[TreeSettings], PlacedWeights],
    step_of: Callable[[PlacedWeights], StepOf],
    acceptance: AssumedAcceptance,
) -> OwnLayer:
    """Return whether the layer drafts these trees; `place` places it beside the target, which is alone without trees.

    Raises EdgespecError where the target alone does not fit.
    """
    alone_s = step_of(place(tree.plain()))(0, 0, 1.0)
    try:
        step_s = step_of(place(tree))
    except EdgespecError as error:
        reason = error.what.partition("\n")[0].rstrip(".:")  # below it stands the plan of a run that does not come
        return OwnLayer(drafts=False, why=f"{_NAMED} does not draft: {reason}")
    most = min(tree.num_nodes, SIZES[-1])
    table = sequoia_table(acceptance.rates, size=most, depth=tree.depth, max_children=tree.width)
    gain, nodes, cost, tokens = max(
        (tokens / cost, nodes, cost, tokens)
        for nodes in sorted({size for size in SIZES if size < most} | {most})
        for depth in range(1, min(tree.depth, nodes) + 1)
        for tokens in (table.expected_tokens(nodes, depth),)
        for cost in (step_s(nodes, depth, tokens) / alone_s,)
    )
    reckoned = (
        f"a step with {nodes} {'node' if nodes == 1 else 'nodes'} is reckoned to take {cost:.2g} times as long, and to "
        f"yield {tokens:.2g} tokens{f' by `acceptance={tree.acceptance}`' if tree.acceptance else ''}, where a first "
        f"child is right in {acceptance.rates[0]:.2g} of cases"
    )
    if gain <= 1:
        return OwnLayer(drafts=False, why=f"{_NAMED} does not draft: {reckoned}; `draft=mtp` takes it")
    return OwnLayer(drafts=True, why=f"{_NAMED} drafts: {reckoned}; `draft=none` leaves it out")


def steps_here(run_config: RunConfig, checkpoint: Checkpoint) -> Callable[[PlacedWeights], StepOf]:
    """Return what steps take on this machine, with a target of this checkpoint."""
    return steps_at(*hardware_here(run_config.device, checkpoint.files), run_config)


def steps_at(hardware: Hardware, assumptions: Assumptions, run_config: RunConfig) -> Callable[[PlacedWeights], StepOf]:
    """Return what steps take on this hardware."""
    rates = achieved_rates(hardware, assumptions.likely, assumptions, half=run_config.dtype.itemsize == 2)

    def step_of(placed: PlacedWeights) -> StepOf:
        load = pair_load(placed, run_config)

        def step_s(nodes: int, depth: int, tokens: float) -> float:
            return step_seconds(load, rates, run_config.num_texts, nodes=nodes, depth=depth, tokens=tokens).step_s

        return step_s

    return step_of
