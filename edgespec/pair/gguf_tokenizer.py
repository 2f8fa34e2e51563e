"""The tokenizer that a GGUF file describes, with the file's own ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from edgespec.errors import EdgespecError
from offload.gguf.header import read_gguf
from offload.gguf.vocabulary import CONTROL, USER_DEFINED, Vocabulary, read_vocabulary

WORD_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
LLAMA3 = rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{WORD_ENDS}"
QWEN2 = rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{WORD_ENDS}"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
SMOLLM = rf"\p{{N}}|{CONTRACTIONS}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
# How llama.cpp splits texts before merging, by the name in the file
SPLITS = {
    "gpt-2": GPT2, "smollm": SMOLLM, "llama-bpe": LLAMA3, "llama3": LLAMA3, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2,
}  # fmt: skip
BEGINS_BY_ITSELF = {"llama-bpe", "llama3"}  # where a file does not say whether texts begin with a token of their own
WHOLE_WORDS = {"llama-bpe", "llama3"}  # a word that is a token is not merged
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
SPACE = "\u2581"


def open_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer; raises EdgespecError for one of a kind that is not read."""
    header = read_gguf(path)
    found = read_vocabulary(header)
    if found.model == "gpt2" and found.pre in SPLITS and found.merges:
        tokenizer = _byte_level(found)
    elif found.model == "llama" and found.scores:
        tokenizer = _sentence_pieces(found)
    else:
        what = f"the tokenizer of '{path}' is '{found.model}' that splits texts like '{found.pre}', which is not read."
        fix = f"Use the model's safetensors; of '{found.model}' these are read: {', '.join(SPLITS)}."
        raise EdgespecError("E_TOKENIZER", what, fix)
    names = {ours: _token(found, f"{theirs}_token_id") for theirs, ours in SPECIAL.items()}
    _add_whole(tokenizer, found)
    _add_ends(tokenizer, found)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: token for name, token in names.items() if token is not None}
    )
    fast.chat_template = header.settings.get("tokenizer.chat_template")
    return fast


def _token(found: Vocabulary, key: str) -> str | None:
    number = found.settings.get(key)
    return found.tokens[number] if isinstance(number, int) and 0 <= number < len(found.tokens) else None


def _byte_level(found: Vocabulary) -> Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in found.merges)]
    vocab = {token: number for number, token in enumerate(found.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=found.pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLITS[found.pre]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(found: Vocabulary) -> Tokenizer:
    """Return SentencePiece's merging by scores as merges in an order."""
    vocab = {token: number for number, token in enumerate(found.tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, number in vocab.items():
        if found.types[number] == CONTROL:
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocab and right in vocab:
                ranked.append((-found.scores[number], vocab[left], vocab[right], left, right))
    ranked.sort()
    merges = [(left, right) for *_, left, right in ranked]
    unknown = _token(found, "unknown_token_id")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    has_prefix = bool(found.settings.get("add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undone = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undone, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])
    return tokenizer


def _add_whole(tokenizer: Tokenizer, found: Vocabulary) -> None:
    """Let tokens be found whole in a text; those with spaces are merged as others are."""
    kinds = list(zip(found.tokens, found.types, strict=True))
    control = [AddedToken(token, normalized=False, special=True) for token, kind in kinds if kind == CONTROL]
    own = [token for token, kind in kinds if kind == USER_DEFINED and SPACE not in token]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])


def _add_ends(tokenizer: Tokenizer, found: Vocabulary) -> None:
    """Put the tokens that begin and end every text around it."""
    by_itself = found.model == "llama" or found.pre in BEGINS_BY_ITSELF
    parts, special = ["$A"], []
    for key, default, place in (("bos", by_itself, 0), ("eos", False, 2)):
        token = _token(found, f"{key}_token_id")
        if found.settings.get(f"add_{key}_token", default) and token is not None:
            parts.insert(place, token)
            special.append((token, found.settings[f"{key}_token_id"]))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
