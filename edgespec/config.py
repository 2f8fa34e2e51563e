"""Settings: frozen, checked when made, free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edgespec.errors import EdgespecError

MAX_TREE_SIZE = 768
POLICIES = ("dyspec", "none")
# What users of other tools call the formats that weights can be quantised to
QUANT_NAMES = {
    "none": None,
    "nf4": "nf4",
    "4bit": "nf4",
    "bnb-4bit": "nf4",
    "int8": "int8",
    "8bit": "int8",
    "bnb-8bit": "int8",
}

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?)(I?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


MIN_CONTEXT = 256  # tokens behind the longest prompt that the cheapest advice still leaves
# Below this, logits divided by the temperature leave float32.
MIN_TEMPERATURE = 1e-6


def _require(condition: bool, what: str, fix: str) -> None:
    if not condition:
        raise EdgespecError("E_SETTING", what, fix)


def parse_size(text: str) -> int:
    """Bytes of '10GiB' (binary), '10GB' (decimal), '512MiB', '10G' (binary), '4096' (bytes)."""
    match = _SIZE.fullmatch(text.strip())
    _require(match is not None, f"'{text}' is not a size.", "Write sizes like 10GiB, 512MiB or 10GB.")
    assert match is not None
    number, prefix, unit = float(match[1]), match[2].upper(), match[3].upper()
    return int(number * (1000 if prefix and unit == "B" else 1024) ** _POWERS[prefix])


def parse_quant(name: str | None, *, flag: str = "--quant") -> str | None:
    """The quantisation that a name stands for; None is none."""
    key = (name or "none").lower()
    _require(key in QUANT_NAMES, f"{flag} {name} is unknown.", f"Use one of: {', '.join(QUANT_NAMES)}.")
    return QUANT_NAMES[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How logits become the distribution that tokens are drawn from."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    min_p: float = 0.0  # 0 keeps all

    def __post_init__(self) -> None:
        _require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < 100,
            f"--temp {self.temperature} is neither 0 nor in [{MIN_TEMPERATURE}, 100).",
            "0 is greedy.",
        )
        _require(self.top_k >= 0, f"--top-k {self.top_k} is negative.", "0 keeps all tokens.")
        _require(0 < self.top_p <= 1, f"--top-p {self.top_p} is not in (0, 1].", "1 keeps all tokens.")
        _require(0 <= self.min_p <= 1, f"--min-p {self.min_p} is not in [0, 1].", "0 keeps all tokens.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """The shape of a step's token tree, fixed before the step begins: only then is the output unbiased."""

    policy: str = "dyspec"
    size: int = 64  # nodes below the root: the budget
    depth: int = 24  # layers below the root, each one draft call
    threshold: float = 0.0  # a slot is drawn only while its expected value reaches this
    max_children: int = 16  # of a node
    draft_temperature: float | None = None  # None: the target's, or 0.6 when that is greedy

    def __post_init__(self) -> None:
        _require(
            self.policy in POLICIES, f"--policy {self.policy} is unknown.", f"Choose one of: {', '.join(POLICIES)}."
        )
        _require(
            1 <= self.size <= MAX_TREE_SIZE,
            f"--tree-size {self.size} is not in [1, {MAX_TREE_SIZE}].",
            "Use --policy none to decode without a tree.",
        )
        _require(self.depth >= 1, f"--tree-depth {self.depth} is below 1.", "Try 24.")
        _require(0 <= self.threshold < 1, f"--tree-threshold {self.threshold} is not in [0, 1).", "0 is off.")
        _require(self.max_children >= 1, f"--tree-width {self.max_children} is below 1.", "Try 16.")
        _require(
            self.draft_temperature is None
            or self.draft_temperature == 0
            or MIN_TEMPERATURE <= self.draft_temperature < 100,
            f"--draft-temp {self.draft_temperature} is neither 0 nor in [{MIN_TEMPERATURE}, 100).",
            "Leave it out to follow --temp.",
        )

    def draft_sampling(self, sampling: SamplingSettings) -> SamplingSettings:
        """What the draft draws children from: the target's own truncation, so that q stays close to p."""
        temperature = self.draft_temperature
        if temperature is None:
            # A greedy target still wants several different children, so the draft must not be greedy too.
            temperature = sampling.temperature if sampling.temperature > 0 else 0.6
        return SamplingSettings(
            temperature=temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What edgespec may use beyond the libraries themselves; None is what is free, less a margin."""

    max_cpu_bytes: int | None = None
    max_gpu_bytes: int | None = None
    gpu_margin_bytes: int | None = None  # left free on the device; None: 1 GiB where no limit is given
    max_resident_layers: int | None = None  # None: as many as fit
