"""Products with GGML's blocks as they lie in a file."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offload.formats.gguf_blocks import TYPES
from offload.native.block_grids import ALL_TEXTS
from offload.native.blocks import blocks_module
from offload.native.code import LANES
from offload.native.compiler import compiled, has_wide_registers, is_available
from offload.native.instructions import WIDE
from offload.native.run import product

pytestmark = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")
ROWS, COLUMNS = 64, 512
# Places of float16 numbers in a block; else the first one, and a minimum's
SCALES = {
    "Q6_K": (208,),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "MXFP4": (),
    "NVFP4": (),
}
HAVE_MINIMUM = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}


def random_blocks(name: str) -> Tensor:
    """Blocks [r, bytes] of all bytes, with scales of both signs that are finite."""
    kind = TYPES[name]
    blocks = torch.randint(0, 256, (ROWS * COLUMNS // kind.weights, kind.num_bytes)).to(torch.uint8)
    for place in SCALES.get(name, (0, 2) if name in HAVE_MINIMUM else (0,)):
        blocks[:, place : place + 2] = (torch.randn(len(blocks), 1) * 0.1).half().view(torch.uint8)
    if name == "IQ1_M":  # a float16 number in the highest four bits of four words
        blocks[:, 49:56:2] &= 15
        blocks[:, 49:56:2] |= torch.tensor([0x30, 0x20, 0x50, 0x30], dtype=torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(0, 130, (len(blocks),))
    return blocks.view(ROWS, -1)


class Case:
    """A type: its code for an old processor, and for this one with other tiles, and a weight."""

    def __init__(self, name: str) -> None:
        other = blocks_module(name, (3, 1), width=WIDE if has_wide_registers() else LANES)
        self.codes = [compiled(str(blocks_module(name, (2, 1))), cpu="haswell"), compiled(str(other))]
        self.blocks, kind = random_blocks(name), TYPES[name]
        self.weight = torch.empty(ROWS * COLUMNS // kind.weights, kind.weights)
        kind.unpack(self.blocks.view(-1, kind.num_bytes), self.weight)
        self.weight = self.weight.view(ROWS, COLUMNS)
        self.record = (self.blocks.data_ptr(), 0, COLUMNS, ROWS, 2)


@pytest.fixture(scope="module", params=ALL_TEXTS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_each_number_has_its_own_place(case: Case) -> None:
    """Of one column each: no other number, and no neighbour's scale, may be seen."""
    rows = torch.eye(COLUMNS)
    for code in case.codes:
        assert torch.equal(product(code, case.record, rows), case.weight.T)


def test_products_are_those_of_the_weight(case: Case) -> None:
    rows = torch.randn(7, COLUMNS).bfloat16().float()
    right = rows.double() @ case.weight.double().T
    for code in case.codes:
        error = (product(code, case.record, rows) - right).norm() / right.norm()
        assert float(error) < 2e-5


def test_a_row_has_the_same_bits_in_any_company_on_any_processor_and_wherever_blocks_begin(case: Case) -> None:
    rows = torch.randn(80, COLUMNS) * 10 ** torch.randn(80, 1)
    rows[7, 3] = torch.inf
    moved = torch.empty(case.blocks.nbytes + 1, dtype=torch.uint8)[1:]
    moved.copy_(case.blocks.flatten())
    whole = product(case.codes[0], case.record, rows)
    assert whole.isnan().all(-1).nonzero().tolist() == [[7]]
    whole = whole.nan_to_num()
    for code in case.codes:
        assert torch.equal(product(code, (moved.data_ptr(), *case.record[1:]), rows).nan_to_num(), whole)
        for first, last in pairwise((0, 1, 3, 6, 10, 15, 80)):
            found = product(code, case.record, rows[first:last]).nan_to_num()
            assert torch.equal(found, whole[first:last]), (first, last)
