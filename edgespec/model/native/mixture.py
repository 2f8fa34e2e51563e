"""The steps of a layer whose MLP is a mixture: a row goes through the few experts that its router names.

Rows are put together by expert, so that each expert's weights are read once. A row's experts are summed in the order in
which the router named them, whatever rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from llvmlite import ir

from edgespec.model.native.fields import RecordFields
from edgespec.model.native.functions import ACTIVATIONS, FIRST, constant, dot, exp, logistic, read_floats, write_floats
from edgespec.model.native.records import LAYER
from edgespec.model.native.shape import DecoderShape, Gate, Mixture
from offload.native.code import FLOAT, FLOATS, I64, INTS, POINTER, VOID, Code, Value
from offload.native.products import UNIT_ROWS, share_of
from offload.native.rounded_rows import COLUMNS

WIDTH = FLOATS.count
NEVER = -3e38  # a logit that is chosen last
MULTIPLY = ir.FunctionType(VOID, [POINTER, POINTER, POINTER, I64, I64, I64])

Write: TypeAlias = Callable[[Code, RecordFields, dict[str, Value], Value, Value], None]


class MixtureSteps:
    """What stands in the place of an MLP's steps."""

    def __init__(self, shape: DecoderShape, mixture: Mixture, round_row: ir.Function) -> None:
        self._shape, self._mixture, self._round_row = shape, mixture, round_row
        self.steps: dict[str, Write] = {
            "routed": self._route,
            "chosen": self._choose,
            "grouped": self._group,
            "gathered": self._gather,
            "expanded": self._product("gate", rows="gathered", to="gate"),
            "activated": self._activate,
            "contracted": self._product("down", rows="active", to="of_experts"),
        }

    @property
    def has_shared(self) -> bool:
        """Whether all rows go through an expert that no router names."""
        return self._mixture.shared > 0

    def _route(self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
        """Multiply normed rows by the router's weight."""
        shape, mixture, num_rows = self._shape, self._mixture, record.number("num_rows")
        router = RecordFields(code, LAYER, given["layer"]).pointer("router")
        count = code.mul(num_rows, code.number(mixture.router_rows))
        with code.loop(*share_of(code, count, thread, threads)) as item:
            expert, row = code.udiv(item, num_rows), code.urem(item, num_rows)
            normed = code.at(record.pointer("normed"), code.mul(row, code.number(4 * shape.hidden)))
            found = dot(code, normed, router, expert, shape.hidden, is_bf16=mixture.is_router_bf16)
            if mixture.has_router_bias:
                bias = RecordFields(code, LAYER, given["layer"]).pointer("router_bias")
                found = code.fadd(found, code.read(FLOAT, bias, code.shl(expert, code.number(2)), align=4))
            place = code.add(code.mul(row, code.number(mixture.logits)), expert)
            code.write(found, record.pointer("logits"), code.shl(place, code.number(2)), align=4)

    def _choose(self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
        """Name each row's experts, likeliest first, and their shares; of equal ones the first."""
        mixture, routing = self._mixture, self._mixture.routing
        with code.loop(*share_of(code, record.number("num_rows"), thread, threads)) as row:
            of_row = code.mul(row, code.number(4 * mixture.logits))
            logits = code.at(record.pointer("logits"), of_row)
            if mixture.has_shared_gate:
                logit = code.read(FLOAT, logits, 4 * mixture.experts, align=4)
                place = code.at(record.pointer("shared_shares"), code.shl(row, code.number(2)))
                code.write(code.extract_element(logistic(code, code.splat(logit)), FIRST), place, align=4)
            for beyond in range(mixture.experts, mixture.logits):
                code.write(ir.Constant(FLOAT, NEVER), logits, 4 * beyond, align=4)
            first = code.mul(row, code.number(mixture.each))
            chosen = code.at(record.pointer("chosen"), code.shl(first, code.number(3)))
            shares = code.at(record.pointer("shares"), code.shl(first, code.number(2)))
            scores = code.at(record.pointer("scores"), of_row) if routing.keeps_scores else None
            whole = code.variable(ir.Constant(FLOAT, 1.0))
            most: Value | None = None
            if not routing.is_sigmoid:
                _, most = self._largest(code, logits)
                total = code.variable(constant(0.0))
                with code.loop(0, mixture.logits, WIDTH) as expert:
                    value = code.fsub(read_floats(code, logits, expert, is_bf16=False), code.splat(most))
                    total.value = code.fadd(total.value, exp(code, value))
                whole.value = code.sum_of(total.value)
            if scores is not None:
                self._score(code, RecordFields(code, LAYER, given["layer"]), logits, scores, most, whole.value)
            if routing.renormalises or scores is not None:
                whole.value = ir.Constant(FLOAT, 0.0 if routing.renormalises else 1.0)
            with code.loop(0, mixture.each) as place:
                expert, logit = self._largest(code, logits)
                if scores is None:
                    assert most is not None
                    power = code.extract_element(exp(code, code.splat(code.fsub(logit, most))), FIRST)
                else:
                    power = code.read(FLOAT, scores, code.shl(expert, code.number(2)), align=4)
                code.write(expert, chosen, code.shl(place, code.number(3)), align=8)
                code.write(power, shares, code.shl(place, code.number(2)), align=4)
                code.write(ir.Constant(FLOAT, NEVER), logits, code.shl(expert, code.number(2)), align=4)
                if routing.renormalises:
                    whole.value = code.fadd(whole.value, power)
            with code.loop(0, mixture.each) as place:
                at = code.shl(place, code.number(2))
                share = code.fdiv(code.read(FLOAT, shares, at, align=4), whole.value)
                if routing.scale != 1:
                    share = code.fmul(share, ir.Constant(FLOAT, routing.scale))
                code.write(share, shares, at, align=4)

    def _score(
        self, code: Code, layer: RecordFields, logits: Value, scores: Value, most: Value | None, whole: Value
    ) -> None:
        """Write each expert's score, and what it is chosen by in the place of its logit."""
        mixture, routing = self._mixture, self._mixture.routing
        with code.loop(0, mixture.logits, WIDTH) as expert:
            value = read_floats(code, logits, expert, is_bf16=False)
            is_none = code.fcmp_ordered("<=", value, constant(NEVER))
            if most is None:
                score = logistic(code, value)
            else:
                score = code.fdiv(exp(code, code.fsub(value, code.splat(most))), code.splat(whole))
            write_floats(code, score, scores, expert, is_bf16=False)
            if routing.has_correction:
                score = code.fadd(score, read_floats(code, layer.pointer("correction"), expert, is_bf16=False))
            write_floats(code, code.select(is_none, constant(NEVER), score), logits, expert, is_bf16=False)

    def _largest(self, code: Code, logits: Value) -> tuple[Value, Value]:
        """Return the first expert with the largest logit, and that."""
        best = code.variable(code.number(0))
        most = code.variable(code.read(FLOAT, logits, align=4))
        with code.loop(1, self._mixture.experts) as expert:
            logit = code.read(FLOAT, logits, code.shl(expert, code.number(2)), align=4)
            is_more = code.fcmp_ordered(">", logit, most.value)
            best.value = code.select(is_more, expert, best.value)
            most.value = code.select(is_more, logit, most.value)
        return best.value, most.value

    def _group(self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
        """Let the first thread find where each expert's rows begin when they stand together."""
        mixture, zero, one = self._mixture, code.number(0), code.number(1)
        lists = self._lists(code, record)

        def entry(name: str, number: Value) -> Value:
            return code.at(lists[name], code.shl(number, code.number(3)))

        def count(name: str, number: Value) -> Value:
            """Return an entry as it was, which is one more from then on."""
            place = entry(name, number)
            before = code.read(I64, place, align=8)
            code.write(code.add(before, one), place, align=8)
            return before

        with code.if_then(code.icmp_signed("==", thread, zero)):
            with code.loop(0, mixture.experts) as expert:
                code.write(zero, entry("counts", expert), align=8)
            num_places = code.mul(record.number("num_rows"), code.number(mixture.each))
            with code.loop(0, num_places) as place:
                count("counts", code.read(I64, entry("chosen", place), align=8))
            start, num_active = code.variable(zero), code.variable(zero)
            with code.loop(0, mixture.experts) as expert:
                own = code.read(I64, entry("counts", expert), align=8)
                for name in ("starts", "ends"):  # the latter move as places are taken
                    code.write(start.value, entry(name, expert), align=8)
                code.write(expert, entry("active", num_active.value), align=8)
                is_active = code.zext(code.icmp_signed(">", own, zero), I64)
                num_active.value = code.add(num_active.value, is_active)
                start.value = code.add(start.value, own)
            code.write(num_active.value, lists["num_active"], align=8)
            with code.loop(0, num_places) as place:
                expert = code.read(I64, entry("chosen", place), align=8)
                slot = count("ends", expert)
                code.write(slot, entry("slots", place), align=8)
                code.write(code.udiv(place, code.number(mixture.each)), entry("origins", slot), align=8)
                code.write(expert, entry("owners", slot), align=8)

    def _gather(self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
        """Round normed rows to where their expert's stand together."""
        hidden = self._shape.hidden
        count = code.mul(record.number("num_rows"), code.number(self._mixture.each))
        with code.loop(*share_of(code, count, thread, threads)) as slot:
            origin = code.read(I64, record.pointer("origins"), code.shl(slot, code.number(3)), align=8)
            row = code.at(record.pointer("normed"), code.mul(origin, code.number(4 * hidden)))
            self._round(code, row, record.pointer("gathered"), slot, hidden)

    def _round(self, code: Code, row: Value, rows: Value, slot: Value, columns: int) -> None:
        to = code.at(rows, code.mul(slot, code.number(self._mixture.row_bytes(columns))))
        groups = code.number(columns // COLUMNS)
        code.call(self._round_row, [row, to, code.number(columns), code.number(0), groups])

    def _product(self, name: str, *, rows: str, to: str) -> Write:
        """Return what multiplies each expert's rows by its weight: units of all that have rows are shared."""
        shape = self._shape
        is_down = name == "down"
        columns, width = (shape.intermediate, shape.hidden) if is_down else (shape.hidden, 2 * shape.intermediate)
        units = width // UNIT_ROWS

        def write(code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
            layer, lists, each = (
                RecordFields(code, LAYER, given["layer"]),
                self._lists(code, record),
                code.number(units),
            )
            total = code.mul(code.read(I64, lists["num_active"], align=8), each)
            first, last = share_of(code, total, thread, threads)
            end = code.udiv(code.add(last, code.number(units - 1)), each)
            with code.loop(code.udiv(first, each), end) as number:
                begin, stop = (code.sub(one, code.mul(number, each)) for one in (first, last))
                begin = code.intrinsic("llvm.smax.i64", I64, begin, code.number(0))
                stop = code.intrinsic("llvm.smin.i64", I64, stop, each)
                expert = code.read(I64, lists["active"], code.shl(number, code.number(3)), align=8)
                place = code.shl(expert, code.number(3))
                start, count = (code.read(I64, lists[one], place, align=8) for one in ("starts", "counts"))
                given_rows = code.at(
                    record.pointer(rows), code.mul(start, code.number(self._mixture.row_bytes(columns)))
                )
                out = code.at(record.pointer(to), code.mul(start, code.number(4 * width)))
                weight = code.read(POINTER, layer.pointer(f"{name}_weight"), place, align=8)
                code.call_at(layer.pointer(f"{name}_function"), MULTIPLY, [given_rows, weight, out, count, begin, stop])

        return write

    def _activate(
        self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value
    ) -> None:
        """Round what the activation makes of an expanded row."""
        wide, gate_of = self._shape.intermediate, self._mixture.gate
        layer = RecordFields(code, LAYER, given["layer"])
        count = code.mul(record.number("num_rows"), code.number(self._mixture.each))
        with code.loop(*share_of(code, count, thread, threads)) as slot:
            row = code.at(record.pointer("gate"), code.mul(slot, code.number(8 * wide)))
            if self._mixture.has_biases:
                owner = code.read(I64, record.pointer("owners"), code.shl(slot, code.number(3)), align=8)
                biases = code.at(layer.pointer("gate_bias"), code.mul(owner, code.number(8 * wide)))
                with code.loop(0, 2 * wide, WIDTH) as column:
                    both = (read_floats(code, one, column, is_bf16=False) for one in (row, biases))
                    write_floats(code, code.fadd(*both), row, column, is_bf16=False)
            with code.loop(0, wide, WIDTH) as column:
                active = _activated(code, gate_of, *_gate_and_up(code, row, column, wide, in_pairs=gate_of.in_pairs))
                write_floats(code, active, row, column, is_bf16=False)
            self._round(code, row, record.pointer("active"), slot, wide)

    def add_up(self, code: Code, record: RecordFields, layer: RecordFields, row: Value) -> None:
        """Write the sum of a row's experts, by their shares, to its output."""
        hidden, each = self._shape.hidden, self._mixture.each
        of_row = code.mul(row, code.number(4 * hidden))
        output = code.at(record.pointer("output"), of_row)
        first = code.mul(row, code.number(each))
        with code.loop(0, hidden, WIDTH) as column:
            write_floats(code, constant(0.0), output, column, is_bf16=False)
        with code.loop(first, code.add(first, code.number(each))) as place:
            share = code.splat(code.read(FLOAT, record.pointer("shares"), code.shl(place, code.number(2)), align=4))
            slot = code.read(I64, record.pointer("slots"), code.shl(place, code.number(3)), align=8)
            found = code.at(record.pointer("of_experts"), code.mul(slot, code.number(4 * hidden)))
            expert = code.read(I64, record.pointer("chosen"), code.shl(place, code.number(3)), align=8)
            with code.loop(0, hidden, WIDTH) as column:
                added, total = (read_floats(code, one, column, is_bf16=False) for one in (found, output))
                if self._mixture.has_biases:
                    at = code.add(code.mul(expert, code.number(hidden)), column)
                    added = code.fadd(added, read_floats(code, layer.pointer("down_bias"), at, is_bf16=False))
                write_floats(code, code.fused(share, added, total), output, column, is_bf16=False)
        if self.has_shared:
            shared = code.at(record.pointer("shared_output"), of_row)
            share = constant(1.0)
            if self._mixture.has_shared_gate:
                place = code.shl(row, code.number(2))
                share = code.splat(code.read(FLOAT, record.pointer("shared_shares"), place, align=4))
            with code.loop(0, hidden, WIDTH) as column:
                added, total = (read_floats(code, one, column, is_bf16=False) for one in (shared, output))
                write_floats(code, code.fused(share, added, total), output, column, is_bf16=False)

    def _lists(self, code: Code, record: RecordFields) -> dict[str, Value]:
        """Return where lists of whole numbers begin: of places, and of experts."""
        of_experts = record.pointer("experts")
        names = ("counts", "starts", "ends", "active", "num_active")
        return {name: record.pointer(name) for name in ("chosen", "slots", "origins", "owners")} | {
            name: code.at(of_experts, 8 * number * self._mixture.experts) for number, name in enumerate(names)
        }


def _gate_and_up(code: Code, row: Value, column: Value, wide: int, *, in_pairs: bool) -> tuple[Value, Value]:
    """Return gates and ups of an expert's columns from this one on."""
    places = (code.shl(column, code.number(1)), WIDTH) if in_pairs else (column, wide)
    first, second = (
        read_floats(code, row, code.add(places[0], code.number(start)), is_bf16=False) for start in (0, places[1])
    )
    if not in_pairs:
        return first, second
    gate, up = (
        code.shuffle_vector(first, second, ir.Constant(INTS, list(range(start, 2 * WIDTH, 2)))) for start in (0, 1)
    )
    return gate, up


def _activated(code: Code, gate_of: Gate, gate: Value, up: Value) -> Value:
    if gate_of.activation:
        return code.fmul(ACTIVATIONS[gate_of.activation](code, gate), up)
    most, least = constant(gate_of.limit), constant(-gate_of.limit)
    gate = code.select(code.fcmp_ordered(">", gate, most), most, gate)
    up = code.select(code.fcmp_ordered(">", up, most), most, up)
    up = code.select(code.fcmp_ordered("<", up, least), least, up)
    power = exp(code, code.fmul(gate, constant(-gate_of.slope)))
    return code.fmul(code.fadd(up, constant(1.0)), code.fdiv(gate, code.fadd(constant(1.0), power)))
