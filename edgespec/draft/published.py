"""What the folder of a published draft states, value by value; each error names the draft and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.draft.draft_kind import INSTEAD
from edgespec.errors import EdgespecError
from offload.checkpoint import TensorEntry

HARMLESS_TENSORS = re.compile(r"t2d|verifier_(lm_head|norm)\..*|.*rotary_emb\.inv_freq")
MOST = 1 << 28  # that any count of a config can be


@dataclass(frozen=True, slots=True)
class PublishedDraft:
    """A draft in errors: its kind, and its folder."""

    kind: str
    named: str

    def wrong(self, what: str) -> EdgespecError:
        """Return the error of a draft that cannot be read."""
        return EdgespecError("E_DRAFT_FORM", f"the {self.kind} '{self.named}' {what}.", f"{INSTEAD}.")

    def unknown_tensor(self, stored: str) -> EdgespecError:
        """Return the error of a tensor that has no place in a draft whose config is as it is."""
        return self.wrong(f"has a tensor '{stored}', which is no part of it as its config.json describes it")

    def flag(self, stated: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
        """Return what is stated as true or false; raises EdgespecError for anything else."""
        value = stated.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(f"states {name} = {value!r}, which is neither true nor false")
        return default if value is None else value

    def count(self, stated: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
        """Return a number of things; raises EdgespecError for what is none."""
        value = stated.get(name)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value < MOST:
            raise self.wrong(f"states {name} = {value!r}, which is no count")
        return value

    def fraction(self, stated: Mapping[str, Any], name: str) -> float | None:
        """Return a number above 0, or None where none is stated; raises EdgespecError for what is none."""
        value = stated.get(name)
        if value is not None and not (type(value) in {int, float} and 0 < value < MOST):
            raise self.wrong(f"states {name} = {value!r}, which is no number above 0")
        return None if value is None else float(value)

    def check_shapes(self, expected: Mapping[str, tuple[int, ...] | None], tensors: Mapping[str, TensorEntry]) -> None:
        """Raise EdgespecError where a tensor is missing, or has another shape; those with None may be as they are."""
        for name, shape in expected.items():
            if shape is not None and (name not in tensors or tensors[name].shape != shape):
                found = f"has {list(tensors[name].shape)}" if name in tensors else "lacks it"
                raise self.wrong(f"needs '{name}' of the shape {list(shape)}, and {found}")


def stated_verifier(config: Mapping[str, Any]) -> str | None:
    """Return the target's name, as a draft's makers wrote it; None where they did not."""
    part = config.get("speculators_config")
    verifier = part.get("verifier") if isinstance(part, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def notes_of_unknown(
    config: Mapping[str, Any], inner: Mapping[str, Any], *, known: Collection[str], known_inner: Collection[str]
) -> tuple[str, ...]:
    """Return the note that names what of a config, and of its `inner` part, is not known here."""
    part = config.get("transformer_layer_config")
    unknown = sorted({*config} - {*known}) + sorted({*inner} - {*known_inner})
    unknown += sorted({*part} - {*known}) if isinstance(part, Mapping) else []
    if not unknown:
        return ()
    return (f"states {', '.join(unknown[:8])} in its config.json, which is not known here, and not read",)
