"""Settings are frozen, checked when made, and free of torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.validation import check_kinds, shown

# What users of other tools call the formats that weights can be quantised to. Without a word, weights that are
# published in four bits keep them, in the order that this machine multiplies; `none` leaves the files as they are.
QUANT_NAMES = {
    "none": "none",
    "auto": "auto",
    "nf4": "nf4",
    "4bit": "nf4",
    "bnb-4bit": "nf4",
    "int4": "int4",
    "int8": "int8",
    "8bit": "int8",
    "bnb-8bit": "int8",
}

# How the experts of a target that does not fit are moved: one by one when needed, with their layers, or not at all,
# since all are on the device, or all stay with the CPU, which computes them
EXPERTS_NAMES = ("auto", "stream", "resident", "cpu")

MAX_SEED = 2**63 - 1  # of torch's generators
MAX_TREE_SIZE = 768  # nodes below the root
DEFAULT_NEW_TOKENS = 512  # of a text
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(I?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


MIN_CONTEXT = 256  # tokens after the longest prompt that the cheapest advice still leaves
# Below this, logits divided by the temperature leave float32.
MIN_TEMPERATURE = 1e-6
MAX_LOGPROBS = 20  # alternatives of a token, as OpenAI has it
MAX_BIAS = 100  # of a logit, as OpenAI has it
LogitBias = Mapping[int | str, float] | tuple[tuple[int | str, float], ...]


def require(condition: bool, what: str, fix: str) -> None:
    """Raise EdgespecError where a setting's condition does not hold."""
    if not condition:
        raise EdgespecError("E_SETTING", what, fix)


def parse_size(text: str) -> int:
    """Return the bytes of '10GiB' (binary), '10GB' (decimal), '512MiB', '10G' (binary), '4096' (bytes)."""
    match = _SIZE.fullmatch(text.strip())
    require(match is not None, f"'{text}' is not a size.", "Write sizes like 10GiB, 512MiB or 10GB.")
    assert match is not None
    number, prefix, unit = float(match[1]), match[2].upper(), match[3].upper()
    return int(number * (1000 if prefix and unit == "B" else 1024) ** _POWERS[prefix])


def parse_quant(name: str | None, *, setting: str = "quant") -> str | None:
    """Return the quantisation that a name stands for; None where there is no name."""
    if name is None:
        return None
    known = ", ".join(QUANT_NAMES)
    require(name.lower() in QUANT_NAMES, f"`{setting}={name}` is unknown.", f"Use one of: {known}.")
    return QUANT_NAMES[name.lower()]


def parse_experts(name: str) -> str:
    """Return the name of a way to move experts; raises EdgespecError for an unknown one."""
    require(name in EXPERTS_NAMES, f"`experts={name}` is unknown.", f"Use one of: {', '.join(EXPERTS_NAMES)}.")
    return name


def check_num_texts(count: int) -> int:
    """Return a number of texts under way; raises EdgespecError for none."""
    require(count >= 1, f"`parallel={count}` is no number of texts.", "Use 1 or more.")
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The settings that make logits the distribution that tokens are drawn from."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all
    repetition_penalty: float = 1.0  # of tokens that stand in the prompt or the text; 1 is none
    presence_penalty: float = 0.0  # of tokens that stand in the new text; 0 is none
    frequency_penalty: float = 0.0  # of the same, for each time that they stand there; 0 is none
    # A token's id, or a text that is one token -> what its logit gains; kept as pairs, in order, which can be a key
    logit_bias: LogitBias = ()
    ignore_eos: bool = False  # the tokens that end a text cannot be drawn

    def __post_init__(self) -> None:
        check_kinds(self)
        require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < 100,
            f"`temperature={self.temperature}` is neither 0 nor in [{MIN_TEMPERATURE}, 100).",
            "0 is greedy.",
        )
        require(self.top_k >= 0, f"`top_k={self.top_k}` is negative.", "0 keeps all tokens.")
        require(0 < self.top_p <= 1, f"`top_p={self.top_p}` is not in (0, 1].", "1 keeps all tokens.")
        require(0 <= self.min_p <= 1, f"`min_p={self.min_p}` is not in [0, 1].", "0 keeps all tokens.")
        penalty = self.repetition_penalty
        require(0 < penalty < 100, f"`repetition_penalty={penalty}` is not in (0, 100).", "1 is none.")
        presence, frequency = self.presence_penalty, self.frequency_penalty
        require(-2 <= presence <= 2, f"`presence_penalty={presence}` is not in [-2, 2].", "0 is none.")
        require(-2 <= frequency <= 2, f"`frequency_penalty={frequency}` is not in [-2, 2].", "0 is none.")
        bias = tuple(sorted(dict(self.logit_bias).items(), key=str))
        for token, value in bias:
            require(
                token >= 0 if isinstance(token, int) else token != "",
                f"`logit_bias` has {shown(token)}, which is no token.",
                "Name a token by its id, or by its text.",
            )
            require(
                abs(value) <= MAX_BIAS,
                f"`logit_bias` of {shown(token)} is {shown(value)}, which is not in [-{MAX_BIAS}, {MAX_BIAS}].",
                f"-{MAX_BIAS} all but rules a token out.",
            )
        object.__setattr__(self, "logit_bias", bias)

    @property
    def penalises(self) -> bool:
        """Return whether logits change by the text's own tokens, or by a bias, before they are made probabilities."""
        repeats = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return repeats or bool(self.logit_bias) or self.ignore_eos

    def unpenalised(self) -> SamplingSettings:
        """Return the settings without penalties and bias: what measurements of trees are made with."""
        return SamplingSettings(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @property
    def truncates(self) -> bool:
        """Return whether some tokens may be cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSampling(SamplingSettings):
    """The settings that make a draft's logits the distribution q that children come from."""

    tail_share: float = 0.0  # of q that the tokens cut off by top-k, top-p or min-p have a part in


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """The memory that edgespec may use beyond the libraries themselves; None is the free memory, less a margin."""

    max_cpu_bytes: int | None = None
    max_gpu_bytes: int | None = None
    gpu_margin_bytes: int | None = None  # left free on the device; None: 1 GiB where no limit is given
    max_resident_layers: int | None = None  # None: as many as fit

    def __post_init__(self) -> None:
        check_kinds(self)
