"""Instructions that LLVM knows by a name of the processor's own: for x86, and for ARM, whose text runs nowhere yet."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from offload.native.code import I8, I16, I32, VOID, Code, Value

X86 = {"x86_64", "AMD64"}
ARM = {"aarch64", "arm64"}
WIDE = 16  # floats of a register of 512 bits
BYTES, HALF_BYTES = ir.VectorType(I8, 32), ir.VectorType(I8, 16)
WIDE_SHORTS = ir.VectorType(I16, 2 * WIDE)
_written: list[str] = []  # the kind of processor that text is for now is the last one


@contextmanager
def written_for(machine: str) -> Iterator[None]:
    """Write text for another kind of processor than this one."""
    _written.append(machine)
    try:
        yield
    finally:
        _written.pop()


def _is_x86() -> bool:
    return (_written[-1] if _written else platform.machine()) in X86


def multiply_pairs(code: Code, numbers: Value, others: Value) -> Value:
    """Return the sums of two products each, of whole numbers of 16 bits: of 32 bits."""
    lanes = numbers.type.count // 2
    kind = ir.VectorType(I32, lanes)
    if _is_x86():
        name = "llvm.x86.avx512.pmaddw.d.512" if lanes == WIDE else "llvm.x86.avx2.pmadd.wd"
        return code.intrinsic(name, kind, numbers, others)
    products = []
    for start in range(2):  # each becomes two multiplications that add
        mask = ir.Constant(kind, list(range(start, 2 * lanes, 2)))
        wide = [code.sext(code.shuffle_vector(one, one, mask), kind) for one in (numbers, others)]
        products.append(code.mul(*wide))
    return code.add(*products)


def look_up(code: Code, table: Value, places: Value) -> Value:
    """Return the bytes of a table at 32 places below 16: of its first 16 bytes, and of the others for the last 16."""
    if _is_x86():
        return code.intrinsic("llvm.x86.avx2.pshuf.b", BYTES, table, places)
    masks = [ir.Constant(ir.VectorType(I32, 16), list(range(start, start + 16))) for start in (0, 16)]
    found = [
        code.intrinsic(
            "llvm.aarch64.neon.tbl1.v16i8",
            HALF_BYTES,
            *(code.shuffle_vector(one, one, mask) for one in (table, places)),
        )
        for mask in masks
    ]
    return code.shuffle_vector(*found, ir.Constant(ir.VectorType(I32, 32), list(range(32))))


def look_up_shorts(code: Code, table: Value, places: Value) -> Value:
    """Return the numbers of a table at 32 places, of which five bits count: in registers of 512 bits."""
    return code.intrinsic("llvm.x86.avx512.permvar.hi.512", WIDE_SHORTS, table, places)


def pause(code: Code) -> None:
    """Let another thread of the core compute while this one waits."""
    if _is_x86():
        code.intrinsic("llvm.x86.sse2.pause", VOID)
    else:
        code.intrinsic("llvm.aarch64.hint", VOID, ir.Constant(I32, 1))
