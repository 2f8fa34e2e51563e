"""A builder of LLVM's text that reads like loops over memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF, FLOAT, DOUBLE, POINTER, VOID = ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.PointerType(), ir.VoidType()
LANES = 8  # of a float32 register that every processor has
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
DOUBLES, LONGS = ir.VectorType(DOUBLE, LANES), ir.VectorType(I64, LANES)
SHORTS = ir.VectorType(I16, 2 * LANES)

Value = Any  # of llvmlite, whose types are not stated


def function(module: ir.Module, name: str, arguments: dict[str, Any], *, is_inner: bool = False) -> dict[str, Value]:
    """Add a function that returns nothing, and return its arguments by name, and itself as `function`.

    An inner one is only called by others of the module, which take its code in.
    """
    made = ir.Function(module, ir.FunctionType(VOID, tuple(arguments.values())), name)
    if is_inner:
        made.linkage = "internal"
        made.attributes.add("alwaysinline")
    return {**dict(zip(arguments, made.args, strict=True)), "function": made}


class _Callee:
    """An address that is called as a function of some kind."""

    def __init__(self, address: Value, kind: ir.FunctionType) -> None:
        self.function_type, self.type, self.get_reference = kind, address.type, address.get_reference


class Code(ir.IRBuilder):  # type: ignore[misc]
    """The body of a function."""

    def __init__(self, function: ir.Function) -> None:
        super().__init__(function.append_basic_block("entry"))
        self._first = self.block

    def number(self, value: int) -> Value:
        """Return a whole number of 64 bits."""
        return ir.Constant(I64, value)

    def splat_of(self, value: float, kind: Any) -> Value:
        """Return a vector whose lanes all are this constant."""
        return ir.Constant(kind, [value] * kind.count)

    def splat(self, scalar: Value, lanes: int = LANES) -> Value:
        """Return a vector whose lanes all are this scalar."""
        kind = ir.VectorType(scalar.type, lanes)
        one = self.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def at(self, pointer: Value, offset_bytes: Value | int) -> Value:
        """Return the place so many bytes behind another."""
        offset = self.number(offset_bytes) if isinstance(offset_bytes, int) else offset_bytes
        return self.gep(pointer, [offset], source_etype=I8)

    def read(self, kind: Any, pointer: Value, offset_bytes: Value | int = 0, *, align: int = 1) -> Value:
        """Return what stands there."""
        return self.load(self.at(pointer, offset_bytes), typ=kind, align=align)

    def write(self, value: Value, pointer: Value, offset_bytes: Value | int = 0, *, align: int = 1) -> None:
        """Put a value there."""
        self.store(value, self.at(pointer, offset_bytes), align=align)

    def field(self, record: Value, index: int, kind: Any = I64) -> Value:
        """Return the field of this number in a record of numbers of 64 bits and pointers."""
        return self.read(kind, record, 8 * index, align=8)

    def call_at(self, address: Value, kind: ir.FunctionType, arguments: Sequence[Value]) -> Value:
        """Return what the function of this kind at an address gives."""
        return self.call(_Callee(address, kind), arguments)

    def intrinsic(self, name: str, result: Any, *arguments: Value) -> Value:
        """Return what one of LLVM's own functions makes of these."""
        module = self.module
        if name not in module.globals:
            ir.Function(module, ir.FunctionType(result, [argument.type for argument in arguments]), name)
        return self.call(module.globals[name], arguments)

    def fused(self, factor: Value, other: Value, added: Value) -> Value:
        """Return factor * other + added, rounded once."""
        kind = added.type
        is_vector = isinstance(kind, ir.VectorType)
        number = "f64" if (kind.element if is_vector else kind) == DOUBLE else "f32"
        suffix = f"v{kind.count}{number}" if is_vector else number
        return self.intrinsic(f"llvm.fma.{suffix}", kind, factor, other, added)

    def sum_of(self, vector: Value) -> Value:
        """Return the sum of a vector's floats: halves are added to each other, until one is left."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            low, high = (
                self.shuffle_vector(
                    vector, vector, ir.Constant(ir.VectorType(I32, lanes), list(range(start, start + lanes)))
                )
                for start in (0, lanes)
            )
            vector = self.fadd(low, high)
        return self.extract_element(vector, ir.Constant(I32, 0))

    def variable(self, value: Value) -> Variable:
        """Return a variable with this value, which a register will hold."""
        with self.goto_block(self._first):
            block = self._first
            self.position_at_start(block)
            place = self.alloca(value.type)
        return Variable(self, place, value)

    @contextmanager
    def loop(self, start: Value | int, end: Value | int, step: Value | int = 1) -> Iterator[Value]:
        """Repeat what is written within for start, start + step, ... below end."""
        start, end, step = (self.number(one) if isinstance(one, int) else one for one in (start, end, step))
        before = self.block
        body, after = self.append_basic_block("loop"), self.append_basic_block("after")
        self.cbranch(self.icmp_signed("<", start, end), body, after)
        self.position_at_end(body)
        index = self.phi(I64)
        index.add_incoming(start, before)
        yield index
        following = self.add(index, step)
        index.add_incoming(following, self.block)
        self.cbranch(self.icmp_signed("<", following, end), body, after)
        self.position_at_end(after)


class Variable:
    """A value that a loop changes."""

    def __init__(self, code: Code, place: Value, value: Value) -> None:
        self._code, self._place, self._kind = code, place, value.type
        self.value = value

    @property
    def value(self) -> Value:
        """The value now."""
        return self._code.load(self._place, typ=self._kind)

    @value.setter
    def value(self, value: Value) -> None:
        self._code.store(value, self._place)


def variables(code: Code, values: Sequence[Value]) -> list[Variable]:
    """Return variables with these values."""
    return [code.variable(value) for value in values]
