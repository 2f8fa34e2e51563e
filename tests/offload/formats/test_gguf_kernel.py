"""A card's kernels for GGML's blocks, interpreted, give the bits of torch's operations, wherever rows lie."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from offload.checkpoint import TensorEntry
from offload.formats import gguf, gguf_kernel, published
from offload.formats.four_bits_kernel import works_on
from offload.formats.gguf import GGUF
from offload.formats.gguf_blocks import TYPES, BlockType
from offload.formats.gguf_kernel import NAMES, BlockRuns, runs_of, runs_on, unpack_on_card
from offload.formats.published import PublishedWeight, weights_at_once
from offload.formats.storage import StoredParameter
from offload.packed_weight import PackedModule, PackedWeight
from tests.support.interpreted_triton import interpreted_triton
from tests.support.pretend_cuda import pretend_cuda

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
HALVES = {  # places of float16 numbers in a block
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "MXFP4": (),
}  # fmt: skip
SCALES = (6e-8, -6e-8, 6e-5, -1e-3, 0.0, -0.0, 1.0, -7.3, 50.0, 65504.0, -65504.0)


interpreted = pytest.fixture(scope="module")(interpreted_triton)


@pytest.fixture
def by_kernel(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are taken for right, and nothing else may unpack."""
    monkeypatch.setattr(gguf_kernel, "works_on", lambda *_: True)
    monkeypatch.setattr(gguf, "unpack_blocks", None)


@pytest.fixture
def on_a_card() -> Iterator[None]:
    gguf_kernel._say_where.cache_clear()
    with pretend_cuda():
        yield
    gguf_kernel._say_where.cache_clear()


def random_blocks(name: str, count: int) -> Tensor:
    """Any bytes, with scales of all sizes, one after the other."""
    random = torch.Generator().manual_seed(len(name) + count)
    blocks = torch.randint(0, 256, (count, TYPES[name].num_bytes), generator=random).to(torch.uint8)
    for number, start in enumerate(HALVES.get(name, (0,))):
        scales = torch.tensor(SCALES).half()[(torch.arange(count) * (number + 1) + number) % len(SCALES)]
        blocks[:, start : start + 2] = scales.view(-1, 1).view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.arange(count) * 7 % 253
    return blocks


def numbers_of(name: str, blocks: Tensor) -> Tensor:
    found = torch.empty(len(blocks), TYPES[name].weights)
    TYPES[name].unpack(blocks, found)
    return found


def stored_as(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 in a dtype, as the interpreter writes it: it cuts bits off for bf16."""
    if dtype == torch.bfloat16:
        return (numbers.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return numbers.to(dtype)


def has_bits_of(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def packing_of(name: str, shape: tuple[int, ...], stored: tuple[int, ...]) -> PublishedWeight:
    leaf = f"p.gguf_{name.lower()}"
    pieces = {leaf: (TensorEntry.planned(leaf, stored, torch.uint8),)}
    found = GGUF.detect(StoredParameter(name="p.weight", shape=shape, stored=pieces, stated={}))
    assert isinstance(found, PublishedWeight)
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # to float16, by numpy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("interpreted")
def test_blocks_of_any_bytes_and_scales_have_the_bits_of_torch(name: str, dtype: torch.dtype) -> None:
    """No multiple of a program's blocks; what stands behind the last one stays."""
    block, count = TYPES[name], 133
    blocks = random_blocks(name, count)
    if name == "MXFP4" and dtype == torch.bfloat16:
        blocks[:, 0].clamp_(min=8)  # above denormal numbers, which the interpreter makes zeros
    place = torch.full((count + 1, block.weights), 7.0, dtype=dtype)
    assert unpack_on_card(block, blocks, place[:-1])
    assert has_bits_of(place[:-1], stored_as(numbers_of(name, blocks), dtype))
    assert (place[-1] == 7).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("by_kernel")
def test_rows_are_read_where_they_lie(name: str) -> None:
    """Heads of a Llama, odd numbers of rows of two matrices among more, and every other row of another matrix."""
    block, row_blocks = TYPES[name], 3
    columns, row_bytes = row_blocks * block.weights, row_blocks * block.num_bytes
    blocks = random_blocks(name, 2 * 3 * 10 * row_blocks).view(2, 3, 10, row_bytes)
    expected = numbers_of(name, blocks.reshape(-1, block.num_bytes)).view(2, 3, 10, columns)

    heads = torch.full((2, 30, columns), torch.nan)
    gguf._unpack_heads({"blocks": blocks}, heads, block=block)
    assert has_bits_of(heads, expected.unflatten(2, (5, 2)).transpose(2, 3).reshape(2, 30, columns))
    share = torch.full((1, 20, columns), torch.nan)
    gguf._unpack_heads({"blocks": blocks[1:, 1:]}, share, block=block)
    assert has_bits_of(share, expected[1:, 1:].unflatten(2, (5, 2)).transpose(2, 3).reshape(1, 20, columns))

    rows = torch.full((2, 7, columns), torch.nan)
    gguf._unpack({"blocks": blocks.flatten(1, 2)[:, 11:18]}, rows, block=block)
    assert has_bits_of(rows, expected.flatten(1, 2)[:, 11:18])

    in_turn = torch.full((3, 20, columns), torch.nan)
    gguf._unpack_in_turn({name: blocks.transpose(0, 1)}, in_turn, block=block)
    assert has_bits_of(in_turn, expected.permute(1, 2, 0, 3).reshape(3, 20, columns))


@pytest.mark.usefixtures("by_kernel")
def test_experts_of_two_types_are_unpacked_row_by_row_in_turn() -> None:
    first, second = random_blocks("Q6_K", 3 * 5 * 2), random_blocks("Q8_0", 3 * 5 * 16)
    parts = {"Q6_K": first.view(3, 1, 5, -1), "Q8_0": second.view(3, 1, 5, -1)}
    found = torch.full((3, 10, 512), torch.nan)
    gguf._unpack_two_types(parts, found, blocks=[TYPES["Q6_K"], TYPES["Q8_0"]])
    both = [numbers_of(name, part.reshape(-1, TYPES[name].num_bytes)).view(3, 5, 512) for name, part in parts.items()]
    assert has_bits_of(found, torch.stack(both, dim=2).flatten(1, 2))


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("stored", [(24, 3 * 34), (2, 12, 3 * 34)], ids=["rows", "heads"])
def test_all_rows_of_a_matrix_are_unpacked_together(stored: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "WEIGHTS_AT_ONCE_ON_CPU", 96)
    counted = Mock(wraps=gguf_kernel._launch)
    monkeypatch.setattr(gguf_kernel, "_launch", counted)
    blocks = random_blocks("Q8_0", 24 * 3)
    found = packing_of("Q8_0", (24, 96), stored).unpack(
        {"blocks": blocks.view(stored)}, torch.full((24, 96), torch.nan)
    )
    assert counted.call_count == 1
    rows = numbers_of("Q8_0", blocks).view(24, 96)
    assert has_bits_of(found, rows if len(stored) == 2 else rows.view(2, 6, 2, 96).transpose(1, 2).reshape(24, 96))


def test_blocks_that_follow_each_other_are_one_run() -> None:
    block = TYPES["Q4_K"]
    blocks, out = torch.zeros(2, 6, 10, 3 * 144, dtype=torch.uint8), torch.zeros(2, 6, 10, 3 * 256)
    assert runs_of(block, blocks, out) == BlockRuns(lengths=(360, 1, 1, 1), sources=(0, 0, 0), places=(0, 0, 0))
    some = runs_of(block, blocks[:, 1:4], out[:, :3])
    assert some == BlockRuns(lengths=(90, 2, 1, 1), sources=(180, 0, 0), places=(180, 0, 0))
    turned = runs_of(block, blocks.permute(1, 2, 0, 3), out.view(6, 10, 2, -1))
    assert turned == BlockRuns(lengths=(3, 2, 60, 1), sources=(180, 3, 0), places=(3, 6, 0))


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("fault", ["words", "rows", "columns"])
def test_what_lies_otherwise_is_unpacked_by_torch_which_is_said_once(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block, flat = TYPES["Q4_K"], torch.zeros(9 * 144 + 2, dtype=torch.uint8)
    flat[2:] = random_blocks("Q4_K", 9).flatten()
    blocks = flat[2:].view(3, 432)  # at two bytes, where words have four
    out = torch.empty(3, 768)
    if fault == "rows":
        blocks = torch.cat((blocks, torch.zeros(3, 4, dtype=torch.uint8)), dim=1)[:, :432]
    elif fault == "columns":
        blocks, out = blocks.clone(), torch.empty(768, 3).T
    expected = numbers_of("Q4_K", blocks.clone().view(-1, 144)).view(3, 768)
    monkeypatch.setattr(gguf_kernel, "works_on", lambda *_: True)
    monkeypatch.setattr(gguf_kernel, "_launch", lambda *_: pytest.fail("the kernel is started"))
    with caplog.at_level(logging.WARNING, "edgespec.offload"):
        for _ in range(2):
            gguf._write(block, blocks, out.fill_(torch.nan))
    assert has_bits_of(out, expected)
    assert [record.message for record in caplog.records] == [
        "blocks of Q4_K do not lie at multiples of their words: torch's operations unpack them"
    ]


@pytest.mark.usefixtures("on_a_card")
def test_torch_has_room_for_the_temporaries_of_some_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel is expected all weights come together."""
    monkeypatch.setattr(
        gguf, "weights_at_once", lambda device: 512 if device.type == "cuda" else weights_at_once(device)
    )
    counted = Mock(wraps=gguf.unpack_blocks)
    monkeypatch.setattr(gguf, "unpack_blocks", counted)
    blocks = random_blocks("Q6_K", 5)
    found = torch.empty(5, 256).cuda()
    gguf._write(TYPES["Q6_K"], blocks.cuda(), found)
    assert [len(call.args[1]) for call in counted.call_args_list] == [2, 2, 1]
    assert has_bits_of(found.cpu(), numbers_of("Q6_K", blocks))


@pytest.mark.usefixtures("on_a_card")
def test_a_kernel_is_used_where_the_card_gives_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here its place is taken by what is equal, and by what is not."""
    tried = []

    def right(block: BlockType, blocks: Tensor, out: Tensor, _runs: BlockRuns) -> None:
        tried.append(block.name)
        numbers = torch.empty(out.shape, device=out.device)
        block.unpack(blocks, numbers)
        out.copy_(numbers)

    def last_bit(block: BlockType, blocks: Tensor, out: Tensor, runs: BlockRuns) -> None:
        right(block, blocks, out, runs)
        out.view(torch.int16).bitwise_xor_(1)

    assert not runs_on("Q5_K", CPU, torch.bfloat16)
    assert not runs_on("IQ2_XS", CARD, torch.bfloat16)
    for kernel, is_used in ((last_bit, False), (right, True)):
        works_on.cache_clear()
        monkeypatch.setattr(gguf_kernel, "_launch", kernel)
        with caplog.at_level(logging.WARNING, "edgespec.offload"):
            assert runs_on("Q5_K", CARD, torch.bfloat16) == is_used
            assert runs_on("Q5_K", CARD, torch.bfloat16) == is_used
    assert tried == ["Q5_K", "Q5_K"]
    assert [record.message for record in caplog.records] == [
        "a kernel for Q5_K differs from torch's operations, which are used"
    ]


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("stored", [(64, 144), (4, 16, 144)], ids=["rows", "heads"])
def test_a_kernel_is_tried_when_the_weights_of_its_type_are_loaded(
    stored: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Mock(return_value=False)
    monkeypatch.setattr(gguf_kernel, "works_on", tried)
    linear = nn.Linear(256, 64, bias=False, device="meta")
    packed = PackedWeight((64, 256), packing_of("Q4_K", (64, 256), stored))
    PackedModule(linear, [("weight", packed)])._unpack_into(torch.empty(64 * 256).cuda(), ExitStack(), Mock())
    assert [call.args[3] for call in tried.call_args_list] == ["Q4_K"]
