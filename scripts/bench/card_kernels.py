"""What Triton makes of the kernels for GGML's blocks, compiled for cards without one.

    pip install triton
    python -m scripts.bench.card_kernels --arch 75 80 86 89 90

Of each type and architecture: registers, and bytes of the stack where they are spilled, as cuobjdump says; bytes moved
a weight; and the bytes that its loads and stores name, of which neighbours share some.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from offload.formats.gguf_blocks import TYPES
from offload.formats.gguf_kernel import NAMES, WEIGHTS_AT_ONCE, word_bytes

ARCHITECTURES = (75, 80, 86, 89, 90)
HAS_BF16 = 80
OUT_BYTES = 2  # of a weight
NUM_WARPS = 4  # Triton's own choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel for one architecture."""

    registers: int
    spilled_bytes: int
    moved_bytes: float  # a weight: of packed and unpacked ones, each once
    named_bytes: float  # a weight: by instructions
    instructions: float  # a weight, of PTX


def compiled(name: str, arch: int) -> Compiled:
    """Compile the kernel of a type."""
    import triton  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    from offload.formats import gguf_triton

    block = TYPES[name]
    word = {4: "*i32", 2: "*i16", 1: "*u8"}[word_bytes(block)]
    half = word if block.num_bytes % 2 else "*fp16"
    signature = {"words": word, "halves": half, "out": "*bf16" if arch >= HAS_BF16 else "*fp16"}
    constants = {
        "weights_of": gguf_triton.WEIGHTS_OF[name], "weights": block.weights, "size": block.num_bytes,
        "each": word_bytes(block), "at_once": WEIGHTS_AT_ONCE // block.weights,
    }  # fmt: skip
    numbers = [argument for argument in gguf_triton.unpack.arg_names if argument not in {**signature, **constants}]
    signature |= dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
    signature = {argument: signature[argument] for argument in gguf_triton.unpack.arg_names}
    aligned = {(argument,): [["tt.divisibility", 16]] for argument in range(3)}
    source = ASTSource(fn=gguf_triton.unpack, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": NUM_WARPS}).asm
    text, used = made["ptx"], used_by(made["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin")
    named = [
        int(count or 1) * int(bits) // 8 for count, bits in re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.\w(\d+)", text)
    ]
    weights_a_thread = WEIGHTS_AT_ONCE / (32 * NUM_WARPS)
    return Compiled(
        registers=number_in(r"REG:(\d+)", used),
        spilled_bytes=number_in(r"STACK:(\d+)", used) + number_in(r"LOCAL:(\d+)", used),
        moved_bytes=block.num_bytes / block.weights + OUT_BYTES,
        named_bytes=sum(named) / weights_a_thread,
        instructions=sum(line.strip().endswith(";") for line in text.splitlines()) / weights_a_thread,
    )


def used_by(code: bytes, folder: Path) -> str:
    """Return what a card's code needs, as cuobjdump, which comes with Triton, says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(folder / "cuobjdump"), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def number_in(pattern: str, said: str) -> int:
    """Return the number that is named."""
    found = re.search(pattern, said)
    assert found is not None, said
    return int(found[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--types", nargs="+", default=NAMES, choices=NAMES)
    chosen = parser.parse_args()
    print("type    arch  registers  spilled  bytes moved  named  instructions a weight")
    for name in chosen.types:
        for arch in chosen.arch:
            of = compiled(name, arch)
            print(
                f"{name:7} sm_{arch} {of.registers:9} {of.spilled_bytes:8} {of.moved_bytes:12.2f} "
                f"{of.named_bytes:6.2f} {of.instructions:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
