"""Records, as the text of a pass reads them."""

from __future__ import annotations

from edgespec.model.native.records import AddressRecord
from edgespec.model.native.shape import DecoderShape
from offload.native.code import I64, POINTER, Code, Value


class RecordFields:
    """A record, as the text reads it."""

    def __init__(self, code: Code, record: AddressRecord, address: Value) -> None:
        self._code, self._record, self.address = code, record, address

    def number(self, name: str) -> Value:
        """Return a field that is a number."""
        return self._code.field(self.address, self._record.names.index(name), I64)

    def pointer(self, name: str) -> Value:
        """Return a field that is an address."""
        return self._code.field(self.address, self._record.names.index(name), POINTER)

    def write(self, name: str, value: Value) -> None:
        """Write a field."""
        self._code.write(value, self.address, 8 * self._record.names.index(name), align=8)

    def following(self, number: Value) -> RecordFields:
        """Return the record so many behind this one."""
        code = self._code
        return RecordFields(
            code, self._record, code.at(self.address, code.mul(number, code.number(self._record.num_bytes)))
        )


def product_row(code: Code, record: RecordFields, shape: DecoderShape, name: str, row: Value) -> Value:
    """Return where a row's columns of a product begin: floats."""
    whole, before = shape.lies_in(name)
    place = code.add(code.mul(row, code.number(shape.width(whole))), code.number(before))
    return code.at(record.pointer(whole), code.shl(place, code.number(2)))
