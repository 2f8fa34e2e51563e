"""Requests with odd bodies and headers to `edgespec serve`: is each refused as its protocol does, or answered?

    python -m tests.fuzz.fuzz_server                 five minutes
    python -m tests.fuzz.fuzz_server --minutes 2

The built-in pair on the loopback, with a chat template of its own so that tools are read. Prints how many requests of
each path got which status. Exits 1 at the first answer that is wrong, with the request that got it, and where
the server's own output has a traceback, a text still runs, or a good client is not served at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.odd_requests import GOOD, Asked, problem, requests
from tests.support.running_server import TEMPLATE, running_server

CONTEXT = "256"
BATCH = 300  # requests, after which the clock is looked at
TIMEOUT_S = 60


def fuzz(address: str, *, seconds: float, first_seed: int) -> Counter[str]:
    """Send requests for some time; returns the numbers of answers, and raises AssertionError for a wrong one."""
    counts: Counter[str] = Counter()
    ends, number = time.monotonic() + seconds, first_seed
    with httpx.Client(base_url=address, timeout=TIMEOUT_S) as client:
        while time.monotonic() < ends:

            @seed(number)
            @settings(
                max_examples=BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],  # a smaller request would be looked for during minutes
            )  # fmt: skip
            @given(asked=requests())
            def batch(asked: Asked) -> None:
                answer = client.post(asked.path, content=asked.content, headers=asked.headers)
                counts[f"{asked.path} {answer.status_code}"] += 1
                wrong = problem(asked, answer)
                assert wrong is None, f"{wrong}: {answer.text[:400]}"

            batch()
            number += 1
    return counts


def main() -> None:
    """Send requests, and look at what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template, log = Path(folder) / "template.jinja", Path(folder) / "log"
        template.write_text(TEMPLATE, encoding="utf-8")
        options = ["-c", CONTEXT, "--chat-template", str(template)]
        with log.open("wb") as output, running_server(*options, output=output) as (address, _):
            counts = fuzz(address, seconds=60 * arguments.minutes, first_seed=arguments.seed)
            good = httpx.post(f"{address}/v1/completions", json=GOOD, timeout=TIMEOUT_S).status_code
            running = httpx.get(f"{address}/props").json()["texts"]["open"]
        for name, count in sorted(counts.items()):
            print(f"{count:7} {name}")
        said = log.read_text(encoding="utf-8", errors="replace")
    start = said.find("Traceback")
    if start >= 0:
        print(said[start : start + 4000])
    print(f"{sum(counts.values())} requests; then a good client got {good}, and {running} texts run")
    sys.exit(start >= 0 or good != httpx.codes.OK or running > 0)


if __name__ == "__main__":
    main()
