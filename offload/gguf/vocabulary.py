"""The tokens of a GGUF file, and which of them end a text."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload.gguf.header import MAX_SHOWN, GgufHeader, TextList
from offload.gguf.refusal import not_read

START = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens; all but the first are found whole in a text
ORDINARY = (1, 6)  # types of tokens that are made by merging: words, and single bytes
# A file names one end; llama.cpp ends texts at these too, whatever type the file gives them.
END_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>",
    "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>",
    "<REPO>", "<reponame>", "<|file_sep|>",
}  # fmt: skip
# Gemma has a token for the tag of a page: these are ends as control tokens alone.
END_TAGS = {"</s>", "<eos>", "<EOT>"}
# Where a model writes several of these, the one at the end is no end: gpt-oss goes on after <|end|>.
GOES_ON = (
    ({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|return|>", "<|calls|>"}, "<|end|>"),
    ({"<|call|>", "<|flush|>"}, "<|end|>"), ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"), ({"<|plamo:eos|>"}, "</s>"),
)  # fmt: skip
DEFAULTS = {"llama": {"unknown": 0, "bos": 1, "eos": 2}}  # of files that do not name them
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What tells how texts become tokens."""

    model: str  # "gpt2" is byte-level byte-pair, "llama" is SentencePiece's, of pieces with scores
    pre: str  # how texts are split before
    tokens: list[str]
    ids: dict[str, int]
    types: Sequence[int]
    merges: list[str]
    scores: Sequence[float]
    settings: dict[str, Any]  # the others, without "tokenizer.ggml."

    def number(self, name: str) -> int | None:
        """Return the id of the file's token with this use, as `eos`; None where there is none."""
        number = self.settings.get(f"{name}_token_id", DEFAULTS.get(self.model, {}).get(name))
        return number if type(number) is int and 0 <= number < len(self.tokens) else None

    def token(self, name: str) -> str | None:
        """Return the text of the file's token with this use."""
        number = self.number(name)
        return None if number is None else self.tokens[number]

    def ends(self) -> dict[str, int]:
        """Return the tokens that end a text, by llama.cpp's rule, and their ids."""
        stated = (self.number(name) for name in END_KEYS)
        found = {self.tokens[number]: number for number in stated if number is not None}
        found |= {token: number for token in END_TEXTS if (number := self.ids.get(token)) is not None}
        tags = {token: number for token in END_TAGS if (number := self.ids.get(token)) is not None}
        found |= {token: number for token, number in tags.items() if self.types[number] == CONTROL}
        for those, goes_on in GOES_ON:
            if those <= found.keys():
                found.pop(goes_on, None)
        return found


@functools.lru_cache(maxsize=1)
def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """Return the file's vocabulary; raises CheckpointError where it is not whole.

    The last one is remembered until `forget_vocabulary`: ends and tokenizer of a model are read one after the other.
    """
    own = {key.removeprefix(START): value for key, value in header.settings.items() if key.startswith(START)}
    tokens, merges = (found.read() if isinstance(found := own.pop(key, None), TextList) else [] for key in _LISTS)
    types, scores = own.pop("token_type", [1] * len(tokens)), own.pop("scores", [])
    if not tokens or len(types) != len(tokens) or len(scores) not in {0, len(tokens)}:
        raise not_read(header, f"has {len(tokens)} tokens, {len(types)} types and {len(scores)} scores of them")
    model, pre = str(own.pop("model", "")), str(own.pop("pre", "default"))
    for number in [number for number, token in enumerate(tokens) if not token]:
        tokens[number] = f"[EMPTY_{number}]"
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise not_read(header, f"has the token {twice[:MAX_SHOWN]!r} twice")
    return Vocabulary(
        model=model, pre=pre, tokens=tokens, ids=ids, types=types, merges=merges, scores=scores, settings=own
    )


_LISTS = ("tokens", "merges")


def forget_vocabulary() -> None:
    """Let the vocabulary go that was read last, which takes tens of MB, once its model is open."""
    read_vocabulary.cache_clear()


def end_tokens(header: GgufHeader) -> list[int]:
    """Return the ids that end a text, by llama.cpp's rule."""
    if isinstance(header.settings.get(f"{START}tokens"), TextList):
        return sorted(read_vocabulary(header).ends().values())
    stated = {header.settings.get(f"{START}{name}_token_id") for name in END_KEYS}
    return sorted(token for token in stated if isinstance(token, int))
