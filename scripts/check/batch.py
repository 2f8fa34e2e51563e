"""A file of prompts under a memory limit, killed and resumed: nothing lost, doubled or different from texts alone.

    python -m scripts.make.inflate large --params 300M
    python -m scripts.check.batch large                     200 prompts, half the checkpoint's size, five kills

The rows have 5 to 1,500 tokens, and lengths, temperatures, stop strings, seeds and turns of their own. `edgespec
generate` runs the file with as many texts under way as pay, is killed (SIGKILL) at random times, and goes on with
--resume; then it runs it with one text at a time. Prints the records that were lost, doubled or different, the peak
memory beside the plan, and tokens a second of both runs. Exits 1 where something is wrong. float32, for in bf16
near ties between tokens depend on how many rows are computed at once.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from edgespec.config import parse_size
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.placement.memory import LIBRARIES_BYTES
from offload.checkpoint import read_checkpoint
from scripts.check.resume import finish, num_lines, start, wait_for
from scripts.situations import GIB, MIB, cut_texts, held_out_halves, idle_peak_bytes

ALLOWED_ABOVE_PLAN = 1.1


def write_rows(path: Path, *, count: int, longest: int, new_tokens: int, seed: int) -> None:
    """Rows of lengths from five tokens to the longest, few of them long, with settings of their own."""
    rng = random.Random(seed)
    tokenizer = open_pair(None, None).tokenizer
    texts = cut_texts(held_out_halves()[1], count=count, tokens=longest, seed=seed)
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            length = min(longest, round(5 * (longest / 5) ** rng.random()))
            row: dict[str, Any] = {"id": f"row-{number}", "max_new_tokens": rng.randint(1, new_tokens)}
            prompt = tokenizer.decode(tokenizer.encode(text)[:length])
            if number % 10 == 7:
                row["turns"] = [prompt, "return", "def "]
            else:
                row["prompt"] = prompt
            if number % 3:
                row |= {"temperature": rng.choice([0.6, 1.0]), "top_p": rng.choice([0.9, 1.0]), "seed": number % 5}
            if number % 4 == 1:
                row["stop"] = ["\n\n"]
            file.write(json.dumps(row) + "\n")


def options(arguments: argparse.Namespace) -> list[str]:
    """List the options of all runs."""
    return [
        "-m", str(arguments.model), "-md", str(DEMO_FOLDER / "draft"), "--dtype", "float32", "--seed", "1",
        "--max-cpu-mem", str(arguments.limit),
    ]  # fmt: skip


def run_killed(prompts: Path, out: Path, arguments: argparse.Namespace) -> float:
    """Run the file to its end, killed on the way; return the seconds of all runs."""
    rng = random.Random(3)
    started = time.perf_counter()
    for number in range(arguments.kills + 1):
        process = start(prompts, out, *options(arguments), "--resume")
        num_awaited = num_lines(out) + rng.randint(2, max(2, arguments.prompts // 8))
        if number < arguments.kills and wait_for(process, out, num_awaited):
            time.sleep(rng.random())
            process.kill()
            process.communicate()
        else:
            finish(process)
        print(f"  run {number + 1}: {num_lines(out)} records", file=sys.stderr)
    return time.perf_counter() - started


def planned_bytes(prompts: Path, out: Path, arguments: argparse.Namespace) -> int:
    """What the run plans to use, by its own dry run."""
    process = start(prompts, out, *options(arguments), "--dry-run")
    _, message = process.communicate()
    found = re.search(r"together\s+([\d.]+) GiB of", message.decode())
    if process.returncode or found is None:
        raise SystemExit(message.decode())
    return int(float(found[1]) * GIB)


def main() -> int:
    """Both runs, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an inflated checkpoint of the built-in target")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--limit", help="of memory [half of the weights in float32, and what libraries take]")
    arguments = parser.parse_args()
    weights = sum(math.prod(entry.shape) for entry in read_checkpoint(arguments.model).tensors.values())
    arguments.limit = arguments.limit or str(weights * torch.float32.itemsize // 2 + LIBRARIES_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        prompts, together, alone = (Path(folder) / name for name in ("prompts.jsonl", "together.jsonl", "alone.jsonl"))
        write_rows(prompts, count=arguments.prompts, longest=arguments.longest, new_tokens=arguments.new_tokens, seed=2)
        planned = planned_bytes(prompts, together, arguments)
        together_s = run_killed(prompts, together, arguments)
        started = time.perf_counter()
        finish(start(prompts, alone, *options(arguments), "-np", "1"))
        alone_s = time.perf_counter() - started
        found, expected = ([json.loads(line) for line in path.read_text().splitlines()] for path in (together, alone))
    by_id = {record["id"]: record for record in found}
    lost = [record["id"] for record in expected if record["id"] not in by_id]
    parts = ("token_ids", "turns", "finish_reason", "error")
    different = [
        record["id"]
        for record in expected
        if record["id"] in by_id and any(record[part] != by_id[record["id"]][part] for part in parts)
    ]
    peak = max(record["memory"]["cpu_peak_bytes"] for record in found) - idle_peak_bytes()
    tokens = sum(len(record["token_ids"]) for record in found)
    texts = [record["spec"]["mean_texts"] for record in found if record["spec"]["mean_texts"]]
    print(f"{weights / 1e6:.0f} M weights in float32, limit {(parse_size(arguments.limit) or 0) / MIB:.0f} MiB")
    print(f"{len(found)} records of {arguments.prompts}: {len(lost)} lost, {len(found) - len(by_id)} doubled, "
          f"{len(different)} different from texts alone {different[:5]}")  # fmt: skip
    print(f"peak {peak / MIB:.0f} MiB above an idle process, planned {planned / MIB:.0f} MiB: {peak / planned:.2f}")
    print(f"{tokens} tokens: {tokens / together_s:.2f} tokens/s with {sum(texts) / len(texts):.1f} texts under way "
          f"and {arguments.kills} kills, {tokens / alone_s:.2f} one after the other")  # fmt: skip
    is_right = not lost and len(found) == len(by_id) and not different and peak <= ALLOWED_ABOVE_PLAN * planned
    print("right" if is_right else "wrong")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
