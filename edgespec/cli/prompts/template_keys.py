"""What a row gives to the chat template: an object of whatever that reads, and keys that tools have for some of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.inputs import shown

OBJECTS = ("template_args", "chat_template_kwargs")
SINGLE = ("documents", "reasoning_effort", "tools")  # these count above what objects say; an empty list is none


def template_args(given: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return what the template reads beside the messages; raises EdgespecError with the row and the key."""
    found: dict[str, Any] = {}
    for name in OBJECTS:
        value = given.get(name, {})
        if not isinstance(value, dict):
            what = f"{where}: {name} {shown(value)} is wrong."
            raise EdgespecError("E_SETTING", what, 'Write an object, as {"enable_thinking": false}.')
        found |= value
    return found | {name: given[name] for name in SINGLE if given.get(name)} or None
