"""What is to be said of a chat template that does less than messages and options ask for."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from edgespec.pair.chat_templates import unread
from edgespec.text.rendering import refuses_system

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair


def template_notes(pair: ModelPair, names: Collection[str], *, has_system: bool) -> Iterator[str]:
    """Yield what is done otherwise: values that the template does not read, a system message that it refuses."""
    ignored = unread(pair.tokenizer, names)
    if ignored:
        yield f"not applied: the chat template does not read {', '.join(ignored)}"
    if has_system and refuses_system(pair.tokenizer, pair.template_args):
        yield "the chat template has no system role: the system prompt goes before the first user's message"
