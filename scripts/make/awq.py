"""Round the layers of a Llama checkpoint to 4 bits, and write them as AWQ's published files are.

    python -m scripts.make.awq LARGE OUT

Each group of 64 columns has a scale and a zero point from its least and greatest weight.
No activations are read: these are AWQ's files, without its choice of scales.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from scripts.make.inflate import COMPANIONS

GROUP = 64  # inner sizes of inflated checkpoints are multiples of it
MOST = 15  # the greatest number of four bits
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each number of a word, the lowest bits first, is of


def rounded(weight: Tensor) -> dict[str, Tensor]:
    """Return a matrix's published parts: `[rows, columns]` -> words, zeros of groups and scales, columns first."""
    rows, columns = weight.shape
    grouped = weight.float().T.reshape(columns // GROUP, GROUP, rows)
    least, greatest = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)  # [groups, rows]
    scale = ((greatest - least) / MOST).clamp(min=1e-6).half()
    zero = (-least / scale.float()).round().clamp(0, MOST)
    numbers = (grouped / scale.float()[:, None] + zero[:, None]).round().clamp(0, MOST)
    return {"qweight": _words(numbers.reshape(columns, rows)), "qzeros": _words(zero), "scales": scale}


def _words(numbers: Tensor) -> Tensor:
    """Return `[lines, rows]` numbers of four bits as `[lines, rows / 8]` words of 32."""
    eights = numbers.to(torch.int64).unflatten(1, (-1, 8))[..., ORDER]
    words = (eights << (4 * torch.arange(8))).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def write_awq(source: Path, out: Path) -> None:
    """Write the folder, file by file."""
    out.mkdir(parents=True)
    for path in [path for pattern in COMPANIONS for path in source.glob(pattern)]:
        shutil.copy(path, out)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    files: dict[str, str] = {}
    for path in sorted(source.glob("*.safetensors")):
        parts: dict[str, Tensor] = {}
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                weight = file.get_tensor(name)
                if ".layers." in name and weight.dim() == 2:
                    parts |= {f"{name.removesuffix('weight')}{part}": found for part, found in rounded(weight).items()}
                else:
                    parts[name] = weight
        save_file({name: part.contiguous() for name, part in parts.items()}, out / path.name)
        files |= dict.fromkeys(parts, path.name)
    index = {"metadata": {}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def main() -> None:
    """Read the names, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_awq(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
