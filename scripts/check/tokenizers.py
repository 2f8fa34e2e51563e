"""Random tokens through every kind of tokenizer: does the text come as it is made of them all, and does nothing fail?

    python -m scripts.check.tokenizers                       a tiny tokenizer of every kind
    python -m scripts.check.tokenizers -n 1000000 --folders MODEL ...

A text's tokens become text one by one, as they do for an engine. At a random place and at the end, what has come and
what would be left must together be what the tokenizer's own `decode` makes of all tokens, ids that are no token left
out, and special ones in every other text. Prints a line a kind; exits 1 when a text differs or something is raised.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.models import Model
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from edgespec.pair.pair import open_tokenizer
from edgespec.text.token_text import TokenText, byte_letters

MAX_TOKENS = 400  # of a text
NUM_BEYOND = 3  # ids on both sides of the table
# What decoders look at: marks of beginnings and ends of words, punctuation that is cleaned, bytes, what is like them
WORDS = [
    *("a", "b", "é", "日本", "\ufffd", "", " ", "  ", "▁", "▁▁", "▁a", "a▁b", "##", "##b", "</w>", "b</w>"),
    *(
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
    ),
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


@dataclass(kw_only=True)
class Counts:
    """What came of a kind's texts."""

    texts: int = 0
    tokens: int = 0
    raised: int = 0
    differing: int = 0
    step_s: float = 0.0


def random_ids(chance: random.Random, vocab: int) -> list[int]:
    """Ids, half of them from a few, so that tokens meet each other and themselves."""
    few = [chance.randrange(min(vocab, len(TOKENS))) for _ in range(chance.randint(1, 12))]
    few += [max(0, vocab - chance.randint(1, 5)) for _ in range(2)]  # added tokens, special and not
    return [
        chance.choice(few) if chance.random() < 0.5 else chance.randrange(-NUM_BEYOND, vocab + NUM_BEYOND)
        for _ in range(chance.randrange(MAX_TOKENS))
    ]


def whole_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, keeps_special: bool = False) -> str:
    """The tokenizer's own text; it raises for negative ids."""
    return str(tokenizer.decode([token for token in ids if token >= 0], skip_special_tokens=not keeps_special))


def check_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], counts: Counts, *, place: int) -> None:
    """Compare one text at a place and at its end."""
    keeps_special = bool(counts.texts % 2)
    text, came, is_different = TokenText(tokenizer, keeps_special=keeps_special), "", False
    for begin, end in ((0, place), (place, len(ids))):
        started = time.perf_counter()
        came += "".join([text.step(token) for token in ids[begin:end]])
        counts.step_s += time.perf_counter() - started
        is_different = is_different or came + text.rest() != whole_text(
            tokenizer, ids[:end], keeps_special=keeps_special
        )
    counts.differing += is_different


def check_kind(tokenizer: PreTrainedTokenizerBase, *, num_tokens: int, seed: int) -> Counts:
    """Texts of at least so many tokens together."""
    chance, counts = random.Random(seed), Counts()
    while counts.tokens < num_tokens:
        ids = random_ids(chance, len(tokenizer))
        counts.texts += 1
        counts.tokens += len(ids)
        try:
            check_text(tokenizer, ids, counts, place=chance.randint(0, len(ids)))
        except Exception as error:
            counts.raised += 1
            print(f"    {ids}: {type(error).__name__}: {error}")
    return counts


def main() -> int:
    """Check all kinds; what differs or is raised decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--tokens", type=int, default=100_000, help="of each kind [%(default)s]")
    parser.add_argument("--folders", type=Path, nargs="*", default=[], help="models whose tokenizers are checked too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    kinds = dict(KINDS)
    kinds.update({folder.name: partial(open_tokenizer, folder) for folder in arguments.folders})
    total = Counts()
    print(f"{'kind':40}{'texts':>8}{'tokens':>11}{'raised':>8}{'differing':>11}{'us a token':>12}")
    for kind, make in kinds.items():
        counts = check_kind(make(), num_tokens=arguments.tokens, seed=arguments.seed)
        _show(kind, counts)
        for name, value in vars(counts).items():
            setattr(total, name, getattr(total, name) + value)
    _show("all", total)
    return 1 if total.raised or total.differing else 0


def _show(kind: str, counts: Counts) -> None:
    us = 1e6 * counts.step_s / max(1, counts.tokens)
    print(
        f"{kind:40}{counts.texts:>8,}{counts.tokens:>11,}{counts.raised:>8,}{counts.differing:>11,}{us:>12.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
