"""Records of numbers of 64 bits and addresses, which Python fills (`passes.py`) and the text of a pass reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any


class AddressRecord:
    """The names of a record's fields, in their order."""

    def __init__(self, *names: str) -> None:
        self.names = names

    @property
    def num_bytes(self) -> int:
        """The bytes of one record."""
        return 8 * len(self.names)

    def filled(self, records: Sequence[dict[str, int]]) -> Any:
        """Return records one after the other, in memory of their own."""
        numbers = [record.get(name, 0) for record in records for name in self.names]
        return (ctypes.c_int64 * len(numbers))(*numbers)


PRODUCTS = ("query", "key", "value", "output", "gate", "up", "down")
OF_DELTA = ("mixed", "gating")  # of the gated delta rule: queries, keys and values; and its gates
OF_SHARED = ("shared_gate", "shared_up", "shared_down")
# `aux` are addresses, one a layer and one behind the last: where rows of the stream before it go, or 0
PASS = AddressRecord(
    "thread_number", "num_threads", "give_way", "processor", "barrier",
    "num_layers", "layers", "num_texts", "spans", "storages", "num_rows", "rows", "paths", "max_path",
    "given", "found", "residual", "rounded", "active", "query", "key", "value", "gates", "output", "gate", "up",
    "scratch", "scratch_bytes",
    "last_norm", "aux",
    # Of mixtures: rows before the router, its choices, and rows by expert
    "normed", "logits", "chosen", "shares", "slots", "origins", "owners", "experts", "gathered", "of_experts",
    "scores", "shared_shares", "shared_gate", "shared_up", "shared_active", "shared_output",
    # Of the gated delta rule
    "states", "mixed", "gating", "convolved", "decays", "rates",
)  # fmt: skip
# A product's function and weight, and what it adds to each column
LAYER = AddressRecord(
    "kind", "window", "first_seen", "rotation", "router", "router_bias", "correction", "sinks",
    "before_attention", "of_feature", "after_attention", "before_mlp", "after_mlp", "query_norm", "key_norm",
    "taps", "decay_weight", "rate_weight", "decay_bias", "decay_factor", "memory_norm",
    *(f"{name}_{part}" for name in (*PRODUCTS, *OF_SHARED, *OF_DELTA) for part in ("function", "weight", "bias")),
)  # fmt: skip
# Rows of one text, number `first` of the pass and those behind: that one goes to place `length` of its cache; `visible`
# [count, tail] is 0 for rows in order
SPAN = AddressRecord("first", "count", "length", "tail", "visible", "positions")
# A row sees the first `context` places of its text's cache, then those of its path, itself the last
ROW = AddressRecord("text", "place", "position", "context", "path", "num_path")
STORAGE = AddressRecord("keys", "values", "capacity")  # of a text's layer
# Of a text in a layer with a state, which has taken in the rows before `start`: what open rows keep, and new ones
STATE = AddressRecord(
    "start", "state", "first_inputs",
    *(f"{of}{name}" for of in ("", "new_") for name in ("inputs", "keys", "written", "since")),
)  # fmt: skip
