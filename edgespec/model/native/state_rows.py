"""The rows that a row continues in a layer with a state, as the text of a pass finds them.

A row's ancestors behind its text's state are open rows, and new ones of the pass: those before the tail, then its path.
"""

from __future__ import annotations

from collections.abc import Callable

from edgespec.model.native.fields import RecordFields
from edgespec.model.native.records import ROW, SPAN, STATE
from offload.native.code import I64, Code, Value


class Ancestors:
    """The places of the rows behind a text's state that a row continues, in order, itself the last."""

    def __init__(self, code: Code, row: RecordFields, start: Value) -> None:
        self._code, self._start, self._path = code, start, row.pointer("path")
        self._before = code.sub(row.number("context"), start)  # the rest is in the path
        self.count = code.add(self._before, row.number("num_path"))

    def place(self, index: Value) -> Value:
        """Return the place of the one with this number; of a negative one anything."""
        code = self._code
        in_path = code.intrinsic("llvm.smax.i64", I64, code.sub(index, self._before), code.number(0))
        found = code.read(I64, self._path, code.shl(in_path, code.number(3)), align=8)
        return code.select(code.icmp_signed("<", index, self._before), code.add(self._start, index), found)

    def each_before(self, work: Callable[[Value, Value], None]) -> None:
        """Do work(number, place) for each but the row itself."""
        with self._code.loop(0, self._code.sub(self.count, self._code.number(1))) as index:
            work(index, self.place(index))


class OwnRow:
    """A row, and what its text keeps in a layer."""

    def __init__(self, code: Code, record: RecordFields, states: Value, row: Value) -> None:
        fields = RecordFields(code, ROW, record.pointer("rows")).following(row)
        text = fields.number("text")
        span = RecordFields(code, SPAN, record.pointer("spans")).following(text)
        self._code, self.row, self._length = code, row, span.number("length")
        self.state = RecordFields(code, STATE, states).following(text)
        self._start = self.state.number("start")
        self.number = code.sub(fields.number("place"), self._length)  # among the text's new rows
        self.ancestors = Ancestors(code, fields, self._start)

    def part(self, place: Value, name: str) -> tuple[Value, Value]:
        """Return where open rows, or new ones, have a part, and the number of the one at this place there."""
        code = self._code
        is_new = code.icmp_signed(">=", place, self._length)
        rows = code.select(is_new, self.state.pointer(f"new_{name}"), self.state.pointer(name))
        return rows, code.sub(place, code.select(is_new, self._length, self._start))
