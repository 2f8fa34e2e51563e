"""Does a run over Ray's workers write what one process writes, also where workers and the driver are killed?

    python -m scripts.check.ray              all of it
    python -m scripts.check.ray --only kills --rounds 5

`equal`: records of 2 and 3 workers on this machine beside those of one process. `kills`: rounds in which random
workers get SIGKILL (at most two a round: a row that loses three workers fails, as it should). `driver`: rounds in
which the process that writes is killed, and the run goes on with --resume. `data`: the callable for Ray Data on a
parquet file. `overhead`: seconds a row of Ray and the dispatch alone, with workers that answer at once. A record is
different if text, tokens, settings or their hash are. Ray's sockets need a short folder: RAY_TMPDIR. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from edgespec.distributed.cluster import connected
from edgespec.distributed.dispatch import Dispatch
from edgespec.distributed.ray_worker_pool import RayWorkerPool
from edgespec.distributed.worker import Answer, Exchange, WorkerInfo
from scripts.check.resume import finish, num_lines, start, wait_for, write_prompts

SAME = ("turns", "token_ids", "finish_reason", "error", "config", "config_hash", "sampling", "prompt")
MAX_KILLS = 2
Records = dict[str, list[dict[str, Any]]]


def read(out: Path) -> Records:
    """Return the records of a file by their ids."""
    found: Records = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["id"], []).append(record)
    return found


def nothing() -> Counter[str]:
    """Return counts of nothing, which say so."""
    return Counter({"lost": 0, "doubled": 0, "different": 0, "kills": 0})


def compare(expected: Records, found: Records) -> Counter[str]:
    """Count what is lost, doubled and different."""
    counts = nothing()
    for name, (record,) in expected.items():
        here = found.get(name, [])
        counts["lost"] += not here
        counts["doubled"] += max(0, len(here) - 1)
        counts["different"] += any(one[key] != record[key] for one in here[:1] for key in SAME)
    return counts


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes of a run's workers."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        try:
            if child.cmdline() and child.cmdline()[0].startswith("ray::Actor"):
                found.append(child)
        except psutil.Error:
            continue
    return found


def check_equal(folder: Path, prompts: Path, expected: Records, arguments: list[str], one_s: float) -> Counter[str]:
    """Compare runs of 2 and 3 workers with one process's."""
    total = nothing()
    for num_workers in (2, 3):
        out = folder / f"workers-{num_workers}.jsonl"
        began = time.perf_counter()
        finish(start(prompts, out, *arguments, "--ray", "local", "--workers", str(num_workers)))
        counts = compare(expected, read(out))
        took_s = time.perf_counter() - began
        print(f"{num_workers} workers: {took_s:.1f} s (one process {one_s:.1f} s); {dict(counts)}", flush=True)
        total.update(counts)
    return total


def check_worker_kills(
    folder: Path, prompts: Path, expected: Records, arguments: list[str], *, rounds: int, chance: random.Random
) -> Counter[str]:
    """Kill random workers at random moments."""
    total = nothing()
    for number in range(rounds):
        out = folder / f"kills-{number}.jsonl"
        process = start(prompts, out, *arguments, "--ray", "local", "--workers", str(chance.choice((2, 3))))
        kills = 0
        for at in sorted(chance.sample(range(len(expected) - 4), chance.randint(1, MAX_KILLS))):
            if not wait_for(process, out, at):
                break
            time.sleep(chance.uniform(0, 0.3))
            if workers := workers_of(process):
                chance.choice(workers).kill()
                kills += 1
        finish(process)
        counts = compare(expected, read(out))
        counts["kills"] += kills
        print(f"round {number + 1}: {dict(counts)}", flush=True)
        total.update(counts)
    return total


def check_driver_kills(
    folder: Path, prompts: Path, expected: Records, arguments: list[str], *, rounds: int, chance: random.Random
) -> Counter[str]:
    """Kill the process that writes, and go on with its file."""
    total = nothing()
    for number in range(rounds):
        out = folder / f"driver-{number}.jsonl"
        options = [*arguments, "--ray", "local", "--workers", "2"]
        process = start(prompts, out, *options)
        wait_for(process, out, chance.randrange(len(expected) - 4))
        workers = workers_of(process)
        process.kill()
        process.communicate()
        _, left = psutil.wait_procs(workers, timeout=30)
        at = num_lines(out)
        finish(start(prompts, out, *options, "--resume"))
        counts = compare(expected, read(out))
        counts.update({"kills": 1, "workers that stayed": len(left)})
        print(f"driver killed at record {at}: {dict(counts)}", flush=True)
        total.update(counts)
    return total


def check_data(folder: Path, prompts: Path, expected: Records, arguments: argparse.Namespace) -> Counter[str]:
    """Complete a parquet file's column with Ray Data, and compare the texts of single prompts."""
    import pandas

    from edgespec.distributed import BatchGenerator

    singles = {name: record for name, (record,) in expected.items() if len(record["turns"]) == 1}
    table = pandas.DataFrame({"id": list(singles), "prompt": [record["prompt"] for record in singles.values()]})
    table.loc[len(table)] = {"id": "empty", "prompt": ""}
    table.to_parquet(folder / "prompts.parquet")
    with connected("local", num_workers=2):
        from ray import data

        done = data.read_parquet(str(folder / "prompts.parquet")).map_batches(
            BatchGenerator,
            fn_constructor_kwargs={
                "id_column": "id", "max_new_tokens": arguments.new_tokens, "seed": 7, "temperature": 0.8,
            },
            compute=data.ActorPoolStrategy(size=1),
            batch_size=32,
        )  # fmt: skip
        rows = {row["id"]: row for row in done.take_all()}
    print(f"the empty prompt: {rows.pop('empty')['error']}")
    counts = nothing()
    counts["lost"] += len(singles.keys() - rows.keys())
    counts["different"] += sum(rows[name]["text"] != record["text"] for name, record in singles.items())
    print(f"Ray Data, {len(rows)} rows of parquet: {dict(counts)}", flush=True)
    return counts


@dataclass(frozen=True)
class InstantWorker:
    """Answers each job at once, with as many bytes as a record has: a worker without a model, and its own plan."""

    num_texts: int

    def open(self, *, num_beside: int) -> InstantWorker:
        """Make it."""
        return self

    def info(self) -> WorkerInfo:
        """Say what any other says."""
        return WorkerInfo(settings={}, versions={}, num_texts=self.num_texts, shared={})

    def load(self, settings: Mapping[str, Any]) -> None:
        """Load nothing."""

    def exchange(self, jobs: Sequence[tuple[int, dict[str, Any]]], wait_s: float) -> Exchange[dict[str, Any]]:
        """Answer all."""
        return Exchange(answers=[Answer(number=number, value=job) for number, job in jobs])


def measure_overhead(num_rows: int, num_texts: int) -> dict[str, float]:
    """Return seconds a row of Ray and the dispatch alone: by the clock, and of the driver's processor.

    A worker of one text answers one row an exchange, which costs most.
    """
    record = {"text": "x" * 3000, "token_ids": list(range(200))}
    with (
        connected("local", num_workers=2),
        closing(
            RayWorkerPool(InstantWorker(num_texts), num_workers=2, resources={"CPU": 1.0}, check=lambda: None)
        ) as pool,
    ):
        pool.read_infos()
        pool.load()
        dispatch = Dispatch((record for _ in range(num_rows)), pool, pool.names, log=print, on_exchange=_ignore)
        outcomes = dispatch.run()
        next(outcomes)  # workers have loaded
        wall, worked = time.perf_counter(), time.process_time()
        assert sum(1 for _ in outcomes) == num_rows - 1
    found = {
        "wall_s_a_row": (time.perf_counter() - wall) / num_rows,
        "driver_s_a_row": (time.process_time() - worked) / num_rows,
    }
    print(f"overhead of {num_rows} rows, {num_texts} a worker: {found}", flush=True)
    return found


def _ignore(_worker: str, _told: object) -> None:
    return


def main() -> int:
    """Run the checks and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("equal", "kills", "driver", "data", "overhead"), action="append")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=20, help="with workers killed")
    parser.add_argument("--driver-rounds", type=int, default=5)
    parser.add_argument("-n", "--new-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    wanted = asked.only or ("equal", "kills", "driver", "data", "overhead")
    chance = random.Random(asked.seed)
    told: dict[str, Any] = {}
    if set(wanted) - {"overhead"}:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            prompts, whole = folder / "prompts.jsonl", folder / "whole.jsonl"
            write_prompts(prompts, asked.prompts)
            options = ["-n", str(asked.new_tokens), "--temp", "0.8", "--seed", "7", "--dtype", "float32"]
            began = time.perf_counter()
            finish(start(prompts, whole, *options))
            one_s, expected = time.perf_counter() - began, read(whole)
            assert len(expected) == asked.prompts
            if "equal" in wanted:
                told["equal"] = check_equal(folder, prompts, expected, options, one_s)
            rounds = {"kills": (check_worker_kills, asked.rounds), "driver": (check_driver_kills, asked.driver_rounds)}
            for name, (kill, count) in rounds.items():
                if name in wanted:
                    told[name] = kill(folder, prompts, expected, options, rounds=count, chance=chance)
            if "data" in wanted:
                told["data"] = check_data(folder, prompts, expected, asked)
    if "overhead" in wanted:
        told |= {f"overhead {count}": measure_overhead(5_000, count) for count in (1, 16)}
    bad = [counts.get(key, 0) for counts in told.values() for key in ("lost", "doubled", "different")]
    print(json.dumps({"prompts": asked.prompts, "seed": asked.seed, **told}))
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
