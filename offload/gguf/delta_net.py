"""Layers with a gated delta rule: llama.cpp has other orders of their heads.

A key head's queries, keys, values and gates follow each other in Qwen3-Next, where the file has all queries first, and
so on. Qwen 3.5 has the value heads of a key head one after the other; in the file the first of every key head comes
before the second of any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from offload.checkpoint import TensorEntry
from offload.gguf.entries import matrix, numbered, rows_of, unpacked
from offload.gguf.family import Part
from offload.gguf.header import GgufHeader, GgufTensor
from offload.gguf.mamba import sizes
from offload.gguf.numbers import wrong_value
from offload.gguf.parts import changed, logarithm_of

Fields = Mapping[str, Any]
Runs = Iterable[tuple[int, int]]  # of rows in the file: the first, and how many
INTERVAL = 4  # of layers with attention, where a file states none


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads of a layer."""

    keys: int
    values: int
    key_rows: int
    value_rows: int

    @classmethod
    def of(cls, fields: Fields) -> Heads:
        """Return those that a config.json states."""
        return cls(
            keys=fields["linear_num_key_heads"], values=fields["linear_num_value_heads"],
            key_rows=fields["linear_key_head_dim"], value_rows=fields["linear_value_head_dim"],
        )  # fmt: skip

    @property
    def each(self) -> int:
        """The value heads of a key head."""
        return self.values // self.keys

    def value_runs(self, start: int, rows: int) -> Runs:
        """Return where each value head lies, from a first row on."""
        for head in range(self.values):
            yield start + (head % self.each * self.keys + head // self.each) * rows, rows

    def grouped(self, stored: Tensor, rows: int = 1) -> Tensor:
        """Return what stands along the last dimension for each value head, those of a key head together."""
        heads: Tensor = stored.unflatten(-1, (self.each, self.keys, rows))
        return heads.transpose(-3, -2).flatten(-3)


def sizes_of_delta_net(header: GgufHeader, own: dict[str, Any], fields: dict[str, Any]) -> None:
    """Take the sizes of heads, and which layers have attention."""
    found = sizes(header, own, groups_divide_heads=True)
    width, key_rows, keys, values, inner = found
    fields |= {
        "linear_conv_kernel_dim": width, "linear_key_head_dim": key_rows, "linear_num_key_heads": keys,
        "linear_num_value_heads": values, "linear_value_head_dim": inner // values,
    }  # fmt: skip
    count, interval = own["block_count"], own.pop("full_attention_interval", INTERVAL)
    if interval < 1:
        raise wrong_value(header, "full_attention_interval", interval, "a whole number from 1 on")
    stated = own.pop("attention.recurrent_layers", [(layer + 1) % interval != 0 for layer in range(count)])
    if not isinstance(stated, list) or len(stated) < count or not {*stated} <= {False, True}:
        raise wrong_value(header, "attention.recurrent_layers", stated, f"true or false for each of {count} layers")
    kinds = ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in stated[:count]]
    fields["layer_types"] = kinds


def sections(_: GgufHeader, own: dict[str, Any], __: dict[str, Any]) -> None:
    """Take which frequencies are those of heights and widths: a text's positions are the same in all."""
    own.pop("rope.dimension_sections", None)


def in_runs(name: str, tensor: GgufTensor, runs: Runs) -> Iterator[TensorEntry]:
    """Yield a module's matrix, or its convolution, in runs of rows."""
    found = list(islice(runs, tensor.shape[0] + 1))  # a setting may state any number of heads
    if sum(count for _, count in found) != tensor.shape[0]:
        raise ValueError(f"{tensor.shape[0]} rows are not those of all heads")
    for number, (first, count) in enumerate(found):
        one = rows_of(tensor, first, count)
        is_convolution = name.endswith("conv1d")
        piece = (
            unpacked(f"{name}.weight", replace(one, shape=(count, 1, one.shape[1])))
            if is_convolution
            else matrix(name, one)
        )
        yield numbered(piece, number)


def joined_in_heads(module: str) -> dict[str, Part]:
    """Return the parts of Qwen3-Next's projection, in which a key head's rows follow each other."""

    def part(layer: str, tensor: GgufTensor, fields: Fields, *, has_gates: bool) -> Iterator[TensorEntry]:
        heads = Heads.of(fields)
        of_values = heads.each * heads.value_rows  # of a key head
        unit = math.gcd(heads.key_rows, of_values)
        of_keys, of_head = heads.keys * heads.key_rows, 2 * (heads.key_rows + of_values) // unit
        gates = [(0, of_values, 2 * heads.key_rows + of_values)]
        others = [(0, heads.key_rows, 0), (of_keys, heads.key_rows, heads.key_rows)]
        others += [(2 * of_keys, of_values, 2 * heads.key_rows)]
        spans = gates if has_gates else others  # first row in the file, rows of a head, their place among the head's
        if tensor.shape[0] != heads.keys * sum(rows for _, rows, _ in spans):
            raise ValueError(f"{tensor.shape[0]} rows are not those of all heads")
        for head in range(heads.keys):
            for start, rows, place in spans:
                for index in range(rows // unit):
                    one = rows_of(tensor, start + head * rows + index * unit, unit)
                    yield numbered(matrix(layer + module, one), head * of_head + place // unit + index)

    return {
        "attn_qkv.weight": lambda layer, tensor, fields: part(layer, tensor, fields, has_gates=False),
        "attn_gate.weight": lambda layer, tensor, fields: part(layer, tensor, fields, has_gates=True),
    }


def values_in_groups(start: str) -> dict[str, Part]:
    """Return the parts of Qwen 3.5's layers, whose value heads are put in order."""

    def behind_keys(name: str) -> Part:
        def part(layer: str, tensor: GgufTensor, fields: Fields) -> Iterator[TensorEntry]:
            heads = Heads.of(fields)
            before, unit = 2 * heads.keys * heads.key_rows, math.gcd(2 * heads.keys * heads.key_rows, heads.value_rows)
            if tensor.shape[0] != before + heads.values * heads.value_rows:
                raise ValueError(f"{tensor.shape[0]} rows are not those of all heads")
            runs = [*((first, unit) for first in range(0, before, unit))]
            for first, rows in heads.value_runs(before, heads.value_rows):
                runs += [(first + done, unit) for done in range(0, rows, unit)]
            yield from in_runs(layer + start + name, tensor, runs)

        return part

    def rows(name: str, *, of_head: bool) -> Part:
        def part(layer: str, tensor: GgufTensor, fields: Fields) -> Iterator[TensorEntry]:
            heads = Heads.of(fields)
            yield from in_runs(layer + start + name, tensor, heads.value_runs(0, heads.value_rows if of_head else 1))

        return part

    def columns(layer: str, tensor: GgufTensor, fields: Fields) -> Iterator[TensorEntry]:
        heads = Heads.of(fields)
        yield changed(
            f"{layer}{start}out_proj.weight",
            tensor,
            tensor.shape,
            lambda stored: heads.grouped(stored, heads.value_rows),
        )

    def decays(layer: str, tensor: GgufTensor, fields: Fields) -> Iterator[TensorEntry]:
        heads = Heads.of(fields)
        yield changed(f"{layer}{start}A_log", tensor, tensor.shape, lambda stored: heads.grouped(logarithm_of(stored)))

    def steps(layer: str, tensor: GgufTensor, fields: Fields) -> Iterator[TensorEntry]:
        heads = Heads.of(fields)
        yield changed(f"{layer}{start}dt_bias", tensor, tensor.shape, heads.grouped)

    return {
        "attn_qkv.weight": behind_keys("in_proj_qkv"),
        "ssm_conv1d.weight": behind_keys("conv1d"),
        "attn_gate.weight": rows("in_proj_z", of_head=True),
        "ssm_alpha.weight": rows("in_proj_a", of_head=False),
        "ssm_beta.weight": rows("in_proj_b", of_head=False),
        "ssm_out.weight": columns,
        "ssm_a": decays,
        "ssm_dt.bias": steps,
    }
