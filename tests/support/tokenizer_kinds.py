"""A tiny tokenizer of every kind: models and decoders, whose tokens are what decoders look at."""

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.models import Model
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from edgespec.text.token_text import byte_letters

# What decoders look at: marks of beginnings and ends of words, punctuation that is cleaned, bytes, what is like them
WORDS = [
    *("a", "b", "é", "日本", "\ufffd", "", " ", "  ", "▁", "▁▁", "▁a", "a▁b", "##", "##b", "</w>", "b</w>"),
    ".",
    ",",
    "?",
    "!",
    "'",
    " .",
    "' ",
    "n",
    "n't",
    "'m",
    "s",
    "'s",
    "ve",
    "'ve",
    "'re",
    "t",
    "m",
    "r",
    "|",
    "<pad>",
    *("Ġ", "Ġa", "Ċ", "Ã©", "ðŁĺ", "ðŁ", "aÃ", "Ģ.", "<0x", "<0xZZ>", "x y"),
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = {token: index for index, token in enumerate(dict.fromkeys(WORDS))}
WITH_BYTES = {token: index for index, token in enumerate(dict.fromkeys([*WORDS, *BYTE_TOKENS]))}
WITH_LETTERS = {token: index for index, token in enumerate(dict.fromkeys([*WORDS, *byte_letters()]))}


def made(model: Model, *chain: decoders.Decoder, cleans: bool = False) -> Callable[[], PreTrainedTokenizerFast]:
    """A tokenizer with added tokens, special and not, whose tokens go through the decoders."""

    def make() -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(model)
        if chain:
            tokenizer.decoder = chain[0] if len(chain) == 1 else decoders.Sequence(list(chain))
        tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<é>", special=True)])
        tokenizer.add_tokens(["<tool>", "é ü", " <x>"])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            clean_up_tokenization_spaces=cleans,
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=cleans,
        )

    return make


def _bpe(vocab: dict[str, int]) -> Model:
    return models.BPE(vocab, [])


def _unigram(vocab: dict[str, int]) -> Model:
    return models.Unigram([(token, -1.0) for token in vocab], 0)


SPACES, BYTES, FUSED = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
WORD_LEVEL, WORD_PIECE = models.WordLevel(TOKENS, "a"), models.WordPiece(TOKENS, unk_token="a")
KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level BPE (GPT-2, Llama 3, Qwen)": made(_bpe(WITH_LETTERS), decoders.ByteLevel()),
    "byte-level BPE, spaces cleaned": made(_bpe(WITH_LETTERS), decoders.ByteLevel(), cleans=True),
    "byte-level BPE, ends of words": made(_bpe(WITH_LETTERS), decoders.ByteLevel(), decoders.Replace("</w>", " ")),
    "BPE with bytes (Llama 2, Mistral)": made(_bpe(WITH_BYTES), SPACES, BYTES, FUSED, decoders.Strip(" ", 1, 0)),
    "BPE with bytes, no strip (Gemma)": made(_bpe(WITH_BYTES), SPACES, BYTES, FUSED),
    "Unigram with bytes": made(_unigram(WITH_BYTES), SPACES, BYTES, FUSED, decoders.Strip(" ", 1, 0)),
    "Unigram with bytes, spaces cleaned": made(_unigram(WITH_BYTES), SPACES, BYTES, FUSED, cleans=True),
    "Unigram with bytes, Metaspace": made(_unigram(WITH_BYTES), decoders.Metaspace("▁", "always"), BYTES, FUSED),
    "Unigram, Metaspace always (T5)": made(_unigram(TOKENS), decoders.Metaspace("▁", "always")),
    "Unigram, Metaspace, spaces cleaned": made(_unigram(TOKENS), decoders.Metaspace("▁", "always"), cleans=True),
    "Unigram, Metaspace first (XGLM)": made(_unigram(TOKENS), decoders.Metaspace("▁", "first")),
    "Unigram, Metaspace never": made(_unigram(TOKENS), decoders.Metaspace("▁", "never")),
    "WordPiece (BERT)": made(WORD_PIECE, decoders.WordPiece("##", True)),
    "WordPiece, spaces cleaned": made(WORD_PIECE, decoders.WordPiece("##", True), cleans=True),
    "WordPiece, no cleaning": made(WORD_PIECE, decoders.WordPiece("##", False)),
    "WordLevel, no decoder": made(WORD_LEVEL),
    "WordLevel, spaces cleaned": made(WORD_LEVEL, cleans=True),
    "WordLevel, CTC": made(WORD_LEVEL, decoders.CTC("<pad>", "|", True)),
    "BPE, ends of words (GPT)": made(_bpe(TOKENS), decoders.BPEDecoder("</w>")),
    "BPE, strip two spaces": made(_bpe(TOKENS), SPACES, FUSED, decoders.Strip(" ", 2, 0)),
    "BPE, strip each token": made(_bpe(TOKENS), SPACES, decoders.Strip(" ", 1, 0)),
}


def whole_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, keeps_special: bool = False) -> str:
    """The tokenizer's own text; it raises for negative ids."""
    return str(tokenizer.decode([token for token in ids if token >= 0], skip_special_tokens=not keeps_special))
