"""Known hardware: what data sheets say of a card, and what share of that a real pass is assumed to reach.

`builtin/` has one TOML file a card, with a source for each value; `builtin/assumptions.toml` holds everything
that is assumed instead, once for all cards. GB and TFLOP are decimal, GiB binary, as data sheets mean them.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from profiles.errors import ProfileError
from profiles.experts import INDEPENDENT, MIN_SPREAD

FOLDER = Path(__file__).parent / "builtin"
ASSUMPTIONS = "assumptions"
NUM_CLOSEST = 3
GIB = 1 << 30
# Gigatransfers a second and lane, one bit each; 128 of 130 bits are data (PCI Express base specification, 3.0 to 5.0)
PCIE_GT_PER_S = {3: 8.0, 4: 16.0, 5: 32.0}
PCIE_DATA_SHARE = 128 / 130
PCIE_LANES = {1, 2, 4, 8, 16}
# What is outside is a slip in the unit
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("memory_gib", "host_memory_gib"), (0.5, 16_384)),
    **dict.fromkeys(("memory_gb_per_s", "kernel_rows"), (1, 100_000)),
    **dict.fromkeys(("half_tflop_per_s", "float32_tflop_per_s"), (0.001, 100_000)),
    "host_disk_gb_per_s": (0.01, 1_000),
    "usable_memory": (0.5, 1),
    **dict.fromkeys(("layer_call_s", "expert_call_s"), (0, 1)),
    "noise_number_s": (0, 1e-6),
    "expert_spread": (MIN_SPREAD, INDEPENDENT),
    "host_memory_gb_per_s": (1, 10_000),
    "host_staging_gb_per_s": (0.1, 1_000),
    "wsl_locked_gib": (0, 16_384),
    "lookup_tokens": (1, 100),
    "copy_acceptance": (0.01, 0.999),
    "host_unpack_gweights_per_s": (0.01, 10_000),
    "host_tflop_per_s": (0.001, 1_000),
}
FALLING = ("layer_call_s", "expert_call_s", "expert_spread", "noise_number_s")  # from slow to fast
SHARE = (0.01, 1.0)
CARD_KEYS = ("memory_gib", "memory_gb_per_s", "half_tflop_per_s", "float32_tflop_per_s")
LINK_KEYS = ("pcie_generation", "pcie_lanes")
CASES = ("slow", "likely", "fast")
# Words of vendors, which users write or leave out
NOT_TELLING = ("nvidia", "geforce", "amd", "radeon", "apple", "gpu", "rtx", "rx")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """The packed weights of a format that a kernel multiplies in a second."""

    one_row: float
    each_row: float  # of many

    def scaled(self, share: float) -> KernelRates:
        """Return a share of both."""
        return KernelRates(one_row=share * self.one_row, each_row=share * self.each_row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A device by its data sheet; a CPU's memory is RAM, and it has no link."""

    name: str
    title: str
    device: str  # cuda | cpu
    memory_bytes: int
    memory_bytes_per_s: float
    half_flops_per_s: float  # bf16 or fp16, dense, FP32 accumulation
    float32_flops_per_s: float  # outside tensor cores
    link_bytes_per_s: float  # from RAM to the device, one way, after the line code; infinite where RAM is its memory
    link: str  # in words; empty where there is none
    sources: Mapping[str, str]  # key of the file -> where its value is from
    note: str = ""  # what a user of such a device should know
    half_memory_bytes_per_s: float | None = None  # of weights in bf16 or fp16, where products read them more slowly
    kernels: Mapping[str, KernelRates] = field(default_factory=dict)  # by the packed format, where they were measured

    def weight_bytes_per_s(self, *, half: bool) -> float:
        """Return the bytes of weights that products of few rows read in a second; `half` is for bf16 and fp16."""
        return (self.half_memory_bytes_per_s or self.memory_bytes_per_s) if half else self.memory_bytes_per_s

    def flops_per_s(self, *, half: bool) -> float:
        """Return the operations a second of large products; `half` is for bf16 and fp16."""
        return self.half_flops_per_s if half else self.float32_flops_per_s

    def shared(self, share: float) -> Hardware:
        """Return what a program has that runs for this share of the time; copies over a link do not wait for it."""
        half = self.half_memory_bytes_per_s
        return replace(
            self,
            memory_bytes_per_s=share * self.memory_bytes_per_s,
            half_memory_bytes_per_s=None if half is None else share * half,
            half_flops_per_s=share * self.half_flops_per_s,
            float32_flops_per_s=share * self.float32_flops_per_s,
            kernels={name: rates.scaled(share) for name, rates in self.kernels.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """The shares of the data sheet's rates that a pass reaches, what issuing kernels takes, and how rows spread."""

    memory: float
    compute: float
    link: float
    disk: float
    layer_call_s: float  # of a decoder layer
    expert_call_s: float  # of an expert
    expert_spread: float  # of the rows of a text over experts
    kernel_rows: float  # that a card multiplies with 4-bit weights as they are packed
    noise_number_s: float  # to make one number of a text's noise beside a card


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The values that estimates assume of every card and of the machine around it."""

    slow: Achieved
    likely: Achieved
    fast: Achieved
    usable_memory: float  # share of a card's memory
    host_memory_bytes: int
    host_disk_bytes_per_s: float
    host_memory_bytes_per_s: float
    host_staging_bytes_per_s: float
    host_unpack_weights_per_s: float
    host_flops_per_s: float
    wsl_locked_bytes: int  # that a program can lock there
    copy_acceptance: float  # of the first child that a 4-bit copy of the target proposes
    lookup_tokens: float  # a pass, where code is looked up in itself
    reasons: Mapping[str, str]

    def of_measured(self, disk_bytes_per_s: float) -> Assumptions:
        """Return what is assumed of rates that were measured.

        The fast case reaches them, and others as much less as they do of a data sheet's.
        """

        def scaled(own: Achieved) -> Achieved:
            shares = {key: getattr(own, key) / getattr(self.fast, key) for key in ("memory", "compute", "link", "disk")}
            return replace(own, **shares)

        slow, likely, fast = map(scaled, (self.slow, self.likely, self.fast))
        return replace(self, slow=slow, likely=likely, fast=fast, host_disk_bytes_per_s=disk_bytes_per_s)

    def usable_bytes(self, hardware: Hardware) -> int:
        """Return the device memory that a program can have."""
        share = self.usable_memory if hardware.device == "cuda" else 1.0
        return int(share * hardware.memory_bytes)


def hardware_names() -> tuple[str, ...]:
    """Return all names that `read_hardware` knows."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != ASSUMPTIONS))


def read_hardware(name: str) -> Hardware:
    """Read a known card or CPU; raises ProfileError, which lists the closest names, for an unknown one."""
    known = {_letters_of(other): other for other in hardware_names()}
    wanted = _letters_of(name)
    if wanted in known:
        return _read(known[wanted])
    for letters, other in known.items():  # with their memory, as shops name cards
        if wanted.startswith(letters) and wanted == f"{letters}{_read(other).memory_bytes // GIB}gb":
            return _read(other)
    # Whole names first: 'a100' is a part of two that difflib finds less alike than others.
    close = [other for other in known if wanted and (wanted in other or other in wanted)]
    close += [other for other in difflib.get_close_matches(wanted, known, NUM_CLOSEST, 0.5) if other not in close]
    hint = f"Closest: {', '.join(known[other] for other in close[:NUM_CLOSEST])}. " if close else ""
    raise ProfileError("E_HARDWARE", f"no hardware '{name}' is known.", f"{hint}Known: {', '.join(hardware_names())}.")


def _letters_of(name: str) -> str:
    """Return the letters and digits that tell cards apart: '4070ti' of 'NVIDIA GeForce RTX 4070 Ti'."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    for word in NOT_TELLING:
        letters = letters.replace(word, "")
    return letters


def _read(name: str) -> Hardware:
    return parse_hardware((FOLDER / f"{name}.toml").read_text(encoding="utf-8"), name)


def parse_hardware(text: str, name: str) -> Hardware:
    """Check the content of one file; raises ProfileError naming the key that is wrong."""
    content = _content(text, name)
    device = content.get("device")
    if device not in ("cuda", "cpu"):
        raise _bad(name, "device", "is neither 'cuda' nor 'cpu'")
    if not isinstance(content.get("title"), str) or not content["title"]:
        raise _bad(name, "title", "is no text")
    keys = (*CARD_KEYS, *(LINK_KEYS if device == "cuda" else ()))
    note = content.pop("note", "")
    if not isinstance(note, str):
        raise _bad(name, "note", "is no text")
    _check_keys(name, content, {"title", "device", *keys})
    sources = {
        key: _text(name, f"{key}.source", _table(name, key, content[key], {"value", "source"})["source"])
        for key in keys
    }
    numbers = {key: _number(name, f"{key}.value", content[key]["value"], RANGES[key]) for key in CARD_KEYS}
    link_bytes_per_s, link = math.inf, ""
    if device == "cuda":
        generation = _one_of(name, content, "pcie_generation", set(PCIE_GT_PER_S))
        lanes = _one_of(name, content, "pcie_lanes", PCIE_LANES)
        link_bytes_per_s = PCIE_GT_PER_S[generation] * 1e9 * PCIE_DATA_SHARE / 8 * lanes
        link = f"PCIe {generation}.0 x{lanes}"
    return Hardware(
        name=name,
        title=content["title"],
        device=device,
        memory_bytes=int(numbers["memory_gib"] * GIB),
        memory_bytes_per_s=numbers["memory_gb_per_s"] * 1e9,
        half_flops_per_s=numbers["half_tflop_per_s"] * 1e12,
        float32_flops_per_s=numbers["float32_tflop_per_s"] * 1e12,
        link_bytes_per_s=link_bytes_per_s,
        link=link,
        sources=sources,
        note=note,
    )


def read_assumptions() -> Assumptions:
    """Read what is assumed beyond data sheets."""
    return parse_assumptions((FOLDER / f"{ASSUMPTIONS}.toml").read_text(encoding="utf-8"))


def parse_assumptions(text: str) -> Assumptions:
    """Check the content of the file; raises ProfileError naming the key that is wrong."""
    content = _content(text, ASSUMPTIONS)
    spans = [span.name for span in fields(Achieved)]
    single = ("usable_memory", *(key for key in RANGES if key.startswith(("host_", "wsl_", "copy_", "lookup_"))))
    _check_keys(ASSUMPTIONS, content, {*spans, *single})
    numbers, reasons = dict[str, dict[str, float]](), dict[str, str]()
    for key in (*spans, *single):
        cases = CASES if key in spans else ("likely",)
        entry = _table(ASSUMPTIONS, key, content[key], {"unit", "reason", *cases})
        reasons[key] = _text(ASSUMPTIONS, f"{key}.reason", entry["reason"])
        limits = RANGES.get(key, SHARE)
        numbers[key] = {case: _number(ASSUMPTIONS, f"{key}.{case}", entry[case], limits) for case in cases}
    for key in spans:
        slow, likely, fast = (numbers[key][case] * (-1 if key in FALLING else 1) for case in CASES)
        if not slow <= likely <= fast:
            raise _bad(ASSUMPTIONS, key, "is not in order from slow to fast")
    return Assumptions(
        **{case: Achieved(**{key: numbers[key][case] for key in spans}) for case in CASES},
        usable_memory=numbers["usable_memory"]["likely"],
        host_memory_bytes=int(numbers["host_memory_gib"]["likely"] * GIB),
        host_disk_bytes_per_s=numbers["host_disk_gb_per_s"]["likely"] * 1e9,
        host_memory_bytes_per_s=numbers["host_memory_gb_per_s"]["likely"] * 1e9,
        host_staging_bytes_per_s=numbers["host_staging_gb_per_s"]["likely"] * 1e9,
        host_unpack_weights_per_s=numbers["host_unpack_gweights_per_s"]["likely"] * 1e9,
        host_flops_per_s=numbers["host_tflop_per_s"]["likely"] * 1e12,
        wsl_locked_bytes=int(numbers["wsl_locked_gib"]["likely"] * GIB),
        copy_acceptance=numbers["copy_acceptance"]["likely"],
        lookup_tokens=numbers["lookup_tokens"]["likely"],
        reasons=reasons,
    )


def _content(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of a number of 5,000 digits, not only of TOML
        raise ProfileError("E_HARDWARE", f"'{name}.toml' is no TOML ({error}).", "Correct the file.") from error


def _check_keys(name: str, content: Mapping[str, Any], wanted: set[str], where: str = "") -> None:
    for key in sorted(content.keys() - wanted):
        raise _bad(name, where + key, "is unknown")
    for key in sorted(wanted - content.keys()):
        raise _bad(name, where + key, "is missing")


def _table(name: str, key: str, entry: Any, wanted: set[str]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise _bad(name, key, "is no table")
    _check_keys(name, entry, wanted, f"{key}.")
    return entry


def _text(name: str, key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _bad(name, key, "is no text")
    return value


def _number(name: str, key: str, value: Any, limits: tuple[float, float]) -> float:
    low, high = limits
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _bad(name, key, f"is {value!r}, not a number in [{low:g}, {high:g}]")
    return float(value)


def _one_of(name: str, content: Mapping[str, Any], key: str, allowed: set[int]) -> int:
    value = content[key]["value"]
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise _bad(name, f"{key}.value", f"is {value!r}, not one of {sorted(allowed)}")
    return value


def _bad(name: str, key: str, what: str) -> ProfileError:
    return ProfileError("E_HARDWARE", f"'{key}' in '{name}.toml' {what}.", "Correct the file.")
