"""The tokenizers of GGUF files against llama.cpp's own: are the ids of a page of texts the same, and the ends of texts?

    pip install xllamacpp
    python -m scripts.check.gguf_tokenizers                               every way to split, with a vocabulary for it
    python -m scripts.check.gguf_tokenizers --splits qwen2 tekken --seed 3 -n 500
    python -m scripts.check.gguf_tokenizers MODEL.gguf ...                as the files say
    python -m scripts.check.gguf_tokenizers MODEL.gguf --splits all       a byte-level vocabulary of a model's
    python -m scripts.check.gguf_tokenizers --record tests/edgespec/pair/gguf_splits.json    what the tests compare with

The vocabulary for it is learned from texts that are not split, so that its tokens lie across all borders and every
border counts. Beside the page there are texts of random pieces. llama.cpp reads a copy of a file without weights.
Texts with a token that it alone takes for an end are left out: '</s>' where that is a word of a vocabulary.
Prints a line a file and way; exits 1 where ids differ.
"""

import argparse
import ctypes
import json
import random
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from edgespec.pair.gguf_splits import SPLITS
from edgespec.pair.gguf_tokenizer import open_gguf_tokenizer
from offload.gguf.header import TextList, read_gguf
from offload.gguf.vocabulary import START, end_tokens

NUM_SHOWN = 3  # differences of a file
MAX_TOKENS = 1 << 14
NUM_TOKENS, NUM_LEARNED = 20_000, 4000  # of the vocabulary, and texts that it is learned from
NUM_RECORDED = 1000  # tokens
MODEL = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.feed_forward_length": 64, "llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
UINT32, INT32, FLOAT32, BOOL, TEXT, LIST = 4, 5, 6, 7, 8, 9
PIECES = [
    *("a", "B", "word", "Word", "WORD", "naïve", "École", "ÉCOLE", "ß", "Ǆ", "ǅ", "ʰ", "жук", "ЖУК", "Ελλάδα", "שלום"),
    *("日本語", "ひらがな", "カタカナ", "한국어", "中文字", "ไทย", "हिन्दी", "e\u0301"),
    *("\u0301", "ﬁ", "\U0001d400\U0001d41b", "\u1e9e"),
    *("1", "12", "123", "1234567", "٣", "Ⅷ", "½", "²", "3.14", "1,000"),
    *("'s", "'S", "'ll", "'RE", "'t", "'", "\u2019s", "don't", "'\u017f", "I'm", "'d've"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u2003", "\x0b", "\x85", " " * 17),
    *(".", ",", "!?", "...", "。", "\uff0c", "\uff01", "“x”", "—", "(", ")", "$", "+=", "<=>", "`", "~", "^", "|"),
    *("/*", "//", "_", "@"),
    *("😀", "👩‍👩‍👧", "🇩🇪", "\u200d", "\ufeff", "\u200b", "\u00ad", "€", "™", "\u2581"),
    *("&&", "#!", "\\n", "%d", "{}", "[]"),
]  # fmt: skip
PAGE = [
    "", " ", "Hello, world!", "I'm sure it's what they'd've said; WE'LL SEE, DON'T they'Re?",
    "In 1984 there were 1234567 of 3.14, and 0x1F; ½ of ² in Ⅷ.", "def f(x):\n\treturn {'a': x ** 2}  # naïve\n\n\n",
    "    four spaces\n        eight\n\tTab\r\nwindows\r\n\r\n", "日本語のテキスト、中文文本。한국어 텍스트! ไทย हिन्दी",
    "École ÉCOLE naïve Straße ǅ ЖУК Жук Ελλάδα", "e\u0301 cafe\u0301 Z\u0351\u036b \u0301", "😀 👩‍👩‍👧 🇩🇪 x😀y",
    "a  b   c    d \n e  ", "trailing   ", "\n\n\n", "\u00a0nbsp\u3000wide", "https://a.b/c?d=e&f=g#h", "snake_case",
    "camelCase",
    "x=1;y=2\n/* c */ // d\n", "<b>bold</b> & <i>it</i> <s>not</s>", "\u2581literal", "1\n2\n\n3", "a\tb", "...!!!???",
    "a;\nb;\nc;\n\n;\n\n\n;\n", "'Dx 'dy 'D'd 'Do", "a\n\n\n\nb\n\n\nc", "'''\"\"\"",
]  # fmt: skip


class _Parameters(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("devices", "buffer_types")),
        *((name, ctypes.c_int32) for name in ("layers", "split", "load", "lazy", "main")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "callback", "data", "overrides")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check", "extra", "no_host", "no_alloc", "mtp")),
    ]  # of llama.h; read back before it is used


class Llama:
    """llama.cpp's library, in the package xllamacpp."""

    def __init__(self) -> None:
        import xllamacpp

        (library,) = Path(xllamacpp.__file__).parent.glob("*.so")
        self.library = ctypes.CDLL(str(library))
        pointer, number, flag = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
        self._say("llama_model_default_params", _Parameters)
        self._say("llama_model_load_from_file", pointer, ctypes.c_char_p, _Parameters)
        self._say("llama_model_get_vocab", pointer, pointer)
        self._say("llama_model_free", None, pointer)
        self._say("llama_vocab_is_eog", flag, pointer, number)
        self._say("llama_vocab_n_tokens", number, pointer)
        self._say(
            "llama_tokenize", number, pointer, ctypes.c_char_p, number, ctypes.POINTER(number), number, flag, flag
        )
        self.log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)(lambda *_: None)
        self.library.llama_log_set(self.log, None)

    def _say(self, name: str, returned: Any, *arguments: Any) -> None:
        function = getattr(self.library, name)
        function.restype, function.argtypes = returned, arguments

    def ids(self, path: Path, texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """The ids of texts, and the tokens that end one."""
        parameters = self.library.llama_model_default_params()
        parameters.vocab_only = True
        model = self.library.llama_model_load_from_file(str(path).encode(), parameters)
        if not model:
            raise SystemExit(f"llama.cpp does not read {path}")
        vocab, found = self.library.llama_model_get_vocab(model), []
        for text in texts:
            buffer, content = (ctypes.c_int32 * MAX_TOKENS)(), text.encode()
            count = self.library.llama_tokenize(vocab, content, len(content), buffer, MAX_TOKENS, True, True)
            found.append(list(buffer[:count]))
        ends = [n for n in range(self.library.llama_vocab_n_tokens(vocab)) if self.library.llama_vocab_is_eog(vocab, n)]
        self.library.llama_model_free(model)
        return found, ends


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, TextList) or (isinstance(value, list) and isinstance(value[0], str)):
        texts = value.read() if isinstance(value, TextList) else value
        return struct.pack("<IIQ", LIST, TEXT, len(texts)) + b"".join(map(_text, texts))
    if isinstance(value, list):
        kind, letter = (FLOAT32, "f") if isinstance(value[0], float) else (INT32, "i")
        return struct.pack(f"<IIQ{len(value)}{letter}", LIST, kind, len(value), *value)
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    kind, letter = (
        (BOOL, "?") if isinstance(value, bool) else (FLOAT32, "f") if isinstance(value, float) else (UINT32, "I")
    )
    return struct.pack(f"<I{letter}", kind, value)


def without_weights(path: Path, settings: Mapping[str, Any]) -> Path:
    """Write a file of settings and no tensor."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(settings))
    content = head + b"".join(_text(key) + _value(key, value) for key, value in settings.items())
    path.write_bytes(content + bytes(-len(content) % 32))
    return path


def crossing_vocabulary(texts: Sequence[str], num_tokens: int) -> dict[str, Any]:
    """Settings of a byte-level vocabulary that was learned from whole texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=letters, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    tokens = [*sorted(learned["vocab"], key=learned["vocab"].__getitem__), "<|begins|>", "<|ends|>"]
    own = {
        "model": "gpt2", "tokens": tokens, "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": [" ".join(merge) for merge in learned["merges"]], "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }  # fmt: skip
    return {**MODEL, **{f"{START}{key}": value for key, value in own.items()}}


def random_texts(count: int, seed: int) -> list[str]:
    """Texts of a few random pieces."""
    chance = random.Random(seed)
    return ["".join(chance.choices(PIECES, k=chance.randint(1, 24))) for _ in range(count)]


def main() -> int:
    """Compare all files; a difference decides the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="MODEL.gguf")
    parser.add_argument("--splits", nargs="*", default=[], help="ways to split, or 'all'; without a file all")
    parser.add_argument("-n", "--texts", type=int, default=300, help="of random pieces, beside the page [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write llama.cpp's ids of the page, and do no more")
    arguments = parser.parse_args()

    if arguments.record is not None:
        return _record(Llama(), arguments.record)
    llama, texts = Llama(), [*PAGE, *random_texts(arguments.texts, arguments.seed)]
    is_all = arguments.splits == ["all"] or not (arguments.splits or arguments.files)
    ways: list[str | None] = [*SPLITS] if is_all else arguments.splits or [None]
    sources = [(path.stem, read_gguf(path).settings) for path in arguments.files]
    made = ("made vocabulary", crossing_vocabulary([*PAGE, *random_texts(NUM_LEARNED, arguments.seed + 1)], NUM_TOKENS))
    is_wrong = False
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in sources or [made]:
            for way in ways:
                changed = {**settings, **({} if way is None else {f"{START}pre": way})}
                whole = {key: value for key, value in changed.items() if not key.startswith("split.")}
                path = without_weights(Path(folder) / "vocabulary.gguf", whole)
                is_wrong |= _compare(llama, path, f"{name} {way or ''}", texts)
    return int(is_wrong)


def _record(llama: Llama, file: Path) -> int:
    """Write a small vocabulary, the page, and llama.cpp's ids of it for every way to split."""
    settings, found = crossing_vocabulary(PAGE, NUM_RECORDED), dict[str, list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for way in SPLITS:
            path = without_weights(Path(folder) / "vocabulary.gguf", {**settings, f"{START}pre": way})
            found.setdefault(json.dumps(llama.ids(path, PAGE)[0]), []).append(way)
    lines = [f'"{" ".join(ways)}": {ids.replace(" ", "")}' for ids, ways in found.items()]
    own = {key: value for key, value in settings.items() if key.startswith(START)}
    head = f'"settings": {json.dumps(own)},\n"texts": {json.dumps(PAGE)},\n"ids": {{\n'
    file.write_text("{\n" + head + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    return 0


def _compare(llama: Llama, path: Path, name: str, texts: Sequence[str]) -> bool:
    theirs, their_ends = llama.ids(path, texts)
    tokenizer, our_ends = open_gguf_tokenizer(path), end_tokens(read_gguf(path))
    ours = [tokenizer(text)["input_ids"] for text in texts]
    its_own = set(their_ends).difference(our_ends)
    compared = [place for place in range(len(texts)) if its_own.isdisjoint(theirs[place])]
    wrong = [place for place in compared if ours[place] != theirs[place]]
    ends = "ends the same" if our_ends == their_ends else f"ends {our_ends}, llama.cpp's {their_ends}"
    print(f"{name:60} {len(compared) - len(wrong)} of {len(compared)} texts the same, {ends}", flush=True)
    for place in sorted(wrong, key=lambda place: len(texts[place]))[:NUM_SHOWN]:
        print(f"    {texts[place]!r}\n      here      {tokenizer.convert_ids_to_tokens(ours[place])}")
        print(f"      llama.cpp {tokenizer.convert_ids_to_tokens(theirs[place])}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
