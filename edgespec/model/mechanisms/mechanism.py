"""The record of one thing that layers keep between passes: all that others ask of it. Each verb's default is nothing.

It finds its layers by what a configuration states, and by what a family's classes have: `parts_of`. What it keeps of a
text are the states that its layers ask for (`TextCache.state`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.model.layer_kinds import kinds_of
from edgespec.model.mechanisms.state_cache import StateSizes

Uninstall = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The parts of a model whose layers shall follow paths while a pass of ours runs."""

    decoder: nn.Module
    layers: nn.ModuleList
    config: PretrainedConfig
    keeps_row_bits: bool  # a tree's row gets the bits that it gets in plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """How many heads' keys and values a layer keeps, and the widths of a head's."""

    heads: int
    key_width: int
    value_width: int


class Mechanism:
    """Something that layers keep of a text between passes."""

    kinds: ClassVar[frozenset[str]] = frozenset()  # of layers that have it, as transformers names them
    keyless_kinds: ClassVar[frozenset[str]] = frozenset()  # of those, the ones that keep no keys and values
    keeps_states: ClassVar[bool] = False  # that cannot be cut to any length of a text
    is_static: ClassVar[bool] = False  # passes of the same shape do the same, and may be recorded
    is_unflagged: ClassVar[bool] = False  # its families do not say that they take attention from the registry
    needs_no_mask: ClassVar[bool] = False  # what it chooses is all that attention takes
    has_other_bits: ClassVar[bool] = False  # a tree's rows have other bits than single ones, whatever is done
    small_sizes: ClassVar[Mapping[str, int]] = {}  # names in a configuration -> what the self-check's copy has there

    def has_layers(self, config: PretrainedConfig) -> bool:
        """Return whether layers have it, as far as is known here."""
        return not self.kinds.isdisjoint(kinds_of(config))

    def is_read(self, config: PretrainedConfig) -> bool:
        """Return whether it is this record that reads these layers."""
        return self.has_layers(config)

    def replaces(self, other: Mechanism) -> bool:
        """Return whether layers that it reads are not read by another record."""
        return False

    def unread_kinds(self, config: PretrainedConfig) -> Mapping[str, str]:
        """Return kinds of layers that are like these and cannot follow trees: kind -> why, "which ..."."""
        return {}

    def reason(self, config: PretrainedConfig) -> str | None:
        """Return why the family's layers cannot follow trees, as the rest of a sentence."""
        return None

    def is_text_by_text(self, config: PretrainedConfig) -> bool:
        """Return whether each text must pass a layer by itself."""
        return False

    def install(self, parts: ModelParts) -> Uninstall:
        """Let layers follow paths while a pass of ours runs; return what gives them back."""
        return _nothing

    def key_shape(self, config: PretrainedConfig, layer: int) -> KeyShape | None:
        """Return the shape of a layer's keys and values; None where they are as if it were not there."""
        return None

    def row_numbers(self, config: PretrainedConfig) -> list[int]:
        """Return the numbers of a row in each tensor that grows with the text, keys and values apart."""
        return []

    def sizes(self, mixer: nn.Module, dtype: torch.dtype, *, num_inputs: int, keeps_row_bits: bool) -> StateSizes:
        """Return what a part of a layer, which need have no weights, takes for rows of so many numbers."""
        return StateSizes()

    def layer_facts(self, config: PretrainedConfig, layer: int) -> object:
        """Return what distinguishes a layer from others of its kind."""
        return None

    def kept_layers(self, config: PretrainedConfig, layers: Sequence[int]) -> Mapping[str, Any]:
        """Return the values that a configuration of these layers alone has in place of its own."""
        return {}

    def narrow(self, config: PretrainedConfig, hidden_size: int) -> Mapping[str, Any]:
        """Return the values that a narrow copy has, whose rows have so many numbers, beside `small_sizes`."""
        return {}


def _nothing() -> None: ...


def wrap_forwards(modules: Sequence[nn.Module], wrapped: Callable[[Any], Callable[..., Any]]) -> Uninstall:
    """Give modules a forward that is made of each; a wrapped one refers to its module, and would keep it alive."""
    for module in modules:
        module.forward = wrapped(module)

    def give_back() -> None:
        for module in modules:
            module.__dict__.pop("forward", None)

    return give_back


def family_names(config: PretrainedConfig) -> dict[str, Any]:
    """Return the names in the module of the family's code; a configuration made of another's has that one's, too."""
    found: dict[str, Any] = {}
    for kind in type(config).__mro__:
        if not issubclass(kind, PretrainedConfig) or kind is PretrainedConfig:
            break
        name = kind.__module__.replace(".configuration_", ".modeling_")
        found = {**vars(importlib.import_module(name)), **found}
        if name != kind.__module__:
            break
    return found


def family_classes(config: PretrainedConfig) -> list[type]:
    """Return the classes in the module of the family's code."""
    return [kind for kind in family_names(config).values() if isinstance(kind, type)]


def parts_of(kind: type) -> frozenset[str]:
    """Return the names of the attributes that a class gives its objects, and of what it makes them of."""
    codes = [getattr(vars(base).get("__init__"), "__code__", None) for base in kind.__mro__]
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def family_modules(kind: type) -> list[dict[str, Any]]:
    """Return the names in the modules of a class and of those that it is made of, the nearest first."""
    modules = dict.fromkeys(base.__module__ for base in kind.__mro__)
    return [vars(sys.modules[name]) for name in modules if name != PreTrainedModel.__module__]


def beside(module: nn.Module, name: str) -> Any:
    """Return what has this name in the code of a module's family."""
    return next(names[name] for names in family_modules(type(module)) if name in names)
