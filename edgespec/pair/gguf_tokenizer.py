"""The tokenizer that a GGUF file describes, with the file's own ids."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from edgespec.errors import EdgespecError
from edgespec.pair.gguf_splits import SPLITS
from edgespec.pair.same_tokens import Tokens
from edgespec.pair.score_merges import cached_merges
from offload.gguf.header import GgufHeader, read_gguf
from offload.gguf.refusal import not_read
from offload.gguf.vocabulary import CONTROL, NORMAL, ORDINARY, UNKNOWN, USER_DEFINED, Vocabulary, read_vocabulary

SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
SPACE = "\u2581"
LINES = r"[^\n]+|\n+"  # pieces of Gemma 4, whose merges may hold spaces
TEMPLATE = "tokenizer.chat_template"
# Of Phi-3, whose special tokens take the spaces behind them
TAKING_SPACES, TAKING_NONE = ("phi-3", "phi3"), {"<unk>", "<s>", "<|endoftext|>"}

logger = logging.getLogger("edgespec.pair")


class _Built:
    """A tokenizer that transformers takes as it is: its copies take a second with a large vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._tokenizer


def open_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer; raises EdgespecError for one of a kind that is not read."""
    header = read_gguf(path, is_whole=False)  # a model is checked where it is opened
    found = read_vocabulary(header)
    if found.model == "gpt2" and found.pre in SPLITS and found.merges:
        tokenizer = _byte_level(found)
    elif found.model == "gemma4" and found.merges:
        tokenizer = _pieces(found, _merges(found), has_prefix=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), behavior="isolated")
    elif found.model == "llama" and found.scores:
        apart = [number for number, kind in enumerate(found.types) if kind == CONTROL]
        merges = cached_merges(found.tokens, found.ids, found.scores, apart)
        tokenizer = _pieces(found, merges, has_prefix=bool(found.settings.get("add_space_prefix", True)))
    else:
        what = f"the tokenizer of '{path}' is '{found.model}' that splits texts like '{found.pre}', which is not read."
        fix = "Name a folder that has the model's own tokenizer with `tokenizer`, or use the model's safetensors."
        raise EdgespecError("E_TOKENIZER", what, fix)
    fast = PreTrainedTokenizerFast(tokenizer_object=_Built(tokenizer))  # which takes long where tokens were added
    _add_whole(tokenizer, found, str(header.settings.get("general.name", "")))
    around = _around(found)
    _add_around(tokenizer, found, around)
    for theirs, ours in SPECIAL.items():
        setattr(fast, ours, found.token(theirs))
    fast.chat_template = _templates(header)
    fast.begins_chats = "bos" in around
    if "eos" in around and fast.chat_template:
        logger.warning(
            "'%s' asks for %r behind every text (add_eos_token): prompts that are texts have it, and chats do not, "
            "because no answer follows it",
            path, around["eos"],
        )  # fmt: skip
    return fast


def gguf_tokens(path: Path) -> Tokens:
    """Return the file's tokens, which are known even where texts are split in a way that is not read."""
    found = read_vocabulary(read_gguf(path, is_whole=False))
    return Tokens(ids=found.ids, added={number for number, kind in enumerate(found.types) if kind not in ORDINARY})


def _merges(found: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges as pairs, of tokens that there are: llama.cpp drops the others."""
    places = ((merge, merge.find(" ", 1)) for merge in found.merges)
    pairs = ((merge[:index], merge[index + 1 :]) for merge, index in places if index > 0)
    ids = found.ids
    return [pair for pair in pairs if pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids]


def _byte_level(found: Vocabulary) -> Tokenizer:
    splits = SPLITS[found.pre]
    tokenizer = Tokenizer(models.BPE(vocab=found.ids, merges=_merges(found), ignore_merges=splits.keeps_words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in splits.expressions),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(found: Vocabulary, merges: list[tuple[str, str]], *, has_prefix: bool) -> Tokenizer:
    """Return a tokenizer of characters and bytes, with a mark for each space."""
    unknown = found.token("unknown")
    tokenizer = Tokenizer(
        models.BPE(vocab=found.ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    steps = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undone = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undone, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return tokenizer


def _add_whole(tokenizer: Tokenizer, found: Vocabulary, name: str) -> None:
    """Let tokens be found whole in a text; those with spaces are merged as others are."""
    takes_spaces = any(model in name.lower() for model in TAKING_SPACES)
    named = [number for use in SPECIAL if (number := found.number(use)) is not None]
    always = {*found.ends().values(), *named}
    special, own = [], []
    numbers = {number for number, kind in enumerate(found.types) if kind != NORMAL} | always
    for number in sorted(numbers):
        token, kind = found.tokens[number], found.types[number]
        if kind in {CONTROL, UNKNOWN} or number in always:
            strips = takes_spaces and token not in TAKING_NONE
            special.append(AddedToken(token, normalized=False, special=True, rstrip=strips))
        elif kind == USER_DEFINED and SPACE not in token:
            own.append(AddedToken(token, normalized=False, rstrip=takes_spaces))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(own)


def _around(found: Vocabulary) -> dict[str, str]:
    """Return the tokens that begin and end every text, by their uses."""
    begins = found.model == "llama" or (found.pre in SPLITS and SPLITS[found.pre].begins)
    begins = bool(found.settings.get("add_bos_token", begins)) or found.model == "gemma4"
    around = {"bos": begins, "eos": bool(found.settings.get("add_eos_token", False))}
    return {name: token for name, is_used in around.items() if is_used and (token := found.token(name)) is not None}


def _add_around(tokenizer: Tokenizer, found: Vocabulary, used: dict[str, str]) -> None:
    """Put the tokens that begin and end every text around it."""
    if used:
        parts = [*([used["bos"]] if "bos" in used else []), "$A", *([used["eos"]] if "eos" in used else [])]
        special = [(token, found.number(name)) for name, token in used.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)


def _templates(header: GgufHeader) -> str | dict[str, str] | None:
    """Return the chat template, or those that have names, with the one without as the default."""
    start = f"{TEMPLATE}."
    found = {key.removeprefix(start): text for key, text in header.settings.items() if key.startswith(start)}
    if TEMPLATE in header.settings:
        found["default"] = header.settings[TEMPLATE]
    wrong = next((name for name, text in found.items() if not isinstance(text, str)), None)
    if wrong is not None:
        raise not_read(header, f"has a chat template '{wrong}' that is no text")
    return found["default"] if found.keys() == {"default"} else found or None
