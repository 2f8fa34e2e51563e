"""Every setting that a family's rules take, with other values: what becomes of a tiny file that states them.

The keys are those that the rules ask for when they read the family's tiny files: a new rule is tried by itself.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from edgespec.errors import EdgespecError
from edgespec.pair.folder import open_model
from offload.errors import CheckpointError
from offload.gguf import settings as reading
from offload.gguf.families import FAMILIES
from offload.gguf.header import GgufHeader, TextList, read_gguf
from offload.gguf.silence import FOR_ZERO
from offload.gguf.values import BOOLEANS, CUTS, FRACTIONS, LISTS, OF_LAYERS, TEXTS, WHOLE
from tests.offload.gguf.files import write_gguf
from tests.offload.gguf.test_tiny_models import IDS, NAMES, TINY, weights

KINDS = {*WHOLE, *FRACTIONS, *BOOLEANS, *OF_LAYERS, *TEXTS, CUTS}
# In which each number of a scaling counts, also with heads of four.
YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.freq_base": 100.0,
}  # fmt: skip
ROTATES = {"rope.scaling.finetuned": True}  # of families that may
# Errors that name a tensor, with which a size does not agree.
OF_TENSORS = ("E_SHAPE_MISMATCH", "E_TENSOR_MISSING")
OWN_WORDS = (
    "has a tensor",
    "has '",
    " rows of token_embd.weight",
    "lacks the setting",
    "' states ",
    " tensors and states ",
)
SOFT = ("correction_bias", "expert_bias")  # which would choose experts whatever the scores are
Case = tuple[str, str]  # a tiny file, and how its rotation is changed: not, or one of `variants`


class Asked(dict[str, Any]):
    """Settings that remember which of them were asked for."""

    def __init__(self, settings: dict[str, Any], seen: set[str]) -> None:
        super().__init__(settings)
        self.seen = seen

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.seen.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().setdefault(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


def variants(header: GgufHeader) -> dict[str, dict[str, Any]]:
    """Other rotations of a file, in which settings say what they do not say in it."""
    family, own = reading.family_of(header), reading._own_settings(header)
    rotates = ROTATES if "rope.scaling.finetuned" in own else {}
    found = {"": {}, "rotating": rotates} if rotates else {"": {}}
    if "rope.scaling.type" in own:
        found["unscaled"] = {key: None for key in own if key.startswith("rope.scaling.") and key not in ROTATES}
    if "yarn" in family.scalings:
        found["yarn"] = {**YARN, **rotates}
    return found


@functools.cache
def header_of(case: Case) -> GgufHeader:
    """The header of a tiny file, perhaps with another rotation, whose texts are read."""
    name, variant = case
    header = read_gguf(TINY / f"{name}.gguf")
    every = dict(header.settings)
    every |= {f"{header.architecture}.{key}": value for key, value in variants(header)[variant].items()}
    settings = {key: one.read() if isinstance(one, TextList) else one for key, one in every.items()}
    return replace(header, settings={key: one for key, one in settings.items() if one is not None})


def stated(case: Case) -> dict[str, Any]:
    return reading._own_settings(header_of(case))


@functools.cache
def cases() -> dict[str, list[Case]]:
    """Family -> its tiny files that are not in blocks, with each rotation that they can have."""
    names = {id(family): name for name, family in FAMILIES.items()}
    found: dict[str, list[Case]] = {name: [] for name in FAMILIES}
    for name in NAMES:
        header = read_gguf(TINY / f"{name}.gguf")
        every = [(name, variant) for variant in variants(header)] if not name.endswith(("q8_0", "mxfp4")) else []
        of_family = found[names[id(reading.family_of(header))]]
        if not (name.endswith("mtp") and of_family):  # of a family that has others
            of_family += [case for case in every if can_be_read(case)]
    return found


def can_be_read(case: Case) -> bool:
    try:
        reading.config_fields(header_of(case))
    except CheckpointError:
        return False
    return True


@functools.cache
def asked(case: Case) -> frozenset[str]:
    """The settings that are asked for by the rules when a file is read, those that it states among them."""
    seen: set[str] = {*stated(case), *reading.family_of(header_of(case)).settings}
    own = reading._own_settings
    with patch.object(reading, "_own_settings", lambda header: Asked(own(header), seen)):
        reading.config_fields(header_of(case))
    return frozenset(seen)


def other_values(key: str, found: Any, num_layers: int) -> list[Any]:
    """Values that such a setting may have, but the one that is stated."""
    if isinstance(found, list):
        more = [[one * 2 for one in found], [one + 1 for one in found]] if type(found[0]) is int else []
        values: list[Any] = [found[::-1], [*found[1:], found[0]], [found[-1]] * len(found), found[0], *more]
        values += [[not one for one in found], 2, 3] if type(found[0]) is bool else []
        values += [[0.5] * len(found)] if key == CUTS else []
    elif key in WHOLE:
        values = [1, 2, 64] if found is None else [found + 1, found * 2, found // 4, 1, 64]
        values = sorted({one for one in values if one > 0}, reverse=True)
    elif key in FRACTIONS:
        values = [1.25, 16.0] if found is None else [found * 16, found * 1.5, found / 8]
    elif key in BOOLEANS:
        values = [True, False]
    elif key in OF_LAYERS:
        values = [2, 3, [layer % 2 == 0 for layer in range(num_layers)], [True] * num_layers]
    elif key == CUTS:
        values = [[0.5] * num_layers]
    else:
        values = list(TEXTS[key])
    return [one for one in values if one != found]


def wrong_values(key: str) -> list[Any]:
    """Values that no such setting may have: of another type, or beyond all bounds."""
    values: list[Any] = ["a text", [], [["a"], [1.5, "b"]][key in LISTS], -1]
    values += [] if key in BOOLEANS or key in OF_LAYERS else [True, False]
    values += [-1.5, 1 << 31, 2.5] if key not in FRACTIONS and key != CUTS else [float("nan"), float("inf"), 3]
    return [-3.0, *values] if key in FRACTIONS else values


def outcome(case: Case, key: str, value: Any, folder: Path) -> tuple[str, str]:
    """What becomes of a file with this setting (None: without it), and what is said of it.

    "same" and "changed" are of its logits; "refused" names the setting and its value, "contradicted" a tensor or
    another setting that does not agree; "bare" is any other error, and logits that are no numbers.
    """
    header = header_of(case)
    own = {**stated(case), key: value}
    settings = {name: one for name, one in header.settings.items() if not name.startswith(f"{header.architecture}.")}
    settings |= {f"{header.architecture}.{name}": one for name, one in own.items() if one is not None}
    try:
        fields = reading.config_fields(replace(header, settings=settings))
        if fields == reading.config_fields(header):
            return "same", ""
        found = logits(written(header, settings, folder / "changed.gguf"))
    except (CheckpointError, EdgespecError) as error:
        return _kind_of(error, key, value), error.what
    except Exception as error:
        return "bare", f"{type(error).__name__}: {error}"
    if not bool(found.isfinite().all()):
        return "bare", "logits that are no numbers"
    return ("same" if torch.equal(found, plain_logits(case, folder)) else "changed"), ""


def _kind_of(error: CheckpointError | EdgespecError, key: str, value: Any) -> str:
    if "transformers" in error.what:
        return "bare"
    shown = {str(value), str(float(torch.tensor(value)))} if isinstance(value, float) else {str(value)}
    if key in error.what and (value is None or any(one in error.what for one in shown)):
        return "refused"
    return "contradicted" if error.code in OF_TENSORS or any(words in error.what for words in OWN_WORDS) else "bare"


def written(header: GgufHeader, settings: dict[str, Any], path: Path) -> Path:
    """A file with the tensors of another one."""
    stored = _content(header.path)
    tensors = [
        (one.name, one.shape, one.block.number, stored[one.offset : one.offset + one.num_bytes])
        for one in header.tensors.values()
    ]
    path.unlink(missing_ok=True)  # what was read of it is kept by the file's state
    return write_gguf(path, settings, tensors)


@functools.cache
def _content(path: Path) -> bytes:
    return path.read_bytes()


@functools.cache
def plain_logits(case: Case, folder: Path) -> Tensor:
    return logits(written(header_of(case), dict(header_of(case).settings), folder / "plain.gguf"))


def logits(path: Path) -> Tensor:
    """The logits of a tiny file; experts are chosen by what is read."""
    config, found = open_model(path).config, weights(path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict({name: one * 0.02 if name.endswith(SOFT) else one for name, one in found.items()})
    with torch.no_grad():
        return model(IDS, use_cache=False).logits  # which asks for attention in some layer


def zero_stands_for(case: Case, key: str, folder: Path) -> bool:
    """Whether a setting of 0 is as good as left out."""
    return key in FOR_ZERO or outcome(case, key, None, folder)[0] == "same"
