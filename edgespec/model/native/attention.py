"""The attention of a pass, as text: rows are rotated and put in their texts' caches, then each row sees its path.

A tree's row sees the places of its text, then its ancestors', in the order in which they would be text: its sums are
those that it would have as the last row of a text. Scores of a row's heads that share keys stay in a thread's scratch.
"""

from __future__ import annotations

from llvmlite import ir

from edgespec.model.native.fields import RecordFields, product_row
from edgespec.model.native.functions import capped, constant, exp, length_inverse, logistic, read_floats, write_floats
from edgespec.model.native.records import LAYER, PASS, ROW, STORAGE
from edgespec.model.native.shape import DecoderShape
from offload.native.code import FLOAT, FLOATS, I32, I64, POINTER, Code, Value, function

WIDTH = FLOATS.count
CHUNK = 64  # columns of values that are summed in registers at once
LEAST = -3.0e38  # below all scores


def add_placed(module: ir.Module, shape: DecoderShape, *, name: str = "placed") -> ir.Function:
    """Add `placed(pass, layer, storages, row)`: queries are rotated in their place, keys and values go to the cache."""
    arguments = {"pass": POINTER, "layer": POINTER, "storages": POINTER, "row": I64}
    given = function(module, name, arguments)
    code = Code(given["function"])
    record, layer, number = (
        RecordFields(code, PASS, given["pass"]),
        RecordFields(code, LAYER, given["layer"]),
        given["row"],
    )
    row = RecordFields(code, ROW, record.pointer("rows")).following(number)
    storage = RecordFields(code, STORAGE, given["storages"]).following(row.number("text"))
    of_position = code.number(4 * (shape.rotated + shape.factor_columns))
    rotation = code.at(layer.pointer("rotation"), code.mul(row.number("position"), of_position))
    factor = constant(shape.scale)
    if shape.factor_columns:
        factor = code.fmul(factor, read_floats(code, rotation, code.number(shape.rotated), is_bf16=False))
    own = {name: product_row(code, record, shape, name, number) for name in ("query", "key", "value")}
    with code.loop(0, shape.heads) as head:
        given_at, place = (code.mul(head, code.number(size)) for size in (shape.query_columns, shape.head_dim))
        vectors = _biased(code, shape, layer, "query", own["query"], given_at)
        if shape.has_gates:  # queries then close up, which overwrites those of earlier heads
            gates = code.at(record.pointer("gates"), code.mul(number, code.number(4 * shape.heads * shape.head_dim)))
            of_gate = _biased(
                code, shape, layer, "query", own["query"], code.add(given_at, code.number(shape.head_dim))
            )
            for part, vector in enumerate(of_gate):
                write_floats(code, vector, gates, code.add(place, code.number(WIDTH * part)), is_bf16=False)
        if shape.has_head_norms:
            vectors = _normed(code, shape, vectors, layer.pointer("query_norm"))
        for part, vector in enumerate(_rotated(code, shape, vectors, rotation)):
            scaled = code.fmul(vector, factor)
            write_floats(code, scaled, own["query"], code.add(place, code.number(WIDTH * part)), is_bf16=False)
    with code.loop(0, shape.key_heads) as head:
        place = code.mul(head, code.number(shape.head_dim))
        to = code.add(code.mul(head, storage.number("capacity")), row.number("place"))
        to = code.mul(to, code.number(shape.head_dim))
        vectors = _biased(code, shape, layer, "key", own["key"], place)
        if shape.has_head_norms:
            vectors = _normed(code, shape, vectors, layer.pointer("key_norm"))
        for part, vector in enumerate(_rotated(code, shape, vectors, rotation)):
            at = code.add(to, code.number(WIDTH * part))
            write_floats(code, vector, storage.pointer("keys"), at, is_bf16=shape.is_bf16)
        for part, vector in enumerate(_biased(code, shape, layer, "value", own["value"], place)):
            at = code.add(to, code.number(WIDTH * part))
            write_floats(code, vector, storage.pointer("values"), at, is_bf16=shape.is_bf16)
    code.ret_void()
    return given["function"]


def _biased(code: Code, shape: DecoderShape, layer: RecordFields, name: str, rows: Value, place: Value) -> list[Value]:
    """Return a head's columns of a product, with its bias."""
    found = []
    for start in range(0, shape.head_dim, WIDTH):
        at = code.add(place, code.number(start))
        vector = read_floats(code, rows, at, is_bf16=False)
        if name in shape.biases:
            vector = code.fadd(vector, read_floats(code, layer.pointer(f"{name}_bias"), at, is_bf16=False))
        found.append(vector)
    return found


def _normed(code: Code, shape: DecoderShape, vectors: list[Value], weight: Value) -> list[Value]:
    total = code.fmul(vectors[0], vectors[0])
    for vector in vectors[1:]:
        total = code.fused(vector, vector, total)
    factor = code.splat(length_inverse(code, code.sum_of(total), shape.head_dim, shape.eps))
    return [
        code.fmul(code.fmul(vector, factor), read_floats(code, weight, code.number(WIDTH * part), is_bf16=False))
        for part, vector in enumerate(vectors)
    ]


def _rotated(code: Code, shape: DecoderShape, vectors: list[Value], rotation: Value) -> list[Value]:
    """Return a head whose first columns are rotated, the first half of them with the second."""
    half = shape.rotated // 2 // WIDTH
    found = list(vectors)
    for part in range(half):
        cosine, sine = (
            read_floats(code, rotation, code.number(WIDTH * (part + offset)), is_bf16=False) for offset in (0, half)
        )
        low, high = vectors[part], vectors[part + half]
        found[part] = code.fused(low, cosine, code.fneg(code.fmul(high, sine)))
        found[part + half] = code.fused(high, cosine, code.fmul(low, sine))
    return found


def add_attended(
    module: ir.Module, shape: DecoderShape, round_row: ir.Function, *, name: str = "attended"
) -> ir.Function:
    """Add `attended(pass, layer, storages, row, head, scratch)`, which rounds columns of heads that share keys."""
    arguments = {"pass": POINTER, "layer": POINTER, "storages": POINTER, "row": I64, "head": I64, "scratch": POINTER}
    given = function(module, name, arguments)
    code = Code(given["function"])
    record, layer, number, head = (
        RecordFields(code, PASS, given["pass"]),
        RecordFields(code, LAYER, given["layer"]),
        given["row"],
        given["head"],
    )
    row = RecordFields(code, ROW, record.pointer("rows")).following(number)
    storage = RecordFields(code, STORAGE, given["storages"]).following(row.number("text"))
    keys = _Keys(code, row, layer, code.mul(head, storage.number("capacity")))
    of_group = shape.group * shape.head_dim
    whole = product_row(code, record, shape, "query", number)
    queries = code.at(whole, code.mul(head, code.number(4 * of_group)))
    of_row = code.mul(code.add(code.mul(number, code.number(shape.key_heads)), head), code.number(4 * of_group))
    gates = code.at(record.pointer("gates"), of_row)
    padded = code.add(code.and_(keys.count, code.number(-WIDTH)), code.number(WIDTH))  # at least one behind the last
    scores = [code.at(given["scratch"], code.mul(padded, code.number(4 * query))) for query in range(shape.group)]
    _write_scores(code, shape, keys, storage.pointer("keys"), queries, scores)
    sinks = None
    if shape.has_sinks:
        first_head = code.mul(head, code.number(shape.group))
        sinks = code.at(layer.pointer("sinks"), code.shl(first_head, code.number(2)))
    sums = [
        _weights(code, one, keys.count, padded, sink=None if sinks is None else code.read(FLOAT, sinks, 4 * query))
        for query, one in enumerate(scores)
    ]
    for query, (weights, total) in enumerate(zip(scores, sums, strict=True)):
        inverse = code.splat(code.fdiv(ir.Constant(FLOAT, 1.0), total))
        for start in range(0, shape.head_dim, CHUNK):
            columns = range(start, min(start + CHUNK, shape.head_dim), WIDTH)
            found = [code.variable(constant(0.0)) for _ in columns]

            def add(
                index: Value, at: Value, columns: range = columns, found: list[Value] = found, weights: Value = weights
            ) -> None:
                weight = code.splat(code.read(FLOAT, weights, code.shl(index, code.number(2)), align=4))
                first = code.mul(at, code.number(shape.head_dim))
                for column, one in zip(columns, found, strict=True):
                    value = read_floats(
                        code, storage.pointer("values"), code.add(first, code.number(column)), is_bf16=shape.is_bf16
                    )
                    one.value = code.fused(weight, value, one.value)

            keys.each(add)
            for column, one in zip(columns, found, strict=True):
                at = code.number(query * shape.head_dim + column)
                attended = code.fmul(one.value, inverse)
                if shape.has_gates:
                    attended = code.fmul(attended, logistic(code, read_floats(code, gates, at, is_bf16=False)))
                write_floats(code, attended, queries, at, is_bf16=False)
    rounded_bytes = shape.row_bytes(shape.heads * shape.head_dim)
    first = code.mul(head, code.number(of_group // 32))
    to = code.at(record.pointer("rounded"), code.mul(number, code.number(rounded_bytes)))
    columns_of = code.number(shape.heads * shape.head_dim)
    code.call(round_row, [whole, to, columns_of, first, code.add(first, code.number(of_group // 32))])
    code.ret_void()
    return given["function"]


class _Keys:
    """The places that a row sees within its window, in order."""

    def __init__(self, code: Code, row: RecordFields, layer: RecordFields, of_head: Value) -> None:
        self._code, window = code, layer.number("window")
        context, num_path = row.number("context"), row.number("num_path")
        whole = code.add(context, num_path)
        is_bounded = code.and_(code.icmp_signed(">", window, code.number(0)), code.icmp_signed("<", window, whole))
        first = code.select(is_bounded, code.sub(whole, window), code.number(0))
        # A row that others do not see sees itself
        least = code.intrinsic("llvm.smin.i64", I64, layer.number("first_seen"), code.sub(whole, code.number(1)))
        first = code.intrinsic("llvm.smax.i64", I64, first, least)
        self.count = code.sub(whole, first)
        is_within = code.icmp_signed("<", first, context)
        self._start = code.select(is_within, first, context)
        self._end = context
        self._path_start = code.select(is_within, code.number(0), code.sub(first, context))
        self._path_end, self._path, self._of_head = num_path, row.pointer("path"), of_head

    def each(self, work: object) -> None:
        """Do work(number, place in the storage) for each key."""
        code, do = self._code, work
        with code.loop(self._start, self._end) as place:
            do(code.sub(place, self._start), code.add(self._of_head, place))  # type: ignore[operator]
        before = code.sub(self._end, self._start)
        with code.loop(self._path_start, self._path_end) as step:
            place = code.read(I64, self._path, code.shl(step, code.number(3)), align=8)
            number = code.add(before, code.sub(step, self._path_start))
            do(number, code.add(self._of_head, place))  # type: ignore[operator]


def _write_scores(
    code: Code, shape: DecoderShape, keys: _Keys, stored: Value, queries: Value, scores: list[Value]
) -> None:
    parts = range(0, shape.head_dim, WIDTH)

    def write(number: Value, place: Value) -> None:
        first = code.mul(place, code.number(shape.head_dim))
        key = [read_floats(code, stored, code.add(first, code.number(part)), is_bf16=shape.is_bf16) for part in parts]
        for query, of_query in enumerate(scores):
            total = constant(0.0)
            for part, vector in zip(parts, key, strict=True):
                at = code.number(query * shape.head_dim + part)
                total = code.fused(vector, read_floats(code, queries, at, is_bf16=False), total)
            score = code.sum_of(total)
            if shape.softcap:
                score = code.extract_element(capped(code, code.splat(score), shape.softcap), code.number(0))
            code.write(score, of_query, code.shl(number, code.number(2)), align=4)

    keys.each(write)


def _weights(code: Code, scores: Value, count: Value, padded: Value, *, sink: Value | None) -> Value:
    """Make scores weights in their place, and return their sum, to which a `sink` belongs."""
    with code.loop(count, padded) as place:
        code.write(ir.Constant(FLOAT, LEAST), scores, code.shl(place, code.number(2)), align=4)
    most = code.variable(constant(LEAST) if sink is None else code.splat(sink))
    with code.loop(0, padded, WIDTH) as place:
        value = read_floats(code, scores, place, is_bf16=False)
        most.value = code.select(code.fcmp_ordered(">", value, most.value), value, most.value)
    largest = code.splat(code.intrinsic("llvm.vector.reduce.fmax.v8f32", FLOAT, most.value))
    total = code.variable(constant(0.0))
    if sink is not None:
        own = code.extract_element(exp(code, code.fsub(code.splat(sink), largest)), ir.Constant(I32, 0))
        total.value = code.insert_element(constant(0.0), own, ir.Constant(I32, 0))
    with code.loop(0, padded, WIDTH) as place:
        value = read_floats(code, scores, place, is_bf16=False)
        weight = exp(code, code.fsub(value, largest))
        is_key = code.fcmp_ordered("<=", value, constant(LEAST))
        weight = code.select(is_key, constant(0.0), weight)
        write_floats(code, weight, scores, place, is_bf16=False)
        total.value = code.fadd(total.value, weight)
    return code.sum_of(total.value)
