"""An answer that others have begun: the last message is the assistant's, and the model goes on with its text.

As transformers' `continue_final_message`: the prompt ends where that text ends, without the template's end of a turn.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgespec.chat.rendering import named, with_text
from edgespec.errors import EdgespecError
from edgespec.validation import shown

_MARK = "4938-edgespec-goes-on"
FIX = "Give 'continue_final_message' false, and the message counts as whole; or end with another role."


def goes_on(messages: Sequence[Mapping[str, Any]], wish: bool | None = None) -> bool:
    """Return whether the answer goes on with the last message: the assistant's, and nothing says that it is whole.

    What says so is `wish`, or the message's own `prefix`. Raises EdgespecError where either asks for what cannot be.
    """
    last = messages[-1]
    role, prefix = last.get("role"), last.get("prefix")
    if prefix is not None and not isinstance(prefix, bool):
        what = f"'prefix' of the last message is {shown(prefix)}, which is neither true nor false."
        raise EdgespecError("E_PROMPT_INVALID", what, "Write true to go on with it, or leave it out.")
    wish = prefix if wish is None else wish
    if wish and role != "assistant":
        what = (
            f"'continue_final_message' or 'prefix' goes on with the assistant's last message, and the last is {role}'s."
        )
        raise EdgespecError("E_PROMPT_INVALID", what, "Leave it out, or end with the assistant's.")
    return role == "assistant" and wish is not False


def continued(
    messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str], *, first: int = 1
) -> str:
    """Return the prompt up to the end of the last message's text; raises EdgespecError where nothing can follow it."""
    last = with_text(messages[-1], where := named(first + len(messages) - 1, messages[-1]))
    text, thoughts = last["content"] or "", last.get("reasoning_content") or last.get("reasoning")
    for is_so, what in (
        (isinstance(text, list), "has pictures, and only a text is continued"),
        (last.get("tool_calls") or last.get("function_call"), "calls tools, and what follows calls is their results"),
        (
            thoughts and isinstance(text, str) and not text.strip(),
            "has thoughts and no text, and only a text is continued",
        ),
    ):
        if is_so:
            raise EdgespecError("E_PROMPT_INVALID", f"{where} cannot be continued: it {what}.", FIX)
    fields = {name: value for name, value in last.items() if name != "prefix"}
    whole = render([*messages[:-1], {**fields, "content": f"{text}{_MARK} "}])
    found, mark, after = whole.rpartition(_MARK)
    if not mark or not found.rstrip().endswith(text.strip()):
        what = f"{where} cannot be continued: the model's chat template writes its text otherwise."
        raise EdgespecError("E_CHAT_TEMPLATE", what, FIX)
    return found if after.startswith(" ") else found.rstrip()  # a template that trims: the model never read the blank
