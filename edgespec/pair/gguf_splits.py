"""How texts are split before byte-pair merging, by the name that a GGUF file has for it.

Expressions are used one after the other, each on the pieces that the one before has left. Source: `llama-vocab.cpp`
and `unicode.cpp` of llama.cpp; where its expressions are simpler than a model's own, so are these.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACTIONS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
SPACES = r"\s+(?!\S)|\s+"
LINES = rf"\s*[\r\n]+|{SPACES}"
MARKS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}"
MARKS_OF_CODE = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}"
    r"\x{2B820}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
IDEOGRAPHS = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&[^\s]]+"
# Letters with cases, without those that Unicode got late, and those of mathematics
CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]]"
)

GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{MARKS}"
QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{MARKS}"
QWEN35 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}"
# Letters beyond ASCII are of both cases
UPPER, LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
CASES = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{UPPER}*{LOWER}+|{UPPER}+{LOWER}*)"
TEKKEN = rf"{CASES}|\p{{N}}|{MARKS_OF_CODE}"
GPT4O = rf"{CASES}(?:{CONTRACTIONS})?|\p{{N}}{{1,3}}|{MARKS_OF_CODE}"
DEEPSEEK3 = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + LINES
KIMI = rf"[{HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{HAN}]]+(?:{CONTRACTIONS})?|\p{{N}}{{1,3}}|{MARKS}"
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
THREES = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # digits in threes, counted from the right


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """One way to split."""

    expressions: tuple[str, ...]
    begins: bool = False  # texts begin with a token of their own where the file does not say whether they do
    keeps_words: bool = False  # a word that is a token is not merged


def _table() -> dict[str, Splits]:
    digits, deepseek3 = r"\p{N}", (r"\p{N}{1,3}", IDEOGRAPHS, DEEPSEEK3)
    ways: dict[str, tuple[str, ...]] = {
        "gpt-2 phi-2 gigachat mellum a.x-4.0 exaone4 mpt olmo jais trillion granite-docling": (GPT2,),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (digits, GPT2),
        "dbrx smaug-bpe chatglm-bpe": (LLAMA3,),
        "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": (QWEN2,),
        "qwen35": (QWEN35,),
        "gpt-4o llama4 kanana2 talkie minimax-m2": (GPT4O,),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4": deepseek3,
        "deepseek-llm": (
            r"[\r\n]", rf"\s?{CASED}+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+",
            r"\s+$", ASIAN, r"\p{N}+",
        ),
        "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, digits),
        "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
        "poro-chat bloom gpt3-finnish": (BLOOM,),
        "viking": (BLOOM, digits),
        "kimi-k2": (KIMI,),
        "tiny_aya cohere2moe": (
            THREES,
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{CONTRACTIONS})?|\p{{N}}{{1,3}}|{MARKS_OF_CODE}",
        ),
        "superbpe": (r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))"),
        "bailingmoe bailingmoe2": (
            rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{WORDS}|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|{SPACES}",
        ),
        "seed-coder": (rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}",),
        "jais-2": (
            rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
            + r"|\s",
        ),
        "exaone-moe": (
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}",
        ),
    }  # fmt: skip
    found = {name: Splits(expressions=way) for names, way in ways.items() for name in names.split()}
    for name in ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        found[name] = Splits(expressions=(LLAMA3,), begins=True, keeps_words=True)
    found["tekken"] = Splits(expressions=(TEKKEN,), begins=True, keeps_words=True)
    for name in ("glm4", "glm5"):
        found[name] = Splits(expressions=(LLAMA3,), keeps_words=True)
    found["minicpm5"] = Splits(expressions=(r"\p{N}{1,3}", QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), keeps_words=True)
    found["youtu"] = Splits(
        expressions=(
            r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|"
            r"[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|"
            r"[\x{3105}-\x{312F}]+|" + IDEOGRAPHS,
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{CONTRACTIONS})?|\p{{N}}|{MARKS_OF_CODE}",
        ),
        keeps_words=True,
    )
    return found


SPLITS = _table()
