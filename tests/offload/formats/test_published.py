"""The published formats: what is unpacked is bit for bit what the format's definition says, in slices and in bf16."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from edgespec.placement.traffic import ACT_ORDER_BYTES, TRAFFIC_BYTES
from offload.checkpoint import Pieces, TensorEntry
from offload.errors import CheckpointError
from offload.formats import even_steps, four_bits_kernel, fp4, published
from offload.formats.storage import PackedStorage, Steps
from offload.layouts.known import storage_of
from tests.offload.formats import definitions
from tests.offload.formats.definitions import PUBLISHED, Parts, Published
from tests.support.launches import Traffic
from tests.support.pretend_cuda import pretend_cuda

SHAPES = [(64, 96), (96, 32), (32, 64)]


def stored(parts: Parts, module: str = "a") -> dict[str, Pieces]:
    """The tensors of a matrix as a checkpoint lists them, without files."""
    return {f"{module}.{leaf}": (entry(f"{module}.{leaf}", part),) for leaf, part in parts.items()}


def entry(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry.planned(name, tuple(tensor.shape), tensor.dtype)


def found_packing(form: Published, parts: Parts, shape: tuple[int, ...]) -> tuple[PackedStorage, dict[str, Tensor]]:
    """How a matrix is packed, and its parts by the packing's own names for them."""
    packing = storage_of("a.weight", shape, stored(parts), form.stated)
    named = packing.stored_names("a.weight")
    return packing, {part: parts[name.removeprefix("a.")] for part, name in named.items()}


def has_bits_of(found: Tensor, expected: Tensor) -> bool:
    """Whether they are equal, the signs of zeros, too."""
    return torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", PUBLISHED)
def test_numbers_are_those_of_the_definition(
    form: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = PUBLISHED[form].parts(*shape)
    expected = PUBLISHED[form].meaning(parts, *shape)
    packing, named = found_packing(PUBLISHED[form], parts, shape)
    assert packing.name == PUBLISHED[form].name
    assert {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in named.items()} == packing.part_shapes(shape)
    assert torch.equal(packing.unpack(named, torch.full(shape, torch.nan)), expected)
    rounded = packing.unpack(named, torch.empty(shape, dtype=torch.bfloat16))
    assert torch.equal(rounded, expected.bfloat16())  # once, from the exact product
    monkeypatch.setattr(published, "WEIGHTS_AT_ONCE_ON_CPU", 17 * shape[1])
    assert torch.equal(packing.unpack(named, torch.full(shape, torch.nan)), expected)


@pytest.mark.parametrize(
    ("form", "limit_bytes"),
    [
        ("fp8-blocks", 9), ("fp8-matrix", 8), ("compressed-fp8-rows", 8), ("compressed-mxfp8", 8),
        ("compressed-int8", 4),
        ("compressed-nvfp4", 12), ("modelopt-nvfp4", 12), ("compressed-mxfp4", 11),
        ("compressed-int4", 8), ("compressed-int4-zeros", 8), ("compressed-packed-int8", 8),
        ("gptq", 9), ("gptq-v2", 9), ("gptq-8-bits", 10), ("gptq-act-order", 15), ("awq", 9),
    ],
)  # fmt: skip
def test_a_card_unpacks_a_weight_by_few_bytes_of_traffic(
    form: str, limit_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into bf16, with the bits that a processor unpacks; without the card's kernel."""
    monkeypatch.setattr(definitions, "GROUP", 32)
    shape = (256, 512)
    packing, named = found_packing(PUBLISHED[form], PUBLISHED[form].parts(*shape), shape)
    expected = packing.unpack(named, torch.empty(shape, dtype=torch.bfloat16))
    with pretend_cuda():
        there = {name: part.cuda() for name, part in named.items()}
        found = packing.unpack(there, torch.empty(shape, dtype=torch.bfloat16, device="cuda"))  # makes the tables
        with Traffic() as traffic:
            packing.unpack(there, found)
        assert has_bits_of(found.cpu(), expected)
    moved = traffic.num_bytes / found.numel()
    assert moved <= limit_bytes
    if form == "gptq-act-order":
        assert moved == pytest.approx(ACT_ORDER_BYTES, rel=0.03)
    elif packing.name in TRAFFIC_BYTES:  # 8 bits in words are not told from 4
        assert moved == pytest.approx(TRAFFIC_BYTES[packing.name], rel=0.25 if "8" in form else 0.03)


@pytest.mark.parametrize("shape", [(16, 15), (16, 20)], ids=str)
def test_groups_may_have_an_odd_number_of_columns(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "GROUP", 5)
    form = PUBLISHED["compressed-int4-zeros"]
    rows, columns = shape
    parts = form.parts(rows, columns + 8)
    parts["weight_packed"] = parts["weight_packed"][:, : -(-columns // 8)]
    for leaf in ("weight_scale", "weight_zero_point"):
        parts[leaf] = parts[leaf][:, : columns // 5]
    packing, named = found_packing(form, parts, shape)
    assert torch.equal(packing.unpack(named, torch.empty(shape)), form.meaning(parts, *shape))


WITH_KERNEL = [
    "compressed-nvfp4", "modelopt-nvfp4", "compressed-mxfp4", "gptq", "gptq-act-order", "gptq-v2", "gptq-8-bits", "awq",
    "compressed-int4", "compressed-int4-zeros", "compressed-packed-int8",
]  # fmt: skip


@pytest.mark.parametrize("form", WITH_KERNEL)
def test_the_kernel_unpacks_what_torch_unpacks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, two matrices at once and a share of one; there numbers are cut off to bf16, which is left out."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows, columns = 80, 96
    made = [PUBLISHED[form].parts(rows, columns) for _ in range(2)]
    names = {"weight": "e", **{leaf: f"e.{leaf}" for leaf in made[0] if leaf != "weight"}}
    pieces = {names[leaf]: tuple(entry(f"{i}.{leaf}", parts[leaf]) for i, parts in enumerate(made)) for leaf in made[0]}
    packing = storage_of("e", (2, rows, columns), pieces, PUBLISHED[form].stated)
    leaves = {part: name.removeprefix("e.") for part, name in packing.stored_names("e").items()}
    both = {
        part: torch.stack([parts["weight" if leaf == "e" else leaf] for parts in made]) for part, leaf in leaves.items()
    }
    share = packing.parts_of_rows(both, 16, 64)
    for dtype in (torch.float32, torch.float16):
        expected = packing.unpack(both, torch.empty(2, rows, columns, dtype=dtype))
        counted = Mock(wraps=four_bits_kernel._launch)
        with monkeypatch.context() as patched:
            patched.setattr(even_steps, "works_on", lambda *_: True)
            patched.setattr(fp4, "works_on", lambda *_: True)
            patched.setattr(even_steps, "unpack_steps", None)
            patched.setattr(fp4, "unpack_by_table", None)
            patched.setattr(published, "WEIGHTS_AT_ONCE_ON_CPU", columns)
            patched.setattr(four_bits_kernel, "_launch", counted)
            found = packing.unpack(both, torch.full_like(expected, torch.nan))
            assert counted.call_count == 1, "matrices are unpacked together"
            some = packing.unpack(share, torch.full((2, 48, columns), torch.nan, dtype=dtype))
        assert has_bits_of(found, expected)
        assert has_bits_of(some, expected[:, 16:64])


def test_the_kernel_rounds_to_bf16_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with powers of two."""
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    packed = torch.arange(3 * 16 * 48).remainder(256).to(torch.uint8).view(3, 16, 48)
    scale = torch.exp2(torch.randint(-120, 10, (3, 16, 3)).float())
    found, expected = (torch.full((3, 16, 96), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    four_bits_kernel.unpack_fp4(packed, scale, found)
    fp4.unpack_by_table(packed, scale, expected)
    assert has_bits_of(found, expected)


def test_a_card_keeps_the_sign_of_a_zero() -> None:
    numbers = torch.arange(64, dtype=torch.uint8).view(1, 4, 16) & 15
    zeros, scale = torch.full((1, 4, 2), 8, dtype=torch.int8), torch.tensor([-0.3, 0.3]).half().expand(1, 4, 2)
    groups = torch.arange(16).remainder(2).view(1, 16)
    steps = Steps(numbers=numbers, zeros=zeros, scale=scale, groups=groups)
    expected = torch.empty(1, 4, 16)
    even_steps.unpack_steps(steps, expected)
    with pretend_cuda():
        there = Steps(numbers=numbers.cuda(), zeros=zeros.cuda(), scale=scale.cuda(), groups=groups.cuda())
        found = torch.empty(1, 4, 16, device="cuda")
        even_steps.unpack_steps(there, found)
        assert has_bits_of(found.cpu(), expected)


@pytest.mark.parametrize("module", [fp4, even_steps], ids=lambda module: module.__name__)
def test_a_device_without_the_kernel_unpacks_by_torch(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is used where it is equal on the card: here its place is taken by what is, and by what is not."""

    def by_torch(*given: Any, **_: Any) -> None:
        if module is fp4:
            fp4.unpack_by_table(*given)
        else:
            steps, out = given
            shifts = torch.arange(0, 32, 4, device="cuda").int()
            numbers = (steps.numbers[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)
            even_steps.unpack_steps(replace(steps, numbers=numbers), out)

    name = "unpack_fp4" if module is fp4 else "unpack_words"
    assert not module.has_kernel(torch.device("cpu"), torch.bfloat16)
    with pretend_cuda():
        for kernel, is_used in ((lambda *given, **_: given[-1].zero_(), False), (by_torch, True)):
            four_bits_kernel.works_on.cache_clear()
            monkeypatch.setattr(module, name, kernel)
            assert module.has_kernel(torch.device("cuda", 0), torch.bfloat16) == is_used
    four_bits_kernel.works_on.cache_clear()


@pytest.mark.parametrize("form", PUBLISHED)
def test_the_experts_of_a_layer_are_unpacked_side_by_side(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six matrices, the halves of three experts' in one parameter."""
    made = [PUBLISHED[form].parts(32, 64) for _ in range(6)]
    expected = torch.cat([PUBLISHED[form].meaning(parts, 32, 64) for parts in made]).view(3, 64, 64)
    names = {"weight": "e", **{leaf: f"e.{leaf}" for leaf in made[0] if leaf != "weight"}}
    pieces = {
        names[leaf]: tuple(entry(f"{index}.{leaf}", parts[leaf]) for index, parts in enumerate(made))
        for leaf in made[0]
    }
    packing = storage_of("e", (3, 64, 64), pieces, PUBLISHED[form].stated)
    leaves = {name: leaf for leaf, name in names.items()}
    named = {
        part: torch.stack([parts[leaves[name]] for parts in made]) for part, name in packing.stored_names("e").items()
    }
    for at_once in (published.WEIGHTS_AT_ONCE_ON_CPU, 4 * 32 * 64, 9 * 64):
        monkeypatch.setattr(published, "WEIGHTS_AT_ONCE_ON_CPU", at_once)
        assert torch.equal(packing.unpack(named, torch.full((3, 64, 64), torch.nan)), expected)


def test_blocks_that_a_matrix_does_not_fill_are_as_large_as_the_others() -> None:
    """576 rows are four and a half blocks of 128, not five of 116."""
    numbers = torch.randn(576, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 2)
    form = Published(
        name="fp8", stated={"quant_method": "fp8"}, parts=lambda _r, _c: {}, meaning=lambda p, _r, _c: p[""]
    )
    packing, named = found_packing(form, {"weight": numbers, "weight_scale_inv": scale}, (576, 200))
    whole = scale.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(packing.unpack(named, torch.empty(576, 200)), numbers.float() * whole)


def test_one_column_of_blocks_is_told_from_a_scale_for_each_row() -> None:
    form = PUBLISHED["fp8-blocks"]
    numbers = torch.randn(64, 20).to(torch.float8_e4m3fn)
    by_block, by_row = torch.rand(4, 1), torch.rand(64, 1)
    for scale, whole in ((by_block, by_block.repeat_interleave(16, 0)), (by_row, by_row)):
        packing, named = found_packing(form, {"weight": numbers, "weight_scale_inv": scale}, (64, 20))
        assert torch.equal(packing.unpack(named, torch.empty(64, 20)), numbers.float() * whole)


def test_scales_may_be_powers_of_two() -> None:
    """MXFP8: blocks of 32 columns whose scales are exponents."""
    numbers, scale = torch.randn(8, 64).to(torch.float8_e4m3fn), torch.randint(0, 255, (8, 2)).to(torch.uint8)
    stated = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    form = Published(name="fp8", stated=stated, parts=lambda _r, _c: {}, meaning=lambda p, _r, _c: p[""])
    packing, named = found_packing(form, {"weight": numbers, "weight_scale_inv": scale}, (8, 64))
    whole = torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(packing.unpack(named, torch.empty(8, 64)), (numbers.double() * whole).float())


@pytest.mark.parametrize("size", [[128], {"rows": 128}, [128, "128"], [0, 128], 128])
def test_blocks_that_are_no_rows_and_columns_are_refused(size: object) -> None:
    numbers, scale = torch.randn(8, 64).to(torch.float8_e4m3fn), torch.rand(2, 2)
    stated = {"quant_method": "fp8", "weight_block_size": size}
    form = Published(name="fp8", stated=stated, parts=lambda _r, _c: {}, meaning=lambda p, _r, _c: p[""])
    with pytest.raises(CheckpointError, match="no rows and columns"):
        found_packing(form, {"weight": numbers, "weight_scale_inv": scale}, (8, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_experts_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 96, 2, 16)).to(torch.uint8)
    scale = torch.randint(100, 140, (3, 96, 2)).to(torch.uint8)
    pieces: dict[str, Pieces] = {"e_blocks": (entry("e_blocks", blocks),), "e_scales": (entry("e_scales", scale),)}
    packing = storage_of("e", (3, 64, 96), pieces, {"quant_method": "mxfp4"})
    found = packing.unpack({"packed": blocks, "scale": scale}, torch.empty(3, 64, 96, dtype=dtype))
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scale, dtype=dtype))
    transposed = packing.transposed
    assert transposed.transposed is None
    assert torch.equal(
        transposed.unpack({"packed": blocks, "scale": scale}, torch.empty(3, 96, 64, dtype=dtype)), found.mT
    )


@pytest.mark.parametrize("shape", [(64, 96), (128, 192)], ids=str)
def test_fp8_blocks_are_those_of_transformers(shape: tuple[int, int]) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(4, 3)
    stated = {"quant_method": "fp8", "weight_block_size": [shape[0] // 4, shape[1] // 3]}
    form = Published(name="fp8", stated=stated, parts=lambda _r, _c: {}, meaning=lambda p, _r, _c: p[""])
    packing, named = found_packing(form, {"weight": numbers, "weight_scale_inv": scale}, shape)
    for dtype in (torch.float32, torch.bfloat16):
        expected = Fp8Dequantize(None)._dequantize_one(numbers, scale, output_dtype=dtype)
        assert torch.equal(packing.unpack(named, torch.empty(shape, dtype=dtype)), expected)


@pytest.mark.parametrize(
    "form",
    ["compressed-int4", "compressed-int4-zeros", "compressed-packed-int8", "compressed-nvfp4", "compressed-mxfp4"],
)
def test_compressed_tensors_are_those_of_their_own_library(form: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    shape = (64, 96)
    parts = PUBLISHED[form].parts(*shape)
    stated = PUBLISHED[form].stated
    compressor = compressors.BaseCompressor.get_value_from_registry(stated["format"])
    scheme = QuantizationScheme(targets=["Linear"], weights=stated["config_groups"]["group_0"]["weights"])
    expected = compressor.decompress(dict(parts), scheme)["weight"]
    packing, named = found_packing(PUBLISHED[form], parts, shape)
    assert torch.equal(packing.unpack(named, torch.empty(shape, dtype=expected.dtype)), expected)
