"""What Triton makes of the kernels for GGML's blocks, compiled for cards without one.

    pip install triton
    python -m scripts.bench.card_kernels --arch 75 80 86 89 90

Of each type and architecture: registers, and bytes of the stack where they are spilled, as cuobjdump says; bytes moved
and instructions a weight. Of unpacking, the bytes that loads and stores name, of which neighbours share some. Of
products of up to 16 rows, bytes of shared memory and instructions on tensor cores; what a loop begins with counts too.
"""

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from offload.formats.gguf_blocks import TYPES
from offload.formats.gguf_kernel import NAMES, WEIGHTS_AT_ONCE, word_bytes
from offload.layouts.gguf_on_card import sizes

ARCHITECTURES = (75, 80, 86, 89, 90)
HAS_BF16 = 80
OUT_BYTES = 2  # of a weight
NUM_WARPS = 4  # Triton's own choice
KERNELS = ("unpack", "multiply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel for one architecture."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    moved_bytes: float  # a weight: of packed ones, and of unpacked ones where they are written, each once
    named_bytes: float  # a weight: by instructions
    instructions: float  # a weight, of PTX
    on_tensor_cores: int  # instructions


def compiled(name: str, arch: int, *, is_product: bool) -> Compiled:
    """Compile the kernel that unpacks a type, or multiplies with it."""
    import triton  # type: ignore[import-not-found]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
    from triton.compiler import ASTSource  # type: ignore[import-not-found]

    from offload.formats import gguf_triton

    block, kernel = TYPES[name], gguf_triton.multiply if is_product else gguf_triton.unpack
    word = {4: "*i32", 2: "*i16", 1: "*u8"}[word_bytes(block)]
    tensors = {"words": word, "halves": word if block.num_bytes % 2 else "*fp16"}
    tensors |= dict.fromkeys(("given", "bias", "out"), "*bf16" if arch >= HAS_BF16 else "*fp16")
    constants: dict[str, object] = {"read": gguf_triton.READS[name]}
    if is_product:
        constants |= {**sizes(name), "has_bias": False}
        num_weights = sizes(name)["at_once"] * block.weights * sizes(name)["tile"]
    else:
        constants |= {
            "weights": block.weights, "size": block.num_bytes, "each": word_bytes(block),
            "at_once": WEIGHTS_AT_ONCE // block.weights,
        }  # fmt: skip
        num_weights = WEIGHTS_AT_ONCE
    arguments = kernel.arg_names
    signature = {name: tensors.get(name, "constexpr" if name in constants else "i32") for name in arguments}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(arguments) if name in tensors}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": NUM_WARPS})
    text, used = made.asm["ptx"], used_by(made.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin")
    named = [
        int(count or 1) * int(bits) // 8 for count, bits in re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.\w(\d+)", text)
    ]
    weights_a_thread = num_weights / (32 * NUM_WARPS)
    return Compiled(
        registers=number_in(r"REG:(\d+)", used),
        spilled_bytes=number_in(r"STACK:(\d+)", used) + number_in(r"LOCAL:(\d+)", used),
        shared_bytes=made.metadata.shared,
        moved_bytes=block.num_bytes / block.weights + (0 if is_product else OUT_BYTES),
        named_bytes=sum(named) / weights_a_thread,
        instructions=sum(line.strip().endswith(";") for line in text.splitlines()) / weights_a_thread,
        on_tensor_cores=text.count("mma.sync"),
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
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    chosen = parser.parse_args()
    for kernel in chosen.kernels:
        is_product = kernel == "multiply"
        last = "shared  on tensor cores" if is_product else "named"
        print(f"{kernel}\ntype    arch  registers  spilled  bytes moved  instructions a weight  {last}")
        for name in chosen.types:
            for arch in chosen.arch:
                of = compiled(name, arch, is_product=is_product)
                print(
                    f"{name:7} sm_{arch} {of.registers:9} {of.spilled_bytes:8} {of.moved_bytes:12.2f} "
                    f"{of.instructions:22.1f}  "
                    + (f"{of.shared_bytes:6} {of.on_tensor_cores:16}" if is_product else f"{of.named_bytes:5.2f}"),
                    flush=True,
                )


if __name__ == "__main__":
    main()
