"""An answer of a conversation that was cut: whether it can go on, and the tokens that it goes on after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.chat.chat_template import Message
from edgespec.errors import EdgespecError
from edgespec.text.token_ids import encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokens_so_far(tokenizer: PreTrainedTokenizerBase, answer: Message | None, *, is_whole: bool) -> tuple[int, ...]:
    """Return the tokens of an answer that goes on; raises EdgespecError for one that does not."""
    if answer is None or answer.role != "assistant":
        raise EdgespecError("E_NO_TURN", "there is no answer to go on with.", "Say something first.")
    for is_so, what in (
        (answer.calls, "calls tools, and what follows calls is their results"),
        (answer.more.get("reasoning_content") and not answer.content.strip(), "has thoughts and no text"),
        (is_whole, "is whole: the model, or a stop string, has ended it"),
    ):
        if is_so:
            raise EdgespecError("E_NO_TURN", f"the last answer {what}.", "Ask for another with `regenerate`.")
    return answer.token_ids or tuple(encoded(tokenizer, answer.content, add_special_tokens=False))
