"""A model's chat template: where its folder has it, another one in its place, and what may be given to it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import EdgespecError
from edgespec.validation import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from edgespec.pair.pair import ModelPair

FOR_TEMPLATES = {"tools", "documents"}  # parameters of transformers' function that the template reads


def with_template(pair: ModelPair, chat_template: str | Path | None, template_args: Mapping[str, Any]) -> ModelPair:
    """Return the pair with another template for its messages, and what each prompt gives to it.

    The template is one of the model's by its name, a file, or the text itself. Raises EdgespecError.
    """
    if chat_template is not None:
        pair.tokenizer.chat_template = _template_named(pair, chat_template)
    if template_args and not pair.tokenizer.chat_template:
        what = "`template_args` are for a chat template, and the model has none."
        raise EdgespecError("E_CHAT_TEMPLATE", what, "Leave them out, or give a `chat_template`.")
    check_template_args(pair.tokenizer, template_args)
    return dataclasses.replace(pair, template_args=dict(template_args))


def _template_named(pair: ModelPair, named: str | Path) -> str:
    known = named_templates(pair.tokenizer)
    if str(named) in known:
        return known[str(named)]
    text = named if isinstance(named, str) and "{" in named else _read(named, known)
    if "{" not in text:
        what = f"'{named}' holds no chat template: it would say nothing of any message."
        raise EdgespecError("E_CHAT_TEMPLATE", what, "Give a file in Jinja's language.")
    return text


def _read(path: str | Path, known: Collection[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        models = f"the model's own are {', '.join(sorted(known))}" if known else "the model has none by a name"
        what = f"there is no chat template '{path}': no such file can be read, and {models}."
        raise EdgespecError("E_FILE_NOT_FOUND", what, "Give a file, or a name of the model's own.") from error


def named_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the model's templates by name; none where it has only one."""
    return dict(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else {}


def check_choice(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any]) -> None:
    """Raise EdgespecError where the model has several templates, and none of them is for such messages."""
    known = named_templates(tokenizer)
    if known and "default" not in known and not (values.get("tools") is not None and "tool_use" in known):
        what = f"the model has chat templates by name, and no default: {', '.join(sorted(known))}."
        raise EdgespecError("E_CHAT_TEMPLATE", what, f"Choose one with `chat_template={min(known)}`.")


def check_template_args(tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any]) -> None:
    """Raise EdgespecError for names that transformers takes for itself, and for tools that are no objects."""
    if not values:
        return
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"} - FOR_TEMPLATES
    wrong = next((name for name in values if name in taken), None)
    if wrong is not None:
        what = f"{wrong} cannot be given to a chat template: it is set for it."
        raise EdgespecError("E_SETTING", what, "Leave it out.")
    for name in sorted(FOR_TEMPLATES & {*values}):
        if not isinstance(values[name], list) or not all(isinstance(each, dict) for each in values[name]):
            what = f"{name} {shown(values[name])} is no list of objects."
            raise EdgespecError("E_SETTING", what, f"Write {name} as a list of JSON objects.")


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the model's chat templates are, one below the other; empty without any."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template


def unread(tokenizer: PreTrainedTokenizerBase, names: Collection[str]) -> list[str]:
    """Return those of the names that no template of the model reads."""
    text = template_text(tokenizer)
    return sorted(name for name in names if not re.search(rf"\b{re.escape(name)}\b", text))


def begins_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat begins with the first token of every text, even where its template does not write it.

    A GGUF file says so, and then its template often leaves the token out. Of other models the template alone decides.
    """
    return bool(getattr(tokenizer, "begins_chats", False))
