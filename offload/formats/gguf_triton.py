"""Kernels of Triton for GGML's blocks: one unpacks them, one multiplies few rows with them; both read each type alike.

A block lies in words of 4, 2 or 1 bytes, whichever its size is a multiple of. A program takes some blocks, whose words
become bytes [blocks, count]; shifts take these apart in the order of the weights.
To unpack, each word is loaded once and each weight stored once, and what shares a scale is multiplied by it: as in
`gguf_blocks.py` every product is exact in float32, and one sum is rounded.

Triton's own language: functions below are compiled for a card. Importing this module needs Triton.
"""

import triton
import triton.language as tl

from offload.formats.gguf_bits import FP4_NUMBERS
from offload.formats.gguf_blocks import IQ4_NUMBERS


def _words(numbers: tuple[int, ...]) -> list[tl.constexpr]:
    """Return sixteen numbers of eight bits as four words, the first lowest."""
    packed = bytes(number & 255 for number in numbers)
    return [tl.constexpr(int.from_bytes(packed[at : at + 4], "little", signed=True)) for at in range(0, 16, 4)]


IQ4_0, IQ4_1, IQ4_2, IQ4_3 = _words(IQ4_NUMBERS)
FP4_0, FP4_1, FP4_2, FP4_3 = _words(FP4_NUMBERS)


@triton.jit
def _bytes(words, block, start: tl.constexpr, count: tl.constexpr, size: tl.constexpr, each: tl.constexpr):
    """Return bytes of each block from a place on: int32 [blocks, count]."""
    place = block[:, None] * (size // each) + start // each + tl.arange(0, count // each)[None, :]
    word = tl.load(words + place).to(tl.int32)
    found = word[:, :, None] >> (8 * tl.arange(0, each))[None, None, :]
    return tl.reshape(found & 255, (block.shape[0], count))


@triton.jit
def _word(words, block, start: tl.constexpr, size: tl.constexpr, each: tl.constexpr):
    """Return four bytes of each block as one number: int32 [blocks, 1]."""
    place = words + block[:, None] * (size // each) + start // each
    if each == 4:
        found = tl.load(place).to(tl.int32)
    else:
        found = tl.load(place).to(tl.int32) & 0xFFFF | tl.load(place + 1).to(tl.int32) << 16
    return found


@triton.jit
def _half(halves, block, start: tl.constexpr, size: tl.constexpr):
    """Return a float16 number of each block: float32 [blocks, 1]."""
    return tl.load(halves + block[:, None] * (size // 2) + start // 2).to(tl.float32)


@triton.jit
def _parts(packed, groups: tl.constexpr, bits: tl.constexpr):
    """Return numbers of a few bits, of each group all lowest ones first: [blocks, m] -> [blocks, 8 / bits * m]."""
    count: tl.constexpr = 8 // bits
    width: tl.constexpr = packed.shape[1] // groups
    grouped = tl.reshape(packed, (packed.shape[0], groups, 1, width))
    found = grouped >> (bits * tl.arange(0, count))[None, None, :, None]
    return tl.reshape(found & ((1 << bits) - 1), (packed.shape[0], count * packed.shape[1]))


@triton.jit
def _bits_of(word):
    """Return the bits of a number of each block, the lowest first: [blocks, 1] -> [blocks, 32]."""
    return word >> tl.arange(0, 32)[None, :] & 1


@triton.jit
def _signed(number):
    """Return bytes as numbers from -128 on."""
    return number << 24 >> 24


@triton.jit
def _looked_up(index, w0: tl.constexpr, w1: tl.constexpr, w2: tl.constexpr, w3: tl.constexpr):
    """Return numbers out of sixteen, which four words hold."""
    word = tl.where(index < 8, tl.where(index < 4, w0, w1), tl.where(index < 12, w2, w3))
    return word << 24 - 8 * (index & 3) >> 24


@triton.jit
def _six_bits(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    """Return a K block's eight scales and minima, of six bits times the block's two: float32 [blocks, 8] each."""
    scales, minima = _word(words, block, 4, size, each), _word(words, block, 8, size, each)
    last = _word(words, block, 12, size, each)  # low halves of the last four of both; high bits above the first four
    group = tl.arange(0, 8)[None, :]
    shift = 8 * (group & 3)
    scale = tl.where(group < 4, scales >> shift & 63, last >> shift & 15 | (scales >> shift + 6 & 3) << 4)
    least = tl.where(group < 4, minima >> shift & 63, last >> shift + 4 & 15 | (minima >> shift + 6 & 3) << 4)
    return _half(halves, block, 0, size) * scale.to(tl.float32), _half(halves, block, 2, size) * least.to(tl.float32)


@triton.jit
def _minus(number):
    """Return a number with its sign turned, of zeros too: Triton negates by 0 - x."""
    return (number.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _q4_0(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    return _parts(_bytes(words, block, 2, 16, size, each), 1, 4) - 8, _half(halves, block, 0, size), None


@triton.jit
def _q4_1(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    number = _parts(_bytes(words, block, 4, 16, size, each), 1, 4)
    return number, _half(halves, block, 0, size), _minus(_half(halves, block, 2, size))


@triton.jit
def _q5_0(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    fifth = _bits_of(_word(words, block, 2, size, each))
    number = (_parts(_bytes(words, block, 6, 16, size, each), 1, 4) | fifth << 4) - 16
    return number, _half(halves, block, 0, size), None


@triton.jit
def _q5_1(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    fifth = _bits_of(_word(words, block, 4, size, each))
    number = _parts(_bytes(words, block, 8, 16, size, each), 1, 4) | fifth << 4
    return number, _half(halves, block, 0, size), _minus(_half(halves, block, 2, size))


@triton.jit
def _q8_0(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    return _signed(_bytes(words, block, 2, 32, size, each)), _half(halves, block, 0, size), None


@triton.jit
def _q2_k(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    number = _parts(_bytes(words, block, 16, 64, size, each), 2, 2)
    factors = _bytes(words, block, 0, 16, size, each)
    scale = _half(halves, block, 80, size) * (factors & 15).to(tl.float32)
    return number, scale, _half(halves, block, 82, size) * (factors >> 4).to(tl.float32)


@triton.jit
def _q3_k(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    third = _parts(_bytes(words, block, 0, 32, size, each), 1, 1)
    number = (_parts(_bytes(words, block, 32, 64, size, each), 2, 2) | third << 2) - 4
    low = _parts(_bytes(words, block, 96, 8, size, each), 1, 4)
    high = _parts(_bytes(words, block, 104, 4, size, each), 1, 2)
    return number, _half(halves, block, 108, size) * ((low | high << 4) - 32).to(tl.float32), None


@triton.jit
def _q4_k(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    scale, least = _six_bits(words, halves, block, size, each)
    return _parts(_bytes(words, block, 16, 128, size, each), 4, 4), scale, least


@triton.jit
def _q5_k(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    fifth = _parts(_bytes(words, block, 16, 32, size, each), 1, 1)
    scale, least = _six_bits(words, halves, block, size, each)
    return _parts(_bytes(words, block, 48, 128, size, each), 4, 4) | fifth << 4, scale, least


@triton.jit
def _q6_k(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    high = _parts(_bytes(words, block, 128, 64, size, each), 2, 2)
    number = (_parts(_bytes(words, block, 0, 128, size, each), 2, 4) | high << 4) - 32
    factor = _signed(_bytes(words, block, 192, 16, size, each)).to(tl.float32)
    return number, _half(halves, block, 208, size) * factor, None


@triton.jit
def _iq4_nl(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    number = _looked_up(_parts(_bytes(words, block, 2, 16, size, each), 1, 4), IQ4_0, IQ4_1, IQ4_2, IQ4_3)
    return number, _half(halves, block, 0, size), None


@triton.jit
def _iq4_xs(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    number = _looked_up(_parts(_bytes(words, block, 8, 128, size, each), 8, 4), IQ4_0, IQ4_1, IQ4_2, IQ4_3)
    group = tl.arange(0, 8)[None, :]
    low = _word(words, block, 4, size, each) >> 4 * group & 15
    high = _word(words, block, 0, size, each) >> 16 + 2 * group & 3  # the lower half of that word is the block's scale
    return number, _half(halves, block, 0, size) * ((low | high << 4) - 32).to(tl.float32), None


@triton.jit
def _mxfp4(words, halves, block, size: tl.constexpr, each: tl.constexpr):
    """Numbers are twice as large in the table, so half the power is used: a denormal one for exponents below 2."""
    number = _looked_up(_parts(_bytes(words, block, 1, 16, size, each), 1, 4), FP4_0, FP4_1, FP4_2, FP4_3)
    exponent = tl.load(words + block[:, None] * size).to(tl.int32)
    power = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), exponent - 1 << 23)
    return number, power.to(tl.float32, bitcast=True), None


# type -> what reads blocks: numbers int32 [blocks, weights], scales float32 [blocks, groups], and minima or none
READS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip


@triton.jit(
    do_not_specialize=[  # numbers of a matrix, for which no code of its own is compiled
        "chunks", "run_blocks", "inners", "middles",
        "source_inner", "source_middle", "source_outer", "place_inner", "place_middle", "place_outer",
    ]
)  # fmt: skip
def unpack(
    words, halves, out, chunks, run_blocks, inners, middles,
    source_inner, source_middle, source_outer, place_inner, place_middle, place_outer,
    read: tl.constexpr, weights: tl.constexpr, size: tl.constexpr, each: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Write runs of blocks that follow each other; `inners` runs make a middle, and `middles` of these an outer."""
    run = tl.program_id(0) // chunks
    inner, middle, outer = run % inners, run // inners % middles, run // inners // middles
    number = tl.program_id(0) % chunks * at_once + tl.arange(0, at_once)  # of a block in the run
    here = tl.minimum(number, run_blocks - 1).to(tl.int64)  # beyond the end the last one is read again
    source = here + (inner * source_inner + middle * source_middle + outer * source_outer)
    numbers, scale, least = read(words, halves, source, size, each)
    groups: tl.constexpr = scale.shape[1]
    found = tl.reshape(numbers.to(tl.float32), (at_once, groups, weights // groups)) * scale[:, :, None]
    if least is not None:
        found -= least[:, :, None]
    found = tl.reshape(found, (at_once, weights))
    place = number.to(tl.int64) + (inner * place_inner + middle * place_middle + outer * place_outer)
    places = out + (place * weights)[:, None] + tl.arange(0, weights)[None, :]
    tl.store(places, found.to(out.dtype.element_ty), mask=(number < run_blocks)[:, None])


@triton.jit(do_not_specialize=["rows", "weight_rows", "row_blocks", "inner", "outer"])
def multiply(
    words, halves, given, bias, out, rows, weight_rows, row_blocks, inner, outer,
    read: tl.constexpr, weights: tl.constexpr, size: tl.constexpr, each: tl.constexpr, at_once: tl.constexpr,
    width: tl.constexpr, tile_rows: tl.constexpr, tile: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """Write rows [n, i] times rows of blocks [r, i]: a program has some of both, and goes over all columns in order.

    Numbers are exact in bf16. Groups of `width` columns have sums of their own in float32, which scales enter, until
    the end. Nothing depends on how many rows there are: those beyond the last are zeros. Of each `inner` times `outer`
    weight rows, every `inner`th one is beside the first.
    """
    row_tiles = tl.cdiv(rows, tile_rows)
    row = tl.program_id(0) % row_tiles * tile_rows + tl.arange(0, tile_rows)
    weight = tl.program_id(0) // row_tiles * tile + tl.arange(0, tile)
    begin = tl.minimum(weight, weight_rows - 1).to(tl.int64) * row_blocks  # beyond the end the last one is read again
    given_row = given + (row.to(tl.int64) * (row_blocks * weights))[None, :, None]
    has_row = (row < rows)[None, :, None]
    groups: tl.constexpr = at_once * weights // width
    total = tl.zeros((groups, tile_rows, tile), tl.float32)
    for first in range(0, row_blocks, at_once):
        block = tl.minimum(first + tl.arange(0, at_once), row_blocks - 1)
        source = tl.reshape(begin[:, None] + block[None, :], (tile * at_once,))
        numbers, scale, least = read(words, halves, source, size, each)
        number = tl.permute(tl.reshape(numbers, (tile, groups, width)), (1, 2, 0)).to(given.dtype.element_ty)
        column = first * weights + tl.arange(0, groups)[:, None, None] * width + tl.arange(0, width)[None, None, :]
        some = tl.load(given_row + column, mask=has_row & (column < row_blocks * weights), other=0.0)
        part = tl.dot(some, number, input_precision="ieee", out_dtype=tl.float32)
        total += part * tl.trans(tl.reshape(scale, (tile, groups)))[:, None, :]
        if least is not None:
            total -= (
                tl.sum(some.to(tl.float32), 2)[:, :, None] * tl.trans(tl.reshape(least, (tile, groups)))[:, None, :]
            )
    found = tl.sum(total, 0)
    among = weight % (inner * outer)
    place = weight - among + among % inner * outer + among // inner
    is_weight = weight < weight_rows
    if has_bias:
        found += tl.load(bias + place, mask=is_weight, other=0.0).to(tl.float32)[None, :]
    places = out + row[:, None].to(tl.int64) * weight_rows + place[None, :]
    tl.store(places, found.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_weight[None, :])
