"""The kind of a draft, as its config.json and the names of its tensors tell it.

The order of the questions matters: containers that say what they are come first, and a head of ours, which also has a
family's own config, before ordinary models. A kind that cannot be read is refused by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.draft.head_network import HEAD_KEY
from edgespec.errors import EdgespecError

Name = Literal["model", "head", "eagle3", "dflash", "dspark", "dflash2", "mtp", "assistant"]
SPECULATORS = "speculators_model_type"  # of config.json: a folder in the container of that library
BLOCKS = {"dflash", "dspark", "dflash2"}  # kinds that guess a block in one pass
READ_KINDS = {"model", "head", "eagle3", "assistant", *BLOCKS}
ASSISTANTS = {"gemma4_assistant", "gemma4_unified_assistant"}  # model types
NAMES = {"eagle3": "an EAGLE-3 head", "dflash": "a DFlash drafter", "dspark": "a DSpark drafter",
         "dflash2": "a DFlash2 drafter", "mtp": "a multi-token-prediction layer",
         "assistant": "a Gemma 4 assistant"}  # fmt: skip
INSTEAD = (
    "Use an EAGLE-3 head, a DFlash or DSpark drafter, a small model of the target's tokens, or a head of edgespec "
    "train head"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftKind:
    """What a draft's folder holds."""

    name: Name
    container: Literal["plain", "speculators", "file"] = "plain"

    @property
    def is_published(self) -> bool:
        """Return whether it is a published one, which reads a target's hidden states: no model, no head of ours."""
        return self.name not in {"model", "head"}


def kind_of(config: Mapping[str, Any], tensors: Collection[str], *, named: str) -> DraftKind:
    """Return the kind of a draft whose config.json and tensors' names are these.

    Raises EdgespecError, which names the draft as `named`, for a kind that cannot be read.
    """
    reason = _refused(config, tensors)
    if reason is not None:
        raise EdgespecError("E_DRAFT_FORM", f"'{named}' is {reason}.", f"{INSTEAD}.")
    stated = config.get(SPECULATORS)
    if stated is not None:
        if stated not in NAMES:
            what = f"'{named}' is a speculator of the kind {stated!r}, which is not known here."
            raise EdgespecError("E_DRAFT_FORM", what, f"{INSTEAD}.")
        return DraftKind(name=stated, container="speculators")
    if config.get("model_type") in ASSISTANTS:
        return DraftKind(name="assistant")
    is_dspark = any("DSpark" in name for name in _architectures(config)) or _projector(config) == "dspark"
    if "DFlash2DraftModel" in _architectures(config) or "selector_rank" in _inner(config):
        return DraftKind(name="dflash2")
    if is_dspark or "DFlashDraftModel" in _architectures(config) or "dflash_config" in config:
        has_bias = is_dspark or any("markov_w1" in name for name in tensors)
        return DraftKind(name="dspark" if has_bias else "dflash")
    if HEAD_KEY in config:
        return DraftKind(name="head")
    is_eagle3 = any("Eagle3" in name for name in _architectures(config)) or "draft_vocab_size" in config
    if is_eagle3 or "eagle_config" in config or any(name.startswith("midlayer.") for name in tensors):
        return DraftKind(name="eagle3")
    return DraftKind(name="model")


def check_is_read(kind: DraftKind, *, named: str) -> None:
    """Raise EdgespecError for a kind that is known, and cannot be read yet."""
    if kind.name not in READ_KINDS and kind.container != "file":
        what = f"'{named}' is {NAMES[kind.name]}, which is not read yet."
        raise EdgespecError("E_DRAFT_FORM", what, f"{INSTEAD}.")


def _architectures(config: Mapping[str, Any]) -> list[str]:
    stated = config.get("architectures")
    return [str(name) for name in stated] if isinstance(stated, list) else []


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("dflash_config")
    return inner if isinstance(inner, Mapping) else {}


def _projector(config: Mapping[str, Any]) -> str | None:
    return _inner(config).get("projector_type")


def _refused(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    """Return what a draft is that cannot be read, and why, as the rest of a sentence."""
    kind, model_type = config.get(SPECULATORS), str(config.get("model_type"))
    names = " ".join(_architectures(config))
    if kind == "peagle" or config.get("parallel_drafting") or "mask_hidden" in tensors:
        return (
            "a P-EAGLE head, which drafts all places at once from a trained mask: only heads that draft one token "
            "after another are read"
        )
    if kind == "eagle" or any(name in names for name in ("EagleSpeculator", "EagleLlama", "EAGLEModel")):
        return "an EAGLE head of the first or second version, whose layer has no norm before it: only EAGLE-3 is read"
    has_latents = "kv_lora_rank" in config or any("kv_a_proj" in name or "q_a_proj" in name for name in tensors)
    if has_latents and ("Eagle3" in names or "draft_vocab_size" in config or "eagle_config" in config):
        return "an EAGLE-3 head with latent attention (MLA): only heads with keys and values of their own are read"
    if model_type == "medusa" or any(key.startswith("medusa_num_") for key in config):
        return "a set of Medusa heads, which guess each place by itself and know no tree's tokens"
    if model_type == "hydra" or any(key.startswith("hydra_num_") for key in config):
        return "a set of Hydra heads, whose layers no published config states"
    if model_type == "mlp_speculator" or kind == "mlp_speculator":
        return "an MLP speculator, a form that newer drafts have replaced"
    if _projector(config) == "domino":
        return "a Domino drafter, whose network over chosen tokens is not known here"
    return None
