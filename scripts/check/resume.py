"""Kill `edgespec generate -o` at random moments and go on with --resume: is every prompt there exactly once?

    python -m scripts.check.resume

A round starts a run over --prompts prompts, kills it (SIGKILL, which nothing can catch) when the file has a random
number of records and a random moment has passed, and resumes it, perhaps to be killed again; the last run ends
by itself. Since a kill does not tear what one write hands to the system, half of the kills are followed by cutting the
last record at a random byte, as a power failure could. The round passes when every id is there once, every
line is whole, and every text is that of an uninterrupted run (temperature 0). The last line is JSON.
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
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.runs import finish, num_lines, start, wait_for, write_prompts


@dataclass
class Counts:
    """What happened in all rounds."""

    kills: int = 0
    before_first_record: int = 0
    torn_by_kill: int = 0
    torn_by_hand: int = 0
    records_at_kill: list[int] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    torn_left: int = 0
    different: int = 0

    @property
    def passed(self) -> bool:
        """Nothing lost, doubled, torn or different."""
        return not (self.lost or self.twice or self.torn_left or self.different)


def kill_at(process: subprocess.Popen[bytes], out: Path, *, num_records: int, delay_s: float) -> bool:
    """Kill the run once the file has that many records, and a moment later; False when it had ended before."""
    wait_for(process, out, num_records)
    time.sleep(delay_s)
    was_running = process.poll() is None
    process.kill()
    process.communicate()
    return was_running


def tear(out: Path, chance: random.Random) -> bool:
    """Cut the last record at a random byte of it; False where there is none."""
    data = out.read_bytes() if out.exists() else b""
    begin = data[:-1].rfind(b"\n") + 1
    if len(data) - begin < 2:
        return False
    out.write_bytes(data[: chance.randrange(begin + 1, len(data) - 1)])
    return True


def round_of(
    prompts: Path, out: Path, counts: Counts, chance: random.Random, *, count: int, options: list[str], most_kills: int
) -> None:
    """One run with its kills and its end."""
    done = 0
    for attempt in range(chance.randint(1, most_kills)):
        process = start(prompts, out, *options, *(["--resume"] if attempt > 0 else []))
        at = chance.randrange(done, count) if done < count else count
        if not kill_at(process, out, num_records=at, delay_s=chance.uniform(0, 0.2)):
            break
        done = num_lines(out)
        counts.kills += 1
        counts.before_first_record += done == 0
        counts.records_at_kill.append(done)
        data = out.read_bytes() if out.exists() else b""
        counts.torn_by_kill += bool(data) and not data.endswith(b"\n")
        counts.torn_by_hand += chance.random() < 0.5 and tear(out, chance)
    finish(start(prompts, out, *options, "--resume"))


def judge(out: Path, expected: dict[str, list[str]], counts: Counts) -> None:
    """Compare the file with an uninterrupted run's texts."""
    found: Counter[str] = Counter()
    for line in out.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            counts.torn_left += 1
            continue
        found[record["id"]] += 1
        counts.different += record["turns"] != expected.get(record["id"])
    counts.torn_left += not out.read_bytes().endswith(b"\n")
    counts.lost += len(expected.keys() - found.keys())
    counts.twice += sum(number - 1 for number in found.values())


def check(folder: Path, *, rounds: int, count: int, new_tokens: int, most_kills: int, seed: int) -> Counts:
    """All rounds."""
    chance = random.Random(seed)
    counts = Counts()
    prompts, whole = folder / "prompts.jsonl", folder / "whole.jsonl"
    write_prompts(prompts, count)
    options = ["-n", str(new_tokens), "--temp", "0", "-q"]
    finish(start(prompts, whole, *options))
    records = map(json.loads, whole.read_text(encoding="utf-8").splitlines())
    expected = {record["id"]: record["turns"] for record in records}
    assert len(expected) == count
    for number in range(rounds):
        out = folder / f"out-{number}.jsonl"
        kills = counts.kills
        round_of(prompts, out, counts, chance, count=count, options=options, most_kills=most_kills)
        judge(out, expected, counts)
        at = counts.records_at_kill[kills:]
        print(f"round {number + 1}: killed at {at} of {count}; {'passed' if counts.passed else 'FAILED'}", flush=True)
    return counts


def main() -> int:
    """Run the rounds and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3, help="at most, in one round")
    parser.add_argument("-n", "--new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = check(
            Path(folder),
            rounds=arguments.rounds,
            count=arguments.prompts,
            new_tokens=arguments.new_tokens,
            most_kills=arguments.kills,
            seed=arguments.seed,
        )
    print(
        f"{arguments.rounds} rounds of {arguments.prompts} prompts, {counts.kills} kills "
        f"({counts.before_first_record} before the first record), {counts.torn_by_kill} lines torn by them and "
        f"{counts.torn_by_hand} by hand: {counts.lost} lost, {counts.twice} twice, {counts.torn_left} torn, "
        f"{counts.different} different"
    )
    print(json.dumps({"rounds": arguments.rounds, "prompts": arguments.prompts, "seed": arguments.seed} | vars(counts)))
    return 0 if counts.passed else 1


if __name__ == "__main__":
    sys.exit(main())
