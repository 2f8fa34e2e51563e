"""How many new tokens fit the context after a prompt, and which prompts begin or end in a doubtful way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgespec.config import require
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.pair.pair import ModelPair


def new_token_limit(max_context: int | None, prompt_tokens: int, max_new_tokens: int) -> tuple[int, str]:
    """Return how many new tokens fit the context, and what limits them: 'length' or 'context'.

    -1 stands for all that fit. Raises EdgespecError when none do, and for other numbers below 1.
    """
    check_length(max_new_tokens)
    if max_context is None:
        if max_new_tokens < 0:
            raise EdgespecError(
                "E_SETTING", "this model sets no context length to fill.", "Give `max_new_tokens` a number."
            )
        return max_new_tokens, "length"
    num_left = max_context - prompt_tokens
    if num_left < 1:
        what = f"the prompt has {prompt_tokens} tokens, and the context holds {max_context} with at least one new one."
        raise EdgespecError("E_CONTEXT", what, "Shorten the prompt.")
    return (max_new_tokens, "length") if 1 <= max_new_tokens <= num_left else (num_left, "context")


def check_length(max_new_tokens: int) -> None:
    """Raise EdgespecError for what is no number of new tokens."""
    what = f"`max_new_tokens={max_new_tokens}` is not a length."
    require(max_new_tokens >= 1 or max_new_tokens == -1, what, "Use 1 or more, or -1 for all that fits.")


def check_ctx_size(ctx_size: int | None, max_context: int | None) -> None:
    """Raise EdgespecError for a context that the target has no positions for."""
    if ctx_size is not None and max_context is not None and ctx_size > max_context:
        what = f"`context_tokens={ctx_size}` is more than the {max_context} positions of the target."
        raise EdgespecError("E_CONTEXT", what, f"Use {max_context} or less, or auto.")


def doubtful_ends(ids: Sequence[int], pair: ModelPair) -> list[str]:
    """Return the usual mistakes of templates and tokenizers that a prompt has, in words that follow its name."""
    found, bos = [], pair.tokenizer.bos_token_id
    if len(ids) > 1 and ids[0] == ids[1] == bos:
        found.append(f"begins with {pair.tokenizer.bos_token!r} twice: the text or its template has one of its own")
    if len(ids) > 1 and ids[-1] in pair.stop_tokens:
        token = pair.tokenizer.convert_ids_to_tokens(ids[-1])
        found.append(f"ends with {token!r}, which ends a text: the model goes on as if after a finished one")
    return found


def no_room(num_tokens: int, num_without: int, max_context: int, *, has_older: bool) -> EdgespecError:
    """Return the error of a conversation whose prompt would have `num_tokens`, with the message that is not in yet."""
    oldest = "drop the oldest turns with `compact`, or all" if has_older else "drop all turns"
    return EdgespecError(
        "E_CONTEXT",
        f"the conversation would have {num_tokens} tokens with this message ({num_without} without it), "
        f"and the context holds {max_context} with at least one of an answer.",
        f"Shorten the message, {oldest} with `clear`, or start with a larger `context_tokens`.",
    )
