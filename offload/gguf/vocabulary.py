"""The tokens of a GGUF file, and which of them end a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.gguf.header import GgufHeader, TextList
from offload.gguf.settings import not_read

CONTROL, USER_DEFINED = 3, 4  # types of tokens that are found whole in a text
# A file names one end; llama.cpp ends texts at these too, where they are control tokens.
END_TEXTS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<EOT>",
    "<|end_of_text|>", "<|eom_id|>", "<end_of_utterance>", "<turn|>",
}  # fmt: skip
END_KEYS = ("eos", "eot", "eom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What tells how texts become tokens."""

    model: str  # "gpt2" is byte-level byte-pair, "llama" is SentencePiece's, of pieces with scores
    pre: str  # how texts are split before
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    settings: dict[str, Any]  # the others, without "tokenizer.ggml."


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """Return the file's vocabulary; raises CheckpointError where it is not whole."""
    start = "tokenizer.ggml."
    own = {key.removeprefix(start): value for key, value in header.settings.items() if key.startswith(start)}
    tokens, merges = (found.read() if isinstance(found := own.pop(key, None), TextList) else [] for key in _LISTS)
    types, scores = own.pop("token_type", [1] * len(tokens)), own.pop("scores", [])
    if not tokens or len(types) != len(tokens) or len(scores) not in {0, len(tokens)}:
        raise not_read(header, f"has {len(tokens)} tokens, {len(types)} types and {len(scores)} scores of them")
    model, pre = str(own.pop("model", "")), str(own.pop("pre", "default"))
    return Vocabulary(model=model, pre=pre, tokens=tokens, types=types, merges=merges, scores=scores, settings=own)


_LISTS = ("tokens", "merges")


def end_tokens(header: GgufHeader) -> list[int]:
    """Return the ids that end a text, by llama.cpp's rule."""
    stated = [header.settings.get(f"tokenizer.ggml.{key}_token_id") for key in END_KEYS]
    ends = {token for token in stated if isinstance(token, int)}
    if isinstance(header.settings.get("tokenizer.ggml.tokens"), TextList):
        found = read_vocabulary(header)
        kinds = zip(found.tokens, found.types, strict=True)
        ends |= {number for number, (text, kind) in enumerate(kinds) if kind == CONTROL and text in END_TEXTS}
    return sorted(ends)
