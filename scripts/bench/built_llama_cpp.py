"""GGUF files in memory: a llama.cpp that is built for this very processor beside edgespec, plainly and by default.

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -DGGML_NATIVE=ON
    cmake --build build --target llama-bench -j
    python -m scripts.bench.built_llama_cpp build/bin/llama-bench MODEL.gguf [MODEL.gguf ...] [--threads 1 2]

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m scripts.bench.built_llama_cpp AVX2/bin/llama-bench ...

The last line is for both as on a processor without AVX-512, with a llama.cpp of `-DGGML_NATIVE=OFF`, which is built for
AVX2. `scripts.bench.llama_cpp CHECKPOINT --types q4_0 --gguf FOLDER` writes files of checkpoints.
PyPI's wheels are built for AVX2. Systems take turns, each in a fresh process; the tokens that are written count, behind
a prompt of as many tokens. Only a quiet machine's runs count. Prints medians of tokens/s.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {"plain": ("-md", "none", "--policy", "none"), "default": ("-md", "none")}
PROMPT = Path(__file__).read_text(encoding="utf-8")[:700]
NEW_TOKENS = 64


def of_llama_cpp(program: Path, model: Path, threads: int, prompt_tokens: int) -> float:
    """Return llama-bench's tokens/s behind a prompt."""
    command = [
        program,
        "-m",
        model,
        "-d",
        prompt_tokens,
        "-p",
        0,
        "-n",
        NEW_TOKENS,
        "-t",
        threads,
        "-r",
        2,
        "-o",
        "json",
    ]
    found: Any = json.loads(subprocess.run([str(part) for part in command], check=True, capture_output=True).stdout)
    return float(found[0]["avg_ts"])


def of_edgespec(model: Path, threads: int, settings: tuple[str, ...], rows: Path) -> tuple[float, int]:
    """Return the tokens/s that a record states, and the tokens of its prompt."""
    options = ["-m", model, "--raw", "--temp", 0, "-n", NEW_TOKENS, "--ignore-eos", "--threads", threads, *settings]
    command = [sys.executable, "-m", "edgespec", "generate", rows, *options]
    record: Any = json.loads(subprocess.run([str(part) for part in command], check=True, capture_output=True).stdout)
    return float(record["timings"]["decode_tps"]), int(record["usage"]["prompt_tokens"])


def main() -> None:
    """Print a line for each file and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path, help="llama-bench")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "prompt.jsonl"
        rows.write_text(json.dumps({"id": "one", "prompt": PROMPT}) + "\n", encoding="utf-8")
        for model in given.models:
            for threads in given.threads:
                found: dict[str, list[float]] = {}
                for _ in range(given.turns):
                    for name, settings in SETTINGS.items():
                        rate, prompt_tokens = of_edgespec(model, threads, settings, rows)
                        found.setdefault(f"edgespec {name}", []).append(rate)
                    rate = of_llama_cpp(given.program, model, threads, prompt_tokens)
                    found.setdefault("llama.cpp", []).append(rate)
                medians = ", ".join(f"{name} {statistics.median(rates):.1f}" for name, rates in found.items())
                print(f"{model.name}, {threads} threads, prompt of {prompt_tokens}: {medians} tokens/s", flush=True)


if __name__ == "__main__":
    main()
