"""Whether the ids of a target and of a draft mean the same tokens, and which of them the draft must not propose."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_DIFFERENCES_SHOWN = 3
MAX_UNSHARED = 1024  # ids; Tekken's tokenizers have a thousand that each model names anew
MISMATCH_FIX = "Use a draft of the same model family, or `policy=none` without a draft."


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a model."""

    ids: Mapping[str, int]
    added: Collection[int]  # ids of those that are not made by splitting and merging

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Return those that a tokenizer knows."""
        return cls(ids=tokenizer.get_vocab(), added=tokenizer.added_tokens_decoder.keys())


def unshared_tokens(target: Tokens, draft: Tokens) -> frozenset[int]:
    """Return the ids that are a token of one side alone, or an added token that the other calls otherwise.

    Raises EdgespecError that names the first ids that mean two ordinary tokens, and for too many of the others.
    """
    if target.ids == draft.ids:  # which tells soonest
        return frozenset()
    ours, theirs = ({index: token for token, index in one.ids.items()} for one in (target, draft))
    different = {index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index)}
    wrong = (different & ours.keys() & theirs.keys()).difference(target.added, draft.added)
    if not wrong and len(different) <= MAX_UNSHARED:
        return frozenset(different)
    wrong = wrong or different
    shown = "; ".join(
        f"id {index} is {ours.get(index)!r} in the target and {theirs.get(index)!r} in the draft"
        for index in sorted(wrong)[:NUM_DIFFERENCES_SHOWN]
    )
    what = f"the draft's token ids differ from the target's in {len(wrong)} of {len(ours)}: {shown}."
    raise EdgespecError("E_TOKENIZER_MISMATCH", what, MISMATCH_FIX)


def check_same_ids(own: Mapping[str, int], theirs: Mapping[str, int], *, vocab: int, names: tuple[Path, Path]) -> None:
    """Raise EdgespecError where a tokenizer that is given in a model's place has other ids for the model's tokens.

    `own` are the model's tokens, as far as they are known, and `vocab` is the number of its ids.
    """
    model, folder = names
    size, fix = max(theirs.values(), default=-1) + 1, "Name the tokenizer that the model was published with."
    num_own = len(own) or vocab
    if size > vocab or num_own - size > MAX_UNSHARED:
        what = f"the tokenizer of '{folder}' has {size} tokens, and '{model}' has {num_own}."
        raise EdgespecError("E_TOKENIZER", what, fix)
    different = [token for token, index in own.items() if theirs.get(token, index) != index]
    if different or (own and not own.keys() & theirs.keys()):
        shown = "; ".join(
            f"{token!r} is {theirs[token]}, not {own[token]}" for token in different[:NUM_DIFFERENCES_SHOWN]
        )
        what = f"the tokenizer of '{folder}' has other ids than '{model}': {shown or 'none of its tokens'}."
        raise EdgespecError("E_TOKENIZER", what, fix)


def unshared_note(count: int) -> str:
    """Say that the draft does not propose so many ids."""
    ids, them = ("1 token id is", "it") if count == 1 else (f"{count} token ids are", "them")
    return f"{ids} not the same in draft and target, as added tokens may be: the draft never proposes {them}"
