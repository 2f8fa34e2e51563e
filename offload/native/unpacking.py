"""GGML's blocks are unpacked: each weight is rounded once, from the very numbers that `formats/gguf_blocks.py` gives.

`unpack(work)` takes a record of addresses and sizes, and is called on as many threads as share the blocks.
"""

from __future__ import annotations

import ctypes

import torch
from llvmlite import ir
from torch import Tensor

from offload.native import threads
from offload.native.block_grids import ALL_TEXTS
from offload.native.block_types import GROUP
from offload.native.code import FLOAT, FLOATS, I16, I32, I64, INTS, POINTER, Code, Value, function
from offload.native.compiler import Compiled
from offload.native.rounded_rows import in_bf16

BLOCKS, OUT, NUM_BLOCKS, THREAD, THREADS = range(5)  # fields of a work's record
EACH_BLOCKS = 1024  # that are worth a thread


def unpacking_module(name: str, *, in_half: bool) -> ir.Module:
    """Return the text of `unpack` to float32, or to bf16."""
    module, kind = ir.Module(name), ALL_TEXTS[name]
    given = function(module, "unpack", {"work": POINTER})
    code, work, out_bytes = Code(given["function"]), given["work"], 2 if in_half else 4
    blocks, out = (code.field(work, place, POINTER) for place in (BLOCKS, OUT))
    asked = ir.FunctionType(I32, ())
    thread, num_threads = (
        code.zext(code.call_at(code.field(work, place, POINTER), asked, []), I64) for place in (THREAD, THREADS)
    )
    count = code.field(work, NUM_BLOCKS)
    first, last = (code.udiv(code.mul(count, end), num_threads) for end in (thread, code.add(thread, code.number(1))))
    with code.loop(first, last) as number:
        block = code.at(blocks, code.mul(number, code.number(kind.num_bytes)))
        place = code.at(out, code.mul(number, code.number(kind.weights * out_bytes)))
        least = None if kind.minimum is None else kind.minimum(code, block)
        for group, one in enumerate(kind.groups(code, block)):
            added = least if least is None or least.type == FLOAT else _lane(code, least, group)
            for start in range(0, GROUP, FLOATS.count):
                numbers = _floats(code, one.numbers, start)
                step = code.splat(one.steps[start * len(one.steps) // GROUP])
                if one.added is not None:  # a product of few bits
                    more = code.fmul(_floats(code, one.added.numbers, start), code.splat(one.added.steps[0]))
                    values = code.fused(numbers, step, more)
                else:
                    values = code.fmul(numbers, step) if added is None else code.fused(numbers, step, code.splat(added))
                values = in_bf16(code, values) if in_half else values
                code.write(values, place, (GROUP * group + start) * out_bytes)
    code.ret_void()
    return module


def unpack(code: Compiled, blocks: Tensor, num_blocks: int, out: Tensor) -> None:
    """Write that many blocks as weights, which follow each other as they do."""
    work = (ctypes.c_int64 * 5)(
        blocks.data_ptr(), out.data_ptr(), num_blocks,
        *(threads.address_of(name) or 0 for name in ("omp_get_thread_num", "omp_get_num_threads")),
    )  # fmt: skip
    num_threads = min(torch.get_num_threads(), max(1, num_blocks // EACH_BLOCKS))
    threads.run(code.address("unpack"), ctypes.addressof(work), num_threads)


def _floats(code: Code, numbers: Value, start: int) -> Value:
    """Return eight of a group's numbers as floats."""
    places = ir.Constant(INTS, list(range(start, start + FLOATS.count)))
    eight = code.shuffle_vector(numbers, numbers, places)
    assert eight.type == ir.VectorType(I16, FLOATS.count)
    return code.sitofp(code.sext(eight, INTS), FLOATS)


def _lane(code: Code, vector: Value, lane: int) -> Value:
    return code.extract_element(vector, ir.Constant(I32, lane))
