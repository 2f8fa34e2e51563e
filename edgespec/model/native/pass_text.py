"""The text of a pass of few rows through all layers of a decoder, which all threads run together.

A layer is eight steps, more with a mixture (`mixture.py`) or with a state in the place of keys (`delta_rule.py`), whose
rows, weights' units or heads the threads share; all wait for each other between them.
What a row's numbers are does not depend on the other rows, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir

from edgespec.model.native.attention import add_attended, add_placed
from edgespec.model.native.delta_rule import DeltaRuleSteps
from edgespec.model.native.fields import RecordFields, product_row
from edgespec.model.native.functions import ACTIVATIONS, constant, length_inverse, read_floats, write_floats
from edgespec.model.native.mixture import MULTIPLY, MixtureSteps, Write
from edgespec.model.native.records import LAYER, PASS, ROW, SPAN, STATE, STORAGE
from edgespec.model.native.shape import DecoderShape, TakenFeature
from offload.native.code import FLOATS, I8, I64, POINTER, Code, Value, function
from offload.native.instructions import pause
from offload.native.products import UNIT_ROWS, share_of
from offload.native.rounded_rows import COLUMNS, add_rounding

WIDTH = FLOATS.count
THREAD_FACT = ir.FunctionType(ir.IntType(32), [])
# Where a product's rows are, and where its results go, if that isn't what it is called by
GIVEN_AND_TO = {
    "output": ("rounded", "output"), "down": ("active", "output"), "shared_down": ("shared_active", "shared_output"),
}  # fmt: skip
ACTIVE = {"gate": "active", "shared_gate": "shared_active"}
PATIENCE = 2000  # looks before a waiting thread gives way to others; none where one of these has its processor


def pass_module(shapes: Sequence[DecoderShape]) -> ir.Module:
    """Return the text of `run(pass)`, for layers of these kinds, of which the first layer has the first."""
    module = ir.Module("pass")
    mixtures = [shape.mixture for shape in shapes if shape.mixture is not None]
    kinds = {shape.rounds for shape in shapes} | {mixture.rounds for mixture in mixtures}
    rounding = {kind: (add_rounding if kind else _add_copying)(module) for kind in kinds}
    wait = _add_wait(module)
    steps = [_Stages(module, shape, rounding, kind) for kind, shape in enumerate(shapes)]
    given = function(module, "run", {"pass": POINTER})
    code = Code(given["function"])
    record = RecordFields(code, PASS, given["pass"])
    thread, threads = (
        code.zext(code.call_at(record.pointer(name), THREAD_FACT, []), I64) for name in ("thread_number", "num_threads")
    )
    waiting = [given["pass"], thread, threads]
    kept = {"storages": STORAGE.num_bytes, "states": STATE.num_bytes}  # of a text's layer
    code.call(steps[0].begun, [given["pass"], thread, threads])
    code.call(wait, waiting)
    with code.loop(0, record.number("num_layers")) as number:
        layer = RecordFields(code, LAYER, record.pointer("layers")).following(number)
        of_texts = code.mul(number, record.number("num_texts"))
        of_layer = {
            name: code.at(record.pointer(name), code.mul(of_texts, code.number(size))) for name, size in kept.items()
        }
        is_first = code.icmp_signed("==", number, code.number(0))
        with code.if_then(is_first):
            code.call(steps[0].normed, [given["pass"], layer.address, thread, threads])
            code.call(wait, waiting)
        is_last = code.icmp_signed("==", code.add(number, code.number(1)), record.number("num_layers"))
        for kind, step in enumerate(steps):
            of_kind = code.icmp_signed("==", layer.number("kind"), code.number(kind))
            with code.if_then(of_kind):
                for one, taken in step.of_layer:
                    of_text = [] if taken is None else [of_layer[taken]]
                    code.call(one, [given["pass"], layer.address, *of_text, thread, threads])
                    code.call(wait, waiting)
                following = layer.following(code.number(1)).address
                aux = code.at(record.pointer("aux"), code.shl(code.add(number, code.number(1)), code.number(3)))
                arguments = [given["pass"], layer.address, following, code.zext(is_last, I64), aux, thread, threads]
                code.call(step.added_mlp, arguments)
                code.call(wait, waiting)
    code.ret_void()
    _add_alone(module)
    return module


def _add_copying(module: ir.Module) -> ir.Function:
    """Add what stands in the place of rounding where products take float32."""
    arguments = {"row": POINTER, "rounded": POINTER, "columns": I64, "first": I64, "last": I64}
    given = function(module, "copy_row", arguments, is_inner=True)
    code = Code(given["function"])
    first, last = (code.mul(given[end], code.number(COLUMNS)) for end in ("first", "last"))
    with code.loop(first, last, WIDTH) as column:
        value = read_floats(code, given["row"], column, is_bf16=False)
        write_floats(code, value, given["rounded"], column, is_bf16=False)
    code.ret_void()
    return given["function"]


def _add_alone(module: ir.Module) -> None:
    """Add what says that there is one thread, where no library has threads."""
    for name, value in (("first_thread", 0), ("one_thread", 1)):
        made = ir.Function(module, THREAD_FACT, name)
        ir.IRBuilder(made.append_basic_block()).ret(ir.Constant(THREAD_FACT.return_type, value))


def _add_wait(module: ir.Module) -> ir.Function:
    """Add `wait(pass, thread, threads)`, which returns when all threads have come to it."""
    given = function(module, "wait", {"pass": POINTER, "thread": I64, "threads": I64})
    code = Code(given["function"])
    record, threads = RecordFields(code, PASS, given["pass"]), given["threads"]
    spin, alone, last, others, again, tired, end = (
        code.append_basic_block(name) for name in ("spin", "alone", "last", "others", "again", "tired", "end")
    )
    code.cbranch(code.icmp_signed("<=", threads, code.number(1)), end, alone)
    code.position_at_end(alone)
    arrived = record.pointer("barrier")
    turn, processors = code.at(arrived, 64), code.at(arrived, 128)
    patience = _add_patience(code, record, processors, given["thread"], threads)
    now = code.load_atomic(turn, "acquire", 8, typ=I64)
    before = code.atomic_rmw("add", arrived, code.number(1), "acq_rel")
    is_last = code.icmp_signed("==", before, code.sub(threads, code.number(1)))
    code.cbranch(is_last, last, others)
    code.position_at_end(last)
    code.atomic_rmw("xchg", arrived, code.number(0), "monotonic")
    code.atomic_rmw("xchg", turn, code.add(now, code.number(1)), "release")
    code.branch(end)
    code.position_at_end(others)
    code.branch(spin)
    code.position_at_end(spin)
    looks = code.phi(I64)
    looks.add_incoming(code.number(0), others)
    is_over = code.icmp_signed("!=", code.load_atomic(turn, "acquire", 8, typ=I64), now)
    code.cbranch(is_over, end, again)
    code.position_at_end(again)
    more = code.add(looks, code.number(1))
    pause(code)
    looks.add_incoming(more, again)
    code.cbranch(code.icmp_signed("<", more, patience), spin, tired)
    code.position_at_end(tired)
    code.call_at(record.pointer("give_way"), THREAD_FACT, [])
    looks.add_incoming(code.number(PATIENCE), tired)
    code.branch(spin)
    code.position_at_end(end)
    code.ret_void()
    return given["function"]


def _add_patience(code: Code, record: RecordFields, processors: Value, thread: Value, threads: Value) -> Value:
    """Say on which processor a thread is, and return how often it looks before it gives way."""
    own = code.zext(code.call_at(record.pointer("processor"), THREAD_FACT, []), I64)
    own = code.add(own, code.number(1))  # 0: not known yet
    place = code.at(processors, code.shl(thread, code.number(3)))
    is_new = code.icmp_signed("!=", code.load_atomic(place, "monotonic", 8, typ=I64), own)
    with code.if_then(is_new):  # else all threads keep the line of the cache
        code.atomic_rmw("xchg", place, own, "monotonic")
    patience = code.variable(code.number(PATIENCE))
    with code.loop(0, threads) as other:
        of_other = code.load_atomic(code.at(processors, code.shl(other, code.number(3))), "monotonic", 8, typ=I64)
        stands_aside = code.and_(code.icmp_signed("!=", other, thread), code.icmp_signed("==", of_other, own))
        patience.value = code.select(stands_aside, code.number(0), patience.value)
    return patience.value


def _both(one: Write, other: Write) -> Write:
    def write(code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
        for part in (one, other):
            part(code, record, given, thread, threads)

    return write


class _Stages:
    """The functions that are called in turn, by every thread for its share."""

    def __init__(self, module: ir.Module, shape: DecoderShape, rounding: dict[bool, ir.Function], kind: int) -> None:
        self._module, self._shape, self._round_row = module, shape, rounding[shape.rounds]
        self._suffix = f"_{kind}"
        mixture = shape.mixture
        self._mixture = None if mixture is None else MixtureSteps(shape, mixture, rounding[mixture.rounds])
        self._normed_row = self._add_normed_row()
        self.begun = self._shared("begun", self._begin, arguments=("pass",))
        self.normed = self._shared("normed", self._norm_first)
        self.added_mlp = self._shared(
            "added_mlp", self._add_mlp, arguments=("pass", "layer", "following", "is_last", "aux")
        )
        # What a layer does in turn, and what it takes of texts
        self.of_layer: list[tuple[ir.Function, str | None]] = [
            (self._shared("projected", self._project), None),
            *self._mixer_steps(),
            (self._shared("put_out", self._product("output")), None),
            (self._shared("added_attention", self._add_attention), None),
            *self._mlp_steps(),
        ]

    def _mixer_steps(self) -> Iterator[tuple[ir.Function, str | None]]:
        """Yield the steps of attention, or of what stands in its place."""
        module, shape = self._module, self._shape
        if shape.delta is None:
            placed = add_placed(module, shape, name=f"placed{self._suffix}")
            attended = add_attended(module, shape, self._round_row, name=f"attended{self._suffix}")
            steps, taken = (
                {"placed_all": self._rows_each(placed), "attended_all": self._heads_each(attended)},
                "storages",
            )
        else:
            steps, taken = DeltaRuleSteps(shape, shape.delta, self._normed_row, self._round_row).steps, "states"
        for name, write in steps.items():
            yield self._shared(name, write, arguments=("pass", "layer", taken)), taken

    def _mlp_steps(self) -> Iterator[tuple[ir.Function, str | None]]:
        of_mlp: dict[str, Write] = {"activated": self._activate("gate"), "put_down": self._product("down")}
        if self._mixture is not None:
            of_mlp = self._mixture.steps
            if self._mixture.has_shared:  # what all rows go through waits for no router
                of_mlp["routed"] = _both(of_mlp["routed"], self._activate("shared_gate"))
                of_mlp["gathered"] = _both(of_mlp["gathered"], self._product("shared_down"))
        for name, write in of_mlp.items():
            yield self._shared(name, write), None

    def _shared(
        self,
        name: str,
        write: Write,
        arguments: tuple[str, ...] = ("pass", "layer"),
    ) -> ir.Function:
        kinds = {one: I64 if one == "is_last" else POINTER for one in arguments}
        given = function(self._module, f"{name}{self._suffix}", {**kinds, "thread": I64, "threads": I64})
        code = Code(given["function"])
        write(code, RecordFields(code, PASS, given["pass"]), given, given["thread"], given["threads"])
        code.ret_void()
        return given["function"]

    def _scratch(self, code: Code, record: RecordFields, thread: Value) -> Value:
        return code.at(record.pointer("scratch"), code.mul(thread, record.number("scratch_bytes")))

    def _add_normed_row(self) -> ir.Function:
        """Add `normed_row(row, weight, to)`: to may be the row itself."""
        hidden = self._shape.hidden
        given = function(self._module, f"normed_row{self._suffix}", {"row": POINTER, "weight": POINTER, "to": POINTER})
        code = Code(given["function"])
        total = code.variable(constant(0.0))
        with code.loop(0, hidden, WIDTH) as column:
            value = read_floats(code, given["row"], column, is_bf16=False)
            total.value = code.fused(value, value, total.value)
        factor = code.splat(length_inverse(code, code.sum_of(total.value), hidden, self._shape.eps))
        with code.loop(0, hidden, WIDTH) as column:
            value = code.fmul(read_floats(code, given["row"], column, is_bf16=False), factor)
            value = code.fmul(value, read_floats(code, given["weight"], column, is_bf16=False))
            write_floats(code, value, given["to"], column, is_bf16=False)
        code.ret_void()
        return given["function"]

    def _begin(self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
        """Read the rows as floats; the first thread finds what each row sees."""
        shape = self._shape
        start = shape.columns - shape.hidden  # of a feature, behind the embedding
        with code.loop(*share_of(code, record.number("num_rows"), thread, threads)) as row:
            of_row, place = (code.mul(row, code.number(size)) for size in (shape.columns, shape.hidden))
            with code.loop(0, shape.hidden, WIDTH) as column:
                at = code.add(of_row, code.add(column, code.number(start)))
                value = read_floats(code, record.pointer("given"), at, is_bf16=shape.is_bf16)
                write_floats(code, value, record.pointer("residual"), code.add(place, column), is_bf16=False)
            self._keep_aux(code, record, record.pointer("aux"), row)
        is_first = code.icmp_signed("==", thread, code.number(0))
        with code.if_then(is_first), code.loop(0, record.number("num_texts")) as text:
            span = RecordFields(code, SPAN, record.pointer("spans")).following(text)
            with code.loop(0, span.number("count")) as number:
                _find_path(code, record, span, text, number)

    def _norm_first(
        self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value
    ) -> None:
        layer, scratch = RecordFields(code, LAYER, given["layer"]), self._scratch(code, record, thread)
        with code.loop(*share_of(code, record.number("num_rows"), thread, threads)) as row:
            if self._shape.feature is None:
                self._norm_and_round(code, record, row, layer.pointer("before_attention"), scratch)
            else:
                self._norm_both(code, record, row, layer, scratch, self._shape.feature)

    def _norm_both(
        self, code: Code, record: RecordFields, row: Value, layer: RecordFields, scratch: Value, feature: TakenFeature
    ) -> None:
        """Norm an embedding and the feature behind it, and round both side by side."""
        shape = self._shape
        halves = [scratch, code.at(scratch, 4 * shape.hidden)]
        of_embedding, of_feature = halves[::-1] if feature.is_first else halves
        given = code.mul(row, code.number(shape.columns))
        residual = code.at(record.pointer("residual"), code.mul(row, code.number(4 * shape.hidden)))
        with code.loop(0, shape.hidden, WIDTH) as column:
            value = read_floats(code, record.pointer("given"), code.add(given, column), is_bf16=shape.is_bf16)
            write_floats(code, value, of_embedding, column, is_bf16=False)
        code.call(self._normed_row, [of_embedding, layer.pointer("before_attention"), of_embedding])
        code.call(self._normed_row, [residual, layer.pointer("of_feature"), of_feature])
        if feature.is_normed:
            with code.loop(0, shape.hidden, WIDTH) as column:
                write_floats(
                    code, read_floats(code, of_feature, column, is_bf16=False), residual, column, is_bf16=False
                )
        self._round(code, record, row, scratch, columns=shape.columns)

    def _keep_aux(self, code: Code, record: RecordFields, address: Value, row: Value) -> None:
        """Write a row of the stream to where those of its layer are kept, if anywhere."""
        hidden = self._shape.hidden
        kept = code.read(I64, address, align=8)
        with code.if_then(code.icmp_signed("!=", kept, code.number(0))):
            place = code.mul(row, code.number(hidden))
            with code.loop(0, hidden, WIDTH) as column:
                at = code.add(place, column)
                value = read_floats(code, record.pointer("residual"), at, is_bf16=False)
                write_floats(code, value, code.inttoptr(kept, POINTER), at, is_bf16=self._shape.is_bf16)

    def _norm_and_round(self, code: Code, record: RecordFields, row: Value, weight: Value, scratch: Value) -> None:
        hidden = self._shape.hidden
        residual = code.at(record.pointer("residual"), code.mul(row, code.number(4 * hidden)))
        code.call(self._normed_row, [residual, weight, scratch])
        self._round(code, record, row, scratch)

    def _round(self, code: Code, record: RecordFields, row: Value, floats: Value, columns: int | None = None) -> None:
        """Make a row of floats what products take: of the stream, or of so many columns."""
        count = self._shape.hidden if columns is None else columns
        to = code.at(record.pointer("rounded"), code.mul(row, code.number(self._shape.row_bytes(count))))
        code.call(self._round_row, [floats, to, code.number(count), code.number(0), code.number(count // COLUMNS)])

    def _multiply(
        self, code: Code, record: RecordFields, layer: RecordFields, name: str, first: Value, last: Value
    ) -> None:
        """Multiply the rounded rows by some units of a product's weight."""
        whole, before = self._shape.lies_in(name)
        given, to = GIVEN_AND_TO.get(name, ("rounded", whole))
        units = [code.add(end, code.number(before // UNIT_ROWS)) for end in (first, last)]
        arguments = [record.pointer(given), layer.pointer(f"{whole}_weight"), record.pointer(to),
                     record.number("num_rows"), *units]  # fmt: skip
        code.call_at(layer.pointer(f"{whole}_function"), MULTIPLY, arguments)

    def _project(
        self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value
    ) -> None:
        """Multiply by the weights before attention, as of queries, keys and values: units stand one after the other."""
        shape, layer = self._shape, RecordFields(code, LAYER, given["layer"])
        units = {name: shape.width(name) // UNIT_ROWS for name in shape.projections}
        first, last = share_of(code, code.number(sum(units.values())), thread, threads)
        before = 0
        for name, count in units.items():
            ends = [
                code.intrinsic(
                    "llvm.smin.i64", I64,
                    code.intrinsic("llvm.smax.i64", I64, code.sub(end, code.number(before)), code.number(0)),
                    code.number(count),
                )
                for end in (first, last)
            ]  # fmt: skip
            with code.if_then(code.icmp_signed("<", *ends)):
                self._multiply(code, record, layer, name, *ends)
            before += count

    def _product(self, name: str) -> Write:
        def write(code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
            count = code.number(self._shape.hidden // UNIT_ROWS)
            share = share_of(code, count, thread, threads)
            self._multiply(code, record, RecordFields(code, LAYER, given["layer"]), name, *share)

        return write

    def _rows_each(self, one: ir.Function) -> Write:
        def write(code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
            with code.loop(*share_of(code, record.number("num_rows"), thread, threads)) as row:
                code.call(one, [given["pass"], given["layer"], given["storages"], row])

        return write

    def _heads_each(self, one: ir.Function) -> Write:
        def write(code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
            heads = code.number(self._shape.key_heads)
            scratch = self._scratch(code, record, thread)
            with code.loop(*share_of(code, code.mul(record.number("num_rows"), heads), thread, threads)) as item:
                row, head = code.udiv(item, heads), code.urem(item, heads)
                code.call(one, [given["pass"], given["layer"], given["storages"], row, head, scratch])

        return write

    def _add_output(
        self, code: Code, record: RecordFields, layer: RecordFields, name: str, norm: str, row: Value
    ) -> None:
        """Add a product's row to the stream."""
        hidden = self._shape.hidden
        place = code.mul(row, code.number(4 * hidden))
        output, residual = (code.at(record.pointer(one), place) for one in ("output", "residual"))
        if name in self._shape.biases:
            with code.loop(0, hidden, WIDTH) as column:
                bias = read_floats(code, layer.pointer(f"{name}_bias"), column, is_bf16=False)
                value = code.fadd(read_floats(code, output, column, is_bf16=False), bias)
                write_floats(code, value, output, column, is_bf16=False)
        if self._shape.has_norms_after:
            code.call(self._normed_row, [output, layer.pointer(norm), output])
        with code.loop(0, hidden, WIDTH) as column:
            value = code.fadd(*(read_floats(code, one, column, is_bf16=False) for one in (residual, output)))
            write_floats(code, value, residual, column, is_bf16=False)

    def _add_attention(
        self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value
    ) -> None:
        layer, scratch = RecordFields(code, LAYER, given["layer"]), self._scratch(code, record, thread)
        with code.loop(*share_of(code, record.number("num_rows"), thread, threads)) as row:
            self._add_output(code, record, layer, "output", "after_attention", row)
            if self._mixture is None:
                self._norm_and_round(code, record, row, layer.pointer("before_mlp"), scratch)
            else:  # its router reads the row, and each expert's rows are rounded where they stand together
                place = code.mul(row, code.number(4 * self._shape.hidden))
                residual, to = (code.at(record.pointer(name), place) for name in ("residual", "normed"))
                code.call(self._normed_row, [residual, layer.pointer("before_mlp"), to])
                if self._mixture.has_shared:
                    self._round(code, record, row, to)

    def _activate(self, gate: str) -> Write:
        """Return what multiplies by gate and up, unit by unit, and rounds what the activation makes of both."""
        shape, up = self._shape, gate.replace("gate", "up")
        wide = shape.part_width(gate)

        def write(code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value) -> None:
            layer = RecordFields(code, LAYER, given["layer"])
            with code.loop(*share_of(code, code.number(wide // UNIT_ROWS), thread, threads)) as unit:
                following = code.add(unit, code.number(1))
                for name in (gate, up):
                    self._multiply(code, record, layer, name, unit, following)
                first = code.mul(unit, code.number(UNIT_ROWS))
                with code.loop(0, record.number("num_rows")) as row:
                    gates, ups = (product_row(code, record, shape, name, row) for name in (gate, up))
                    for start in range(0, UNIT_ROWS, WIDTH):
                        column = code.add(first, code.number(start))
                        both = [read_floats(code, one, column, is_bf16=False) for one in (gates, ups)]
                        for place, name in enumerate((gate, up)):
                            if name in shape.biases:
                                bias = read_floats(code, layer.pointer(f"{name}_bias"), column, is_bf16=False)
                                both[place] = code.fadd(both[place], bias)
                        active = code.fmul(ACTIVATIONS[shape.activation](code, both[0]), both[1])
                        write_floats(code, active, gates, column, is_bf16=False)
                    to = code.mul(row, code.number(shape.row_bytes(wide)))
                    to = code.at(record.pointer(ACTIVE[gate]), to)
                    code.call(self._round_row, [gates, to, code.number(wide), unit, following])

        return write

    def _add_mlp(
        self, code: Code, record: RecordFields, given: dict[str, Value], thread: Value, threads: Value
    ) -> None:
        """Add the MLP's rows, and make what the next layer, or the reader of the last one, is given."""
        shape, scratch = self._shape, self._scratch(code, record, thread)
        layer, following = (RecordFields(code, LAYER, given[name]) for name in ("layer", "following"))
        is_last = code.trunc(given["is_last"], ir.IntType(1))
        with code.loop(*share_of(code, record.number("num_rows"), thread, threads)) as row:
            if self._mixture is not None:
                self._mixture.add_up(code, record, layer, row)
            self._add_output(code, record, layer, "down", "after_mlp", row)
            self._keep_aux(code, record, given["aux"], row)
            with code.if_else(is_last) as (then, otherwise):
                with then:
                    place = code.mul(row, code.number(shape.hidden))
                    residual = code.at(record.pointer("residual"), code.shl(place, code.number(2)))
                    if shape.has_last_norm:
                        code.call(self._normed_row, [residual, record.pointer("last_norm"), scratch])
                    with code.loop(0, shape.hidden, WIDTH) as column:
                        last = scratch if shape.has_last_norm else residual
                        value = read_floats(code, last, column, is_bf16=False)
                        at = code.add(place, column)
                        write_floats(code, value, record.pointer("found"), at, is_bf16=shape.is_bf16)
                with otherwise:
                    self._norm_and_round(code, record, row, following.pointer("before_attention"), scratch)


def _find_path(code: Code, record: RecordFields, span: RecordFields, text: Value, number: Value) -> None:
    """Write what a row sees: the places before the tail, and those of the tail that are marked for it."""
    row = code.add(span.number("first"), number)
    found = RecordFields(code, ROW, record.pointer("rows")).following(row)
    path = code.at(record.pointer("paths"), code.mul(row, code.mul(record.number("max_path"), code.number(8))))
    place = code.add(span.number("length"), number)
    position = code.read(I64, span.pointer("positions"), code.shl(number, code.number(3)), align=8)
    for name, value in (("text", text), ("place", place), ("position", position)):
        found.write(name, value)
    code.write(path, found.address, 8 * ROW.names.index("path"), align=8)
    is_in_order = code.icmp_signed("==", span.number("visible"), code.number(0))
    with code.if_else(is_in_order) as (then, otherwise):
        with then:
            found.write("context", code.add(place, code.number(1)))
            found.write("num_path", code.number(0))
        with otherwise:
            tail = span.number("tail")
            context = code.sub(code.add(span.number("length"), span.number("count")), tail)
            count = code.variable(code.number(0))
            marks = code.at(span.pointer("visible"), code.mul(number, tail))
            with code.loop(0, tail) as key:
                is_seen = code.icmp_signed("!=", code.read(I8, marks, key), ir.Constant(I8, 0))
                with code.if_then(is_seen):
                    code.write(code.add(context, key), path, code.shl(count.value, code.number(3)), align=8)
                    count.value = code.add(count.value, code.number(1))
            found.write("context", context)
            found.write("num_path", count.value)
