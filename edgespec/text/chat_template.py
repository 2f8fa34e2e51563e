"""The messages of a conversation become token ids: through the model's chat template, or as one plain text.

Without a template a conversation is one text that two sides write in turns: each message begins on a line of its
own where the text before it does not end with one, and an answer continues the text right behind what was asked.
Answers keep the tokens that they were made of, so that they are read as they were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "edgespec-probe"
Role = Literal["system", "user", "assistant"]
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # a text, token ids, or messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    token_ids: tuple[int, ...] = ()  # of an answer: what the model made, its stop token left out
    is_interrupted: bool = False


def template_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    *,
    values: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the ids up to where the next answer begins; the template reads `values` beside the messages.

    Raises EdgespecError without a template, or where it fails.
    """
    if not tokenizer.chat_template:
        raise EdgespecError(
            "E_CHAT_TEMPLATE",
            "the model's tokenizer has no chat template.",
            "Give the prompt as text, or use `raw=True`.",
        )
    said: list[dict[str, Any]] = [
        {name: text_of(value) if name == "content" else value for name, value in message.items()}
        for message in messages
    ]
    try:
        if reads_parts(tokenizer):
            said = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                for message in said
                if message.get("content")
            ]
        ids: Any = tokenizer.apply_chat_template(
            said,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **(values or {}),
        )
    except Exception as error:  # a template is a program of the model's, and may raise anything
        raise EdgespecError(
            "E_CHAT_TEMPLATE", f"the model's chat template fails ({error}).", "Use `raw=True`."
        ) from error
    return list(ids)


def text_of(content: object, where: str = "a message") -> object:
    """Return a message's content as it is, and one in parts as one text, a part a line.

    Raises EdgespecError for parts that are images, sounds or anything else: only the text part of a model is run.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) and kind == "text" else None
        if not isinstance(text, str):
            named = f"of type '{kind}'" if isinstance(kind, str) else "without a type"
            raise EdgespecError(
                "E_PROMPT_INVALID",
                f"{where} has a part {named}, and only text is read.",
                "Keep the parts of type text.",
            )
        texts.append(text)
    return "\n".join(texts)


def reads_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template wants a message's content as parts, and would lose a plain text."""
    message = {"role": "user", "content": PROBE}
    try:
        return PROBE not in tokenizer.apply_chat_template([message], tokenize=False)
    except Exception:  # a template is a program of the model's: one that fails says why when it is used
        return False


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Return a prompt's ids, whatever its form; raises EdgespecError where it has none."""
    ids = list(tokenizer.encode(prompt)) if isinstance(prompt, str) else _listed_ids(tokenizer, prompt)
    if not ids:
        raise EdgespecError("E_PROMPT_EMPTY", "the prompt has no tokens.", "Give at least one character.")
    return ids


def _listed_ids(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Any]) -> list[int]:
    numbers = [item for item in prompt if isinstance(item, int)]
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if len(numbers) + len(messages) < len(prompt) or (numbers and messages):
        raise TypeError("a prompt is a text, token ids, or messages")
    return template_ids(tokenizer, messages) if messages else numbers


def plain_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return the ids of the messages as one text; each message is encoded alone, never two together."""
    ids: list[int] = []
    before = ""
    for message in messages:
        if message.role == "assistant":
            ids += message.token_ids or tokenizer.encode(message.content, add_special_tokens=False)
        else:
            text = f"\n{message.content}" if before and not before.endswith("\n") else message.content
            ids += tokenizer.encode(text, add_special_tokens=not ids)
        before = message.content or before
    return ids
