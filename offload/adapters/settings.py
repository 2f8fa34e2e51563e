"""The fields of adapter_config.json: each is read, of no matter to a forward, or refused by its name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.adapters.use import refused
from offload.checkpoint import parse_json
from offload.file_names import ADAPTER_NAME
from offload.lfs_pointer import is_pointer, pointer_error

# Where modules were made, which the tensors say, and how they were trained
UNUSED = {
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save",
    "inference_mode", "init_lora_weights", "lora_dropout", "task_type", "auto_mapping", "peft_version",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core",
    "qalora_group_size", "runtime_config", "revision",
}  # fmt: skip
OTHER_FORWARDS = {
    "alora_invocation_tokens": "an adapter that begins at some of a text's tokens",
    "trainable_token_indices": "tokens of their own",
    "target_parameters": "parts of parameters, as of fused experts",
    "layer_replication": "layers that run several times",
    "use_qalora": "QALoRA's groups",
    "use_bdlora": "BD-LoRA's blocks",
    "arrow_config": "a router among adapters",
    "kasa_config": "KaSA's singular values",
    "velora_config": "VeLoRA's forward",
    "monteclora_config": "samples of adapters",
}
FIX = "Use an adapter of plain LoRA, or merge this one into its model with peft."
DAMAGED = "Download the adapter again."
BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """What an adapter's tensors are to be read with."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # by the end of a module's name
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    by_root: bool = False  # the scale is alpha by the root of the rank
    has_magnitudes: bool = False  # DoRA
    ties: bool = False  # what is trained of a table is trained of a head that is the same
    base: str | None = None

    def rank_of(self, module: str) -> int:
        """Return the rank that the config states for a module."""
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """Return what the module's product is multiplied by."""
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _of_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that a module's name ends with."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read_settings(folder: Path) -> tuple[LoraSettings, str]:
    """Return an adapter's settings, and the fields that they are made of as JSON; raises OffloadError by field."""
    path = folder / ADAPTER_NAME
    if is_pointer(path):
        raise pointer_error(path)
    try:
        fields = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise refused(f"'{path}' is not readable JSON ({error}).", DAMAGED) from error
    if not isinstance(fields, dict):
        raise refused(f"'{path}' is not a JSON object.", DAMAGED)
    kind = fields.get("peft_type")
    if kind != "LORA":
        what = f"'{folder}' holds an adapter of the kind {_shown(kind)}, and LORA is the kind that is read."
        raise refused(what, FIX)
    given = _GivenFields(path, fields)
    rank_pattern = given.pattern("rank_pattern", is_rank=True)
    alpha_pattern = given.pattern("alpha_pattern", is_rank=False)
    bias = given.take("bias", "none")
    if bias not in BIASES:
        raise given.wrong("bias", bias, f"one of {', '.join(BIASES)}")
    base = given.take("base_model_name_or_path", None)
    settings = LoraSettings(
        rank=given.rank("r"),
        alpha=given.number("lora_alpha"),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        by_root=given.flag("use_rslora"),
        has_magnitudes=given.flag("use_dora"),
        ties=given.flag("ensure_weight_tying"),
        base=base if isinstance(base, str) and base else None,
    )
    given.flag("lora_bias")  # the tensors say so
    given.flag("fan_in_fan_out")  # of the base's weight: both matrices of an adapter are as of a linear layer
    given.check_rest(folder)
    return settings, json.dumps([settings.rank, settings.alpha, dict(rank_pattern), dict(alpha_pattern),
                                 settings.by_root, settings.has_magnitudes])  # fmt: skip


class _GivenFields:
    """The fields of a config that are left to read."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path, self._fields = path, {name: value for name, value in fields.items() if name != "peft_type"}

    def take(self, name: str, default: Any) -> Any:
        found = self._fields.pop(name, None)
        return default if found is None else found

    def wrong(self, name: str, value: Any, expected: str) -> Exception:
        return refused(f"'{self._path}' has {name} = {_shown(value)}, which is not {expected}.", DAMAGED)

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def rank(self, name: str) -> int:
        value = self.take(name, 8)
        if type(value) is not int or value < 1:
            raise self.wrong(name, value, "a whole number above 0")
        return value

    def number(self, name: str) -> float:
        value = self.take(name, 8)
        if not _is_number(value):
            raise self.wrong(name, value, "a number")
        return float(value) if type(value) is not int else value

    def pattern(self, name: str, *, is_rank: bool) -> dict[str, Any]:
        """Return values by the ends of modules' names, which are regular expressions."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object of names and numbers")
        for key, number in value.items():
            fits = type(number) is int and number > 0 if is_rank else _is_number(number)
            try:
                re.compile(rf"(.*\.)?({key})$")
            except re.error as error:
                raise self.wrong(name, key, "the end of a module's name") from error
            if not fits:
                raise self.wrong(f"{name}['{key}']", number, "a rank" if is_rank else "a number")
        return value

    def check_rest(self, folder: Path) -> None:
        """Raise OffloadError for a field that means another forward, or that nobody here knows."""
        for name, value in self._fields.items():
            if name in UNUSED or value is None or value is False or value in ([], {}, ""):
                continue
            kind = OTHER_FORWARDS.get(name)
            if kind is not None:
                raise refused(f"'{folder}' has {name}, {kind}, which is not done here.", FIX)
            raise refused(f"'{folder}' has {name} = {_shown(value)}, a field that is not known here.", FIX)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]
