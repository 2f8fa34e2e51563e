"""Text for ARM, which nothing here runs: it is compiled, and what x86 can run of it gives the same bits."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from offload.native.compiler import compiled, is_available
from offload.native.run import product

pytestmark = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")
PROCESSORS = [("aarch64-linux-gnu", "cortex-a76"), ("arm64-apple-darwin", "apple-m1")]
NEEDED = {  # instructions of each kind of text
    "lanes": {"smlal"}, "tables": {"smlal", "tbl"}, "bytes": {"smlal"}, "Q4_K": {"smlal", "fmla"},
    "Q5_0": {"smull", "tbl"}, "IQ2_XS": {"smull", "tbl"}, "dense": {"fmla"}, "unpacking": {"fmul"},
}  # fmt: skip


def text(name: str) -> object:
    from offload.native.blocks import blocks_module
    from offload.native.bytes import bytes_module
    from offload.native.dense import dense_module
    from offload.native.lanes import lanes_module
    from offload.native.tables import Table, tables_module
    from offload.native.unpacking import unpacking_module

    others: dict[str, Callable[[], object]] = {
        "lanes": lambda: lanes_module((2, 1)),
        "bytes": lambda: bytes_module((2, 1)),
        "tables": lambda: tables_module(Table(values=tuple(range(-8, 8)), unit=8), (2, 1)),
        "dense": lambda: dense_module({2: 2, 1: 4}, is_bf16=True),
        "unpacking": lambda: unpacking_module("Q6_K", in_half=True),
    }
    return others[name]() if name in others else blocks_module(name, (2, 1))


def assembly(of_module: str, triple: str, processor: str, *, machine_of_text: str = "aarch64") -> str:
    """Return what the compiler makes of a text for another processor."""
    from llvmlite import binding

    from offload.native.compiler import _optimise
    from offload.native.instructions import written_for

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        target = binding.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip("this llvmlite does not know the processor")
    machine = target.create_target_machine(cpu=processor, opt=3)
    with written_for(machine_of_text):
        module = binding.parse_assembly(str(text(of_module)))
    _optimise(module, machine, unrolls=False)
    found: str = machine.emit_assembly(module)
    return found


@pytest.mark.parametrize("of_module", NEEDED)
@pytest.mark.parametrize(("triple", "processor"), PROCESSORS)
def test_text_for_arm_becomes_vector_instructions_and_calls_no_library(
    triple: str, processor: str, of_module: str
) -> None:
    found = assembly(of_module, triple, processor)
    names = {line.split(maxsplit=1)[0].split(".")[0] for line in found.splitlines() if line.startswith("\t")}
    assert all(any(name.startswith(one) for name in names) for one in NEEDED[of_module])
    assert set(re.findall(r"^\tbl\t_?(\S+)", found, re.MULTILINE)) <= {"multiply"}, "others than its own are called"


@pytest.mark.parametrize("name", ["lanes", "bytes"])
def test_sums_of_products_without_an_instruction_of_their_own_are_the_same(name: str) -> None:
    from offload.native.instructions import written_for

    numbers, columns = torch.randint(0, 256, (64, 256)).to(torch.uint8), 256
    steps, rows = torch.full((8, 64, 2), 0.01, dtype=torch.bfloat16), torch.randn(3, columns)
    record = (numbers.data_ptr(), steps.data_ptr(), columns, 64, 32)
    with written_for("another"):
        of_others = str(text(name))
    found = [product(compiled(one), record, rows) for one in (of_others, str(text(name)))]
    assert "pmadd" not in of_others
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["lanes", "bytes", "tables"])
def test_sums_of_products_stay_in_the_registers_of_avx2(kind: str) -> None:
    found = assembly(kind, "x86_64-linux-gnu", "haswell", machine_of_text="x86_64")
    start = found.index("\nmultiply:")
    lines = found[start : found.index(".Lfunc_end", start)].splitlines()
    on_stack = [line for line in lines if "ymm" in line and "rsp" in line]
    products = [line for line in lines if "vpmaddwd" in line]
    assert len(on_stack) < 60  # floats, outside of loops; with all pairs of columns in a row there are hundreds
    assert len(products) == 4 * (1 + 2)  # those of one pair, for a row alone and for two
