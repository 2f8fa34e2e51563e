"""The gated delta rule of a pass, as text: rows continue their text's state, and nodes of a tree their parents'.

A row reads the state, then what its ancestors behind it have written, in the order in which they would be text. How
many of them the state has taken in goes by the trees before: sums are of float64, so that it does not show in what is
rounded from them. Legend: g heads of keys, h heads of values, k and v their widths, c channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llvmlite import ir

from edgespec.model.native.fields import RecordFields, product_row
from edgespec.model.native.functions import (
    FIRST,
    as_bf16,
    constant,
    dot,
    exp_of_doubles,
    length_inverse,
    logistic,
    of_doubles,
    read_floats,
    silu,
    softplus,
    write_floats,
)
from edgespec.model.native.mixture import Write
from edgespec.model.native.records import LAYER, SPAN
from edgespec.model.native.shape import DecoderShape, DeltaShape
from edgespec.model.native.state_rows import OwnRow
from offload.native.code import DOUBLE, DOUBLES, FLOAT, FLOATS, Code, Value
from offload.native.products import share_of
from offload.native.rounded_rows import COLUMNS

WIDTH = FLOATS.count
TOGETHER = 32  # columns of values that are summed in registers at once
KEY_EPS = 1e-6  # that a key's squared length gets


class DeltaRuleSteps:
    """What stands in the place of attention's steps."""

    def __init__(self, shape: DecoderShape, delta: DeltaShape, normed_row: ir.Function, round_row: ir.Function) -> None:
        self._shape, self._delta, self._normed_row, self._round_row = shape, delta, normed_row, round_row
        self.steps: dict[str, Write] = {"kept": self._keep, "convolved": self._convolve, "remembered": self._remember}

    def _keep(self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
        """Keep each row's inputs of the convolution, and find its decays and rates."""
        shape, delta, layer = self._shape, self._delta, RecordFields(code, LAYER, given["layer"])
        scratch = code.at(record.pointer("scratch"), code.mul(thread, record.number("scratch_bytes")))
        with code.loop(*share_of(code, record.number("num_rows"), thread, threads)) as row:
            own = OwnRow(code, record, given["states"], row)
            before = code.mul(own.number, code.number(delta.channels))
            mixed = product_row(code, record, shape, "mixed", row)
            for channel, source, width in self._segments(code):
                with code.loop(0, width, WIDTH) as column:
                    value = read_floats(code, mixed, code.add(source, column), is_bf16=False)
                    to = code.add(before, code.add(channel, column))
                    write_floats(code, value, own.state.pointer("new_inputs"), to, is_bf16=shape.is_bf16)
            residual = code.at(record.pointer("residual"), code.mul(row, code.number(4 * shape.hidden)))
            code.call(self._normed_row, [residual, layer.pointer("before_attention"), scratch])
            of_row = code.mul(row, code.number(4 * delta.padded_heads))
            decays, rates = (code.at(record.pointer(name), of_row) for name in ("decays", "rates"))
            with code.loop(0, delta.heads) as head:
                for to, weight in ((decays, "decay_weight"), (rates, "rate_weight")):
                    pointer = layer.pointer(weight)
                    found = dot(code, scratch, pointer, head, shape.hidden, is_bf16=delta.is_weight_bf16)
                    code.write(found, to, code.shl(head, code.number(2)), align=4)
            for first in range(0, delta.padded_heads, WIDTH):
                place = code.number(first)
                bias, factor = (
                    read_floats(code, layer.pointer(name), place, is_bf16=False)
                    for name in ("decay_bias", "decay_factor")
                )
                steps = softplus(code, code.fadd(read_floats(code, decays, place, is_bf16=False), bias))
                write_floats(code, code.fmul(factor, steps), decays, place, is_bf16=False)
                rate = logistic(code, read_floats(code, rates, place, is_bf16=False))
                write_floats(code, rate, rates, place, is_bf16=False)

    def _segments(self, code: Code) -> Iterator[tuple[Value, Value, int]]:
        """Yield where the convolution's channels begin, where their columns in the product do, and how many follow."""
        delta = self._delta
        if not delta.in_groups:
            yield code.number(0), code.number(0), delta.channels
            return
        with code.loop(0, delta.key_heads) as group:
            source = code.mul(group, code.number(delta.group_columns))
            of_key, of_values = delta.key_width, delta.heads_each * delta.value_width
            widths = {0: of_key, delta.key_columns: of_key, 2 * delta.key_columns: of_values}
            for channel, width in widths.items():
                yield code.add(code.mul(group, code.number(width)), code.number(channel)), source, width
                source = code.add(source, code.number(width))

    def _gates(self, code: Code, record: RecordFields, row: Value, head: Value) -> Value:
        """Return where the logits of a head's gates begin: floats."""
        delta = self._delta
        if not delta.in_groups:
            gates = product_row(code, record, self._shape, "gating", row)
            return code.at(gates, code.mul(head, code.number(4 * delta.value_width)))
        mixed, each = product_row(code, record, self._shape, "mixed", row), code.number(delta.heads_each)
        of_group = code.mul(code.udiv(head, each), code.number(delta.group_columns))
        in_group = code.mul(code.urem(head, each), code.number(delta.value_width))
        before = code.number(2 * delta.key_width + delta.heads_each * delta.value_width)
        return code.at(mixed, code.shl(code.add(code.add(of_group, before), in_group), code.number(2)))

    def _convolve(
        self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value
    ) -> None:
        """Convolve each head of queries, keys and values, and give the first two their lengths."""
        delta = self._delta
        heads = code.number(2 * delta.key_heads + delta.heads)
        with code.loop(*share_of(code, code.mul(record.number("num_rows"), heads), thread, threads)) as item:
            row, head = code.udiv(item, heads), code.urem(item, heads)
            own = OwnRow(code, record, given["states"], row)
            convolved = code.at(record.pointer("convolved"), code.mul(row, code.number(4 * delta.channels)))
            taps = RecordFields(code, LAYER, given["layer"]).pointer("taps")
            is_key = code.icmp_signed("<", head, code.number(2 * delta.key_heads))
            with code.if_else(is_key) as (of_keys, of_values):
                with of_keys:
                    channel = code.mul(head, code.number(delta.key_width))
                    squares = self._head(code, own, taps, convolved, channel, delta.key_width)
                    self._give_length(code, own, convolved, channel, head, squares)
                with of_values:
                    number = code.sub(head, code.number(2 * delta.key_heads))
                    of_value = code.mul(number, code.number(delta.value_width))
                    channel = code.add(of_value, code.number(2 * delta.key_columns))
                    self._head(code, own, taps, convolved, channel, delta.value_width)

    def _head(self, code: Code, own: OwnRow, taps: Value, convolved: Value, channel: Value, width: int) -> Value:
        """Write some channels of a row, and return the sum of their squares."""
        delta = self._delta
        inputs = [self._inputs(code, own, tap) for tap in range(delta.taps)]
        squares = code.variable(constant(0.0))
        with code.loop(0, width, WIDTH) as column:
            at = code.add(channel, column)
            total = constant(0.0)
            for tap, (rows, first) in enumerate(inputs):
                factor = read_floats(code, taps, code.add(at, code.number(tap * delta.channels)), is_bf16=False)
                value = read_floats(code, rows, code.add(first, at), is_bf16=self._shape.is_bf16)
                total = code.fused(value, factor, total)
            total = silu(code, total)
            squares.value = code.fused(total, total, squares.value)
            write_floats(code, total, convolved, at, is_bf16=False)
        return code.sum_of(squares.value)

    def _inputs(self, code: Code, own: OwnRow, tap: int) -> tuple[Value, Value]:
        """Return where the inputs of a tap lie, and the number of their first channel."""
        before = self._delta.taps - 1 - tap  # rows
        index = code.sub(own.ancestors.count, code.number(before + 1))
        is_row = code.icmp_signed(">=", index, code.number(0))
        rows, number = own.part(own.ancestors.place(index), "inputs")
        in_state = code.add(index, code.number(self._delta.taps - 1))
        number = code.select(is_row, number, in_state)
        return code.select(is_row, rows, own.state.pointer("first_inputs")), code.mul(
            number, code.number(self._delta.channels)
        )

    def _give_length(
        self, code: Code, own: OwnRow, convolved: Value, channel: Value, head: Value, squares: Value
    ) -> None:
        """Make a query or key as long as it is multiplied, and keep keys as later rows will find them."""
        delta, groups = self._delta, code.number(self._delta.key_heads)
        root = code.intrinsic("llvm.sqrt.f32", FLOAT, code.fadd(squares, ir.Constant(FLOAT, KEY_EPS)))
        is_query = code.icmp_signed("<", head, groups)
        length = code.select(is_query, ir.Constant(FLOAT, delta.key_width**-0.5), ir.Constant(FLOAT, 1.0))
        factor = code.splat(code.fdiv(length, root))
        with code.loop(0, delta.key_width, WIDTH) as column:
            at = code.add(channel, column)
            value = code.fmul(read_floats(code, convolved, at, is_bf16=False), factor)
            write_floats(code, value, convolved, at, is_bf16=False)
        with code.if_then(code.icmp_signed(">=", head, groups)):
            number = code.add(code.mul(own.number, groups), code.sub(head, groups))
            first = code.mul(number, code.number(delta.key_width))
            with code.loop(0, delta.key_width, WIDTH) as column:
                value = read_floats(code, convolved, code.add(channel, column), is_bf16=False)
                keys = own.state.pointer("new_keys")
                write_floats(code, value, keys, code.add(first, column), is_bf16=self._shape.is_bf16)

    def _remember(
        self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value
    ) -> None:
        """Let the rows of a text write and read, head by head, and round what gates leave of it."""
        heads = code.number(self._delta.heads)
        scratch = code.at(record.pointer("scratch"), code.mul(thread, record.number("scratch_bytes")))
        count = code.mul(record.number("num_texts"), heads)
        with code.loop(*share_of(code, count, thread, threads)) as item:
            text, head = code.udiv(item, heads), code.urem(item, heads)
            span = RecordFields(code, SPAN, record.pointer("spans")).following(text)
            with code.loop(0, span.number("count")) as number:
                row = code.add(span.number("first"), number)
                own = OwnRow(code, record, given["states"], row)
                convolved = code.at(record.pointer("convolved"), code.mul(row, code.number(4 * self._delta.channels)))
                self._write_and_read(code, record, own, convolved, head, scratch)
                self._gate(code, record, RecordFields(code, LAYER, given["layer"]), convolved, row, head)

    def _write_and_read(
        self, code: Code, record: RecordFields, own: OwnRow, convolved: Value, head: Value, scratch: Value
    ) -> None:
        """Write what a row adds to the memory, and what it finds there in the place of its values."""
        delta = self._delta
        group = code.udiv(head, code.number(delta.heads_each))
        key, query = scratch, code.at(scratch, 8 * delta.key_width)
        weights = code.at(query, 8 * delta.key_width)
        place = code.add(code.mul(own.number, code.number(delta.key_heads)), group)
        place = code.mul(place, code.number(delta.key_width))
        of_query = code.mul(group, code.number(delta.key_width))
        with code.loop(0, delta.key_width, WIDTH) as column:
            own_key = self._read(code, own.state.pointer("new_keys"), code.add(place, column), in_model=True)
            code.write(own_key, key, code.shl(column, code.number(3)))
            floats = read_floats(code, convolved, code.add(of_query, column), is_bf16=False)
            code.write(code.fpext(floats, DOUBLES), query, code.shl(column, code.number(3)))
        of_head = code.add(code.mul(own.row, code.number(delta.padded_heads)), head)
        decay, rate = (
            code.fpext(code.read(FLOAT, record.pointer(name), code.shl(of_head, code.number(2)), align=4), DOUBLE)
            for name in ("decays", "rates")
        )
        since = self._since(code, own, decay, head)
        self._weigh(code, own, (key, query), weights, group, head, since)
        alike = _dot_of_doubles(code, delta.key_width, [key], lambda column: _doubles(code, query, column))[0]
        share = code.splat(_exp_of(code, since))
        of_values = code.add(code.mul(head, code.number(delta.value_width)), code.number(2 * delta.key_columns))
        of_state = code.mul(head, code.number(delta.key_width * delta.value_width))
        of_written = code.mul(head, code.number(delta.value_width))
        with code.loop(0, delta.value_width, TOGETHER) as first:
            columns = range(0, TOGETHER, WIDTH)
            found = [[code.variable(of_doubles(0.0)) for _ in columns] for _ in (key, query)]
            with code.loop(0, delta.key_width) as line:
                factors = [code.splat(code.read(DOUBLE, one, code.shl(line, code.number(3)))) for one in (key, query)]
                at = code.add(code.add(of_state, code.mul(line, code.number(delta.value_width))), first)
                for number, column in enumerate(columns):
                    value = self._read(code, own.state.pointer("state"), code.add(at, code.number(column)))
                    for factor, sums in zip(factors, found, strict=True):
                        sums[number].value = code.fused(factor, value, sums[number].value)
            for sums in found:
                for one in sums:
                    one.value = code.fmul(one.value, share)

            def add(index: Value, place: Value, found: list[list[Value]] = found, first: Value = first) -> None:
                rows, number = own.part(place, "written")
                at = code.add(code.mul(number, code.number(delta.heads * delta.value_width)), of_written)
                both = code.at(weights, code.shl(index, code.number(4)))
                factors = [code.splat(code.read(DOUBLE, both, 8 * one)) for one in (0, 1)]
                for number, column in enumerate(columns):
                    value = self._read(code, rows, code.add(code.add(at, first), code.number(column)))
                    for factor, sums in zip(factors, found, strict=True):
                        sums[number].value = code.fused(factor, value, sums[number].value)

            own.ancestors.each_before(add)
            for number, column in enumerate(columns):
                at = code.add(code.add(of_values, first), code.number(column))
                value = code.fpext(read_floats(code, convolved, at, is_bf16=False), DOUBLES)
                written = code.fmul(code.splat(rate), code.fsub(value, found[0][number].value))
                to = code.add(code.mul(own.number, code.number(delta.heads * delta.value_width)), of_written)
                self._write(
                    code, written, own.state.pointer("new_written"), code.add(code.add(to, first), code.number(column))
                )
                out = code.fused(code.splat(alike), written, found[1][number].value)
                self._write_found(code, code.fptrunc(out, FLOATS), convolved, at)

    def _weigh(
        self, code: Code, own: OwnRow, vectors: tuple[Value, Value], weights: Value, group: Value, head: Value,
        since: Value,
    ) -> None:  # fmt: skip
        """Write how much of each ancestor's writing a key and a query find: by likeness, faded by the steps between."""

        def write(index: Value, place: Value) -> None:
            fade = _exp_of(code, code.fsub(since, self._since_of(code, own, place, head)))
            alike = _dot_of_doubles(code, self._delta.key_width, vectors, self._key_of(code, own, place, group))
            both = code.at(weights, code.shl(index, code.number(4)))
            for number, one in enumerate(alike):
                code.write(code.fmul(one, fade), both, 8 * number)

        own.ancestors.each_before(write)

    def _write_found(self, code: Code, found: Value, convolved: Value, at: Value) -> None:
        """Write what a row finds, rounded to the model's dtype: the order of sums does not show in that."""
        write_floats(code, as_bf16(code, found) if self._shape.is_bf16 else found, convolved, at, is_bf16=False)

    def _since(self, code: Code, own: OwnRow, decay: Value, head: Value) -> Value:
        """Write and return the logarithm of the state's share that is left behind a row."""
        delta, before = self._delta, code.variable(ir.Constant(DOUBLE, 0.0))
        last = code.sub(own.ancestors.count, code.number(2))
        with code.if_then(code.icmp_signed(">=", last, code.number(0))):
            before.value = self._since_of(code, own, own.ancestors.place(last), head)
        since = code.fadd(before.value, decay)
        to = code.add(code.mul(own.number, code.number(delta.heads)), head)
        if self._delta.is_wide:
            code.write(since, own.state.pointer("new_since"), code.shl(to, code.number(3)))
        else:
            rounded = code.fptrunc(since, FLOAT)
            code.write(rounded, own.state.pointer("new_since"), code.shl(to, code.number(2)))
            since = code.fpext(rounded, DOUBLE)
        return since

    def _since_of(self, code: Code, own: OwnRow, place: Value, head: Value) -> Value:
        """Return what `_since` found of an earlier row."""
        rows, number = own.part(place, "since")
        at = code.add(code.mul(number, code.number(self._delta.heads)), head)
        if self._delta.is_wide:
            return code.read(DOUBLE, rows, code.shl(at, code.number(3)))
        return code.fpext(code.read(FLOAT, rows, code.shl(at, code.number(2))), DOUBLE)

    def _key_of(self, code: Code, own: OwnRow, place: Value, group: Value) -> Callable[[Value], Value]:
        """Return what gives columns of an earlier row's key."""
        delta = self._delta
        rows, number = own.part(place, "keys")
        first = code.add(code.mul(number, code.number(delta.key_heads)), group)
        first = code.mul(first, code.number(delta.key_width))
        return lambda column: self._read(code, rows, code.add(first, column), in_model=True)

    def _gate(
        self, code: Code, record: RecordFields, layer: RecordFields, convolved: Value, row: Value, head: Value
    ) -> None:
        """Norm a head of what a row found, gate it, and round it for the product behind."""
        delta, width = self._delta, self._delta.value_width
        heads = code.at(convolved, 8 * delta.key_columns)
        first = code.mul(head, code.number(width))
        total = code.variable(constant(0.0))
        with code.loop(0, width, WIDTH) as column:
            value = read_floats(code, heads, code.add(first, column), is_bf16=False)
            total.value = code.fused(value, value, total.value)
        factor = code.splat(length_inverse(code, code.sum_of(total.value), width, delta.eps))
        gates = self._gates(code, record, row, head)
        with code.loop(0, width, WIDTH) as column:
            at = code.add(first, column)
            value = code.fmul(read_floats(code, heads, at, is_bf16=False), factor)
            value = code.fmul(value, read_floats(code, layer.pointer("memory_norm"), column, is_bf16=False))
            value = code.fmul(value, silu(code, read_floats(code, gates, column, is_bf16=False)))
            write_floats(code, value, heads, at, is_bf16=False)
        to = code.at(record.pointer("rounded"), code.mul(row, code.number(self._shape.row_bytes(delta.value_columns))))
        group = code.udiv(first, code.number(COLUMNS))
        end = code.add(group, code.number(width // COLUMNS))
        code.call(self._round_row, [heads, to, code.number(delta.value_columns), group, end])

    def _read(self, code: Code, pointer: Value, index: Value, *, in_model: bool = False) -> Value:
        """Return eight numbers as doubles: of the model's dtype, or of states."""
        if self._delta.is_wide and not in_model:
            return _doubles(code, pointer, index)
        return code.fpext(read_floats(code, pointer, index, is_bf16=self._shape.is_bf16), DOUBLES)

    def _write(self, code: Code, value: Value, pointer: Value, index: Value) -> None:
        if self._delta.is_wide:
            code.write(value, pointer, code.shl(index, code.number(3)))
        else:
            write_floats(code, code.fptrunc(value, FLOATS), pointer, index, is_bf16=False)


def _doubles(code: Code, pointer: Value, index: Value) -> Value:
    return code.read(DOUBLES, pointer, code.shl(index, code.number(3)))


def _exp_of(code: Code, value: Value) -> Value:
    """Return a power of e: a double."""
    return code.extract_element(exp_of_doubles(code, code.splat(value)), FIRST)


def _dot_of_doubles(
    code: Code, width: int, vectors: tuple[Value, ...] | list[Value], columns: Callable[[Value], Value]
) -> list[Value]:
    """Return the products of vectors with another, all of this width."""
    sums = [code.variable(of_doubles(0.0)) for _ in vectors]
    with code.loop(0, width, WIDTH) as column:
        other = columns(column)
        for vector, total in zip(vectors, sums, strict=True):
            total.value = code.fused(_doubles(code, vector, column), other, total.value)
    return [code.sum_of(total.value) for total in sums]
