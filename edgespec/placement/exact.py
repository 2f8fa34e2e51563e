"""What `exact` asks of trees and of mixtures, so that one seed gives one text."""

from edgespec.config import require
from edgespec.model.layer_kinds import chosen_experts
from edgespec.pair.folder import ModelFolder
from edgespec.placement.run_config import RunConfig
from edgespec.tree.settings import TreeSettings


def check_exact(tree: TreeSettings, run_config: RunConfig, target: ModelFolder | None = None) -> None:
    """Raise EdgespecError where texts would depend on their trees, or on the experts that a card keeps."""
    if not run_config.exact:
        return
    require(
        tree.policy == "none" or (tree.children == "coupled" and tree.is_lossless),
        f"`exact` texts do not depend on their trees, and those of `draw={tree.children}` do.",
        "Use `draw=coupled`, `policy=adaptive` for one, or leave `exact` out.",
    )
    has_experts = target is not None and bool(chosen_experts(target.config.get_text_config(decoder=True))[0])
    require(
        not has_experts or run_config.device.type == "cpu" or run_config.expert_mode != "auto",
        "`exact` and `experts=auto` do not go together: where an expert is computed, and so how it rounds, would "
        "depend on what the card keeps.",
        "Use `experts=stream`, or `experts=cpu`.",
    )
