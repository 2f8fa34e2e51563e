"""nf4 in the order of bitsandbytes' CPU kernel: packed, unpacked, and multiplied as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload.checkpoint import Pieces
from offload.errors import CheckpointError
from offload.formats.bitsandbytes_4bit import Bitsandbytes4Bit, bitsandbytes_functional
from offload.layouts import nf4_cpu, table_kernels
from offload.layouts.known import kernel_of, storage_of
from offload.layouts.nf4_cpu import (
    FEW_ROWS,
    KINDS,
    NF4_CPU_LAYOUT,
    NUM_ROWS,
    ORDER,
    Nf4Cpu,
    in_order,
    in_rows,
    kernel_is_there,
)
from tests.offload.formats.bitsandbytes_checkpoints import block_scales, looked_up
from tests.offload.formats.test_published import entry
from tests.offload.layouts.products import check_company_changes_no_bits, check_wrong_kernels_are_refused

LIBRARY_KINDS = KINDS[:2]
CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(not kernel_is_there(), reason="bitsandbytes has no such kernel for this processor")


def random_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, dtype=torch.uint8)


def random_scales(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) * 0.02 + 0.01).bfloat16().float()


def meant(numbers: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    """The weight, from the format's definition."""
    few = [sign * size for sign in (1, -1) for size in (0, 1, 2, 3, 4, 6, 8, 12)]  # twice what E2M1 means
    of_kind = torch.tensor(few) if kind == "e2m1" else bitsandbytes_functional().get_4bit_type(kind, device="cpu")
    values = of_kind[numbers.int()]
    return values.double() * scales.double().repeat_interleave(numbers.shape[-1] // scales.shape[-1], dim=-1)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_numbers_stand_for_what_they_stand_for_in_bitsandbytes(kind: str) -> None:
    theirs = bitsandbytes_functional().get_4bit_type(kind, device="cpu")
    assert torch.equal(table_kernels.values(kind, torch.device("cpu")), theirs)


def own_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Two columns a byte, the first in the high half: bitsandbytes' order where it has not repacked a weight."""
    return numbers[..., ::2] << 4 | numbers[..., 1::2]


def test_a_byte_has_the_numbers_of_two_rows_and_bytes_go_through_rows_two_columns_at_a_time() -> None:
    numbers = random_numbers(2 * NUM_ROWS, 8)
    in_blocks = in_order(numbers).view(2, 4, NUM_ROWS)
    for block, pair, place in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(NUM_ROWS)).tolist():
        row, column = block * NUM_ROWS + place // 2, pair * 2 + place % 2
        packed = in_blocks[block, pair, place]
        assert packed & 15 == numbers[row, column]
        assert packed >> 4 == numbers[row + NUM_ROWS // 2, column]


@pytest.mark.parametrize("shape", [(NUM_ROWS, 64), (3 * NUM_ROWS, 192)], ids=str)
def test_the_order_is_bitsandbytes_own_and_leads_back_to_the_one_of_its_checkpoints(shape: tuple[int, int]) -> None:
    numbers, functional = random_numbers(*shape), bitsandbytes_functional()
    assert torch.equal(in_rows(in_order(numbers)), own_bytes(numbers))
    if not hasattr(functional, "_convert_weight_packed_for_cpu"):
        pytest.skip("bitsandbytes' own function has another name")
    packed, state = functional.quantize_4bit(torch.randn(shape), blocksize=64, quant_type="nf4")
    found = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), dim=-1).view(shape)
    expected, _ = functional._convert_weight_packed_for_cpu(packed, state)
    assert torch.equal(in_order(found), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("front", "block_size"), [((), 32), ((), 64), ((), 256), ((3,), 64)])
def test_unpacked_weights_are_those_that_the_format_defines(
    front: tuple[int, ...], block_size: int, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, scales = random_numbers(*front, NUM_ROWS * 3, 512), random_scales(*front, NUM_ROWS * 3, 512 // block_size)
    packing = Nf4Cpu(kind=kind, block_size=block_size)
    parts = packing.parts_of(numbers, scales)
    expected = meant(numbers, scales, kind).float().to(dtype)
    assert torch.equal(packing.unpack(parts, torch.empty(numbers.shape, dtype=dtype)), expected)
    monkeypatch.setattr(nf4_cpu, "WEIGHTS_AT_ONCE", NUM_ROWS * 512)
    assert torch.equal(packing.unpack(parts, torch.empty(numbers.shape, dtype=dtype)), expected)


def test_rounding_loses_less_than_bitsandbytes_own() -> None:
    weight = torch.randn(NUM_ROWS * 4, 512) * 0.02

    def loss(known: Bitsandbytes4Bit | Nf4Cpu) -> torch.Tensor:
        packing, parts = known.pack(weight)
        return (packing.unpack(parts, torch.empty_like(weight)) - weight).norm() / weight.norm()

    assert loss(Nf4Cpu()) < 0.96 * loss(Bitsandbytes4Bit(name="nf4", nested=False))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_spoils_its_block_alone(broken: float) -> None:
    weight = torch.randn(NUM_ROWS, 128)
    _, sound = Nf4Cpu().pack(weight)
    weight[3, 70] = broken
    packing, parts = Nf4Cpu().pack(weight)
    others = torch.ones(NUM_ROWS, 128, dtype=torch.bool)
    others[3, 64:] = False
    found, expected = (packing.unpack(stored, torch.empty_like(weight)) for stored in (parts, sound))
    assert torch.equal(found[others], expected[others])


def test_a_block_of_zeros_stays_zero() -> None:
    weight = torch.zeros(NUM_ROWS, 128)
    packing, parts = Nf4Cpu().pack(weight)
    assert torch.equal(packing.unpack(parts, torch.empty_like(weight)), weight)


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_weights_of_bitsandbytes_keep_their_numbers(kind: str, nested: bool, block_size: int) -> None:
    """Scales are rounded to bf16, once."""
    shape, functional = (NUM_ROWS * 2, 256), bitsandbytes_functional()
    packed, state = functional.quantize_4bit(
        torch.randn(shape), blocksize=block_size, compress_statistics=nested, quant_type=kind
    )
    parts = {"packed": packed, "absmax": state.absmax} | ({"nested_absmax": state.state2.absmax} if nested else {})
    offset = float(state.offset) if nested else 0.0
    published = Bitsandbytes4Bit(name=kind, nested=nested, block_size=block_size, offset=offset)
    kept = NF4_CPU_LAYOUT.repacked(published, shape, None)
    repacked = kept.repack("a.weight", parts)
    assert {name: (tuple(part.shape), part.dtype) for name, part in repacked.items()} == kept.storage.part_shapes(shape)
    scales = block_scales(state).bfloat16().float()
    assert torch.equal(kept.storage.unpack(repacked, torch.empty(shape)), looked_up(packed, scales, shape, kind))


def test_blocks_that_straddle_rows_are_not_kept() -> None:
    published = Bitsandbytes4Bit(name="nf4", nested=True, block_size=128)
    assert NF4_CPU_LAYOUT.repacked(published, (NUM_ROWS, 128), None) is not None
    assert NF4_CPU_LAYOUT.repacked(published, (NUM_ROWS, 192), None) is None
    assert NF4_CPU_LAYOUT.repacked(published, (NUM_ROWS // 2, 128), None) is None
    assert NF4_CPU_LAYOUT.repacked(Nf4Cpu(), (NUM_ROWS, 128), None) is None


def stored_as(packing: Nf4Cpu, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, Pieces]:
    parts = packing.parts_of(numbers, scales)
    return {name: (entry(name, parts[part]),) for part, name in packing.stored_names("a.weight").items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [32, 64, 512])
def test_kind_and_block_size_are_found_by_the_parts(block_size: int, kind: str) -> None:
    packing = Nf4Cpu(kind=kind, block_size=block_size)
    stored = stored_as(packing, random_numbers(NUM_ROWS, 512), random_scales(NUM_ROWS, 512 // block_size))
    assert storage_of("a.weight", (NUM_ROWS, 512), stored, {}) == packing


def test_parts_that_do_not_belong_to_the_weight_are_noticed() -> None:
    stored = stored_as(Nf4Cpu(), random_numbers(NUM_ROWS, 512), random_scales(NUM_ROWS, 8))
    for shape in ((NUM_ROWS, 528), (NUM_ROWS, 384), (NUM_ROWS + 1, 512)):
        with pytest.raises(CheckpointError, match=r"does not belong to its scales"):
            storage_of("a.weight", shape, stored, {})
    del stored["a.weight.nf4_scales"]
    with pytest.raises(CheckpointError, match=r"does not belong to its scales"):
        storage_of("a.weight", (NUM_ROWS, 512), stored, {})
    assert storage_of("a.weight", (NUM_ROWS, 512), {f"a.weight.nf4_other{ORDER}": ()}, {}) is None


@pytest.fixture(params=["ours", "library's"])
def of_either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel multiplies where it serves, else bitsandbytes'."""
    if request.param != "ours":
        monkeypatch.setattr(table_kernels, "is_available", lambda: False)
    if not (kernel_is_there() if request.param != "ours" else table_kernels.serves("nf4", 64, torch.bfloat16)):
        pytest.skip("there is no such kernel for this processor")


@pytest.fixture
def of_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_kernels, "is_available", lambda: False)


@pytest.mark.usefixtures("of_either")
@pytest.mark.parametrize("kind", LIBRARY_KINDS)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 512, 1024])
def test_products_are_as_near_as_those_of_bf16_weights(block_size: int, kind: str) -> None:
    numbers, scales = random_numbers(NUM_ROWS * 2, 1024), random_scales(NUM_ROWS * 2, 1024 // block_size)
    packing = Nf4Cpu(kind=kind, block_size=block_size)
    parts = packing.parts_of(numbers, scales)
    kernel = kernel_of(packing, (NUM_ROWS * 2, 1024), torch.bfloat16, CPU)
    rows, bias, weight = (
        torch.randn(9, 1024).bfloat16(),
        torch.randn(NUM_ROWS * 2).bfloat16(),
        meant(numbers, scales, kind),
    )
    exact, product = rows.double() @ weight.T, kernel.multiply(parts, rows, None)
    error = (product.double() - exact).norm() / exact.norm()
    of_bf16 = ((rows @ weight.bfloat16().T).double() - exact).norm() / exact.norm()
    assert error <= of_bf16 * 1.2
    assert torch.equal(kernel.multiply(parts, rows.view(3, 3, -1), bias), (product + bias).view(3, 3, -1))
    assert torch.equal(kernel.multiply(parts, rows.T.contiguous().T, None), product)
    unpacked = packing.multiply_unpacked(parts, rows)
    assert (unpacked.double() - exact).norm() / exact.norm() <= of_bf16 * 1.2
    assert kernel.multiply(parts, rows[:0], bias).shape == (0, NUM_ROWS * 2)


@needs_kernel
@pytest.mark.parametrize("kind", LIBRARY_KINDS)
def test_products_by_the_function_in_c_have_the_bits_of_those_by_bitsandbytes_operator(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another version the arguments are not known, and the operator multiplies."""
    packing = Nf4Cpu(kind=kind, block_size=32)
    parts = packing.parts_of(random_numbers(NUM_ROWS * 3, 256), random_scales(NUM_ROWS * 3, 8))
    rows = torch.randn(7, 512).bfloat16()[:, ::2]
    products = []
    for known in ("", "another"):
        monkeypatch.setattr(nf4_cpu, "KNOWN_VERSION", known)
        nf4_cpu._c_function.cache_clear()
        assert (nf4_cpu._c_function(kind) is None) == (known == "another")
        products.append(packing.multiply_by_library(parts, rows))
    nf4_cpu._c_function.cache_clear()
    assert torch.equal(*products)


@pytest.fixture
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("of_either", "own_threads")
def test_a_row_has_the_same_bits_alone_and_among_others_and_with_more_threads() -> None:
    packing, parts = Nf4Cpu().pack(torch.randn(NUM_ROWS * 4, 512))
    kernel = kernel_of(packing, (NUM_ROWS * 4, 512), torch.bfloat16, CPU)
    rows = torch.randn(FEW_ROWS, 512).bfloat16()
    torch.set_num_threads(1)
    whole = kernel.multiply(parts, rows, None)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (*range(1, 81), FEW_ROWS):
            assert torch.equal(kernel.multiply(parts, rows[-count:], None), whole[-count:])


@needs_kernel
@pytest.mark.usefixtures("of_library")
def test_rows_of_a_large_tree_have_the_bits_of_few() -> None:
    packing, parts = Nf4Cpu().pack(torch.randn(NUM_ROWS * 4, 512))
    kernel = kernel_of(packing, (NUM_ROWS * 4, 512), torch.bfloat16, CPU)
    rows = torch.randn(FEW_ROWS + 9, 512).bfloat16()
    check_company_changes_no_bits(lambda some: kernel.multiply(parts, some, None), rows)


@needs_kernel
@pytest.mark.usefixtures("of_library")
def test_many_rows_are_multiplied_with_some_unpacked_rows_of_the_weight_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nf4_cpu, "MANY_WEIGHTS", 2 * NUM_ROWS * 128)
    weight, rows, bias = torch.randn(NUM_ROWS * 5, 128), torch.randn(FEW_ROWS + 1, 128).bfloat16(), torch.ones(160)
    packing, parts = Nf4Cpu().pack(weight)
    kernel = kernel_of(packing, (NUM_ROWS * 5, 128), torch.bfloat16, CPU)
    assert kernel is not None
    exact = rows.double() @ packing.unpack(parts, weight).double().T
    for count in (FEW_ROWS, FEW_ROWS + 1):
        product = kernel.multiply(parts, rows[:count], bias.bfloat16()).double() - 1
        assert (product - exact[:count]).norm() / exact.norm() < 0.004
        way = packing.multiply_packed if count == FEW_ROWS else packing.multiply_unpacked
        assert torch.equal(kernel.multiply(parts, rows[:count], None), way(parts, rows[:count]))


@pytest.fixture
def looked_for_again() -> Iterator[None]:
    kernel_is_there.cache_clear()
    yield
    kernel_is_there.cache_clear()


@pytest.mark.usefixtures("looked_for_again")
@pytest.mark.parametrize(
    "change", [lambda n: n.roll(1, 0), lambda n: n.roll(1, 1), lambda n: n.flip(0), lambda n: 15 - n]
)
def test_a_kernel_with_another_order_is_not_taken(change: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(change)
    monkeypatch.setattr(nf4_cpu, "in_order", lambda numbers: in_order(change(numbers)))
    assert not kernel_is_there()


@pytest.mark.usefixtures("looked_for_again")
@pytest.mark.parametrize("error", [AttributeError, ImportError, RuntimeError, TypeError])
def test_a_bitsandbytes_without_the_kernel_is_no_error(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(Nf4Cpu, "multiply_by_library", fails)
    monkeypatch.setattr(table_kernels, "is_available", lambda: False)
    assert not kernel_is_there()
    assert kernel_of(Nf4Cpu(), (NUM_ROWS, 64), torch.bfloat16, CPU) is None


def test_matrices_of_experts_are_packed_one_by_one() -> None:
    weight = torch.randn(3, NUM_ROWS, 128)
    packing, parts = Nf4Cpu().pack(weight)
    assert packing.of_share((3, NUM_ROWS, 128), 3) == packing
    assert packing.of_share((NUM_ROWS, 128), 2) is None
    for index in range(3):
        _, alone = Nf4Cpu().pack(weight[index])
        assert all(torch.equal(parts[name][index], part) for name, part in alone.items())


@pytest.mark.skipif(not table_kernels.is_available(), reason="no kernels can be compiled here")
@pytest.mark.parametrize("kind", KINDS)
def test_our_kernel_takes_rows_of_float32_and_any_number_of_them_for_passes_that_are_one_call(kind: str) -> None:
    numbers, scales = random_numbers(NUM_ROWS * 3, 256), random_scales(NUM_ROWS * 3, 4)
    packing, shape = Nf4Cpu(kind=kind), (NUM_ROWS * 3, 256)
    parts, rows = packing.parts_of(numbers, scales), torch.randn(FEW_ROWS + 9, 256)
    kernel = kernel_of(packing, shape, torch.float32, CPU)
    found, exact = kernel.multiply(parts, rows, None), rows.double() @ meant(numbers, scales, kind).T
    assert float((found - exact).norm() / exact.norm()) < 1.5e-4
    assert kernel.multiply(parts, rows[:0], None).shape == (0, NUM_ROWS * 3)
    assert torch.equal(kernel.multiply(parts, rows[7:8], None), found[7:8])
    weight = kernel.native(parts)
    assert (weight.rows, weight.columns, weight.takes_rounded) == (*shape, True)
    assert kernel_of(packing, shape, torch.float16, CPU) is None


@pytest.mark.skipif(not table_kernels.is_available(), reason="no kernels can be compiled here")
def test_our_kernel_is_not_used_where_its_products_are_wrong() -> None:
    right = table_kernels.native_table

    def another_table(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(table_kernels, "native_table", lambda _kind, *given: right("fp4", *given))

    check_wrong_kernels_are_refused(
        table_kernels, lambda: table_kernels.serves("nf4", 64, torch.bfloat16), another_table
    )


@pytest.mark.skipif(not table_kernels.is_available(), reason="no kernels can be compiled here")
def test_our_kernel_takes_blocks_of_powers_of_two() -> None:
    found = [size for size in (16, 48, 64, 96, 4096) if table_kernels.serves("nf4", size, torch.float32)]
    assert found == [16, 64, 4096]
