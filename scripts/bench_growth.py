"""What growth and verification cost without any model: random logits for draft and target.

    python scripts/bench_growth.py                     768 nodes, a vocabulary of 32,000 tokens

Every policy grows and verifies trees in alternation; medians in milliseconds. Drawing, selection, book-keeping
and acceptance are measured, the draft's and the target's forwards are not (their logits are looked up).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict

import torch
from torch import Tensor

from edgespec import SamplingSettings, TreeSettings
from edgespec.grow.policies import make_grow, open_policy
from edgespec.sampling.distribution import to_probs
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import verifier

POLICIES = [
    TreeSettings(policy="adaptive", draw="sampled", size=768),
    TreeSettings(policy="adaptive", draw="chosen", size=768),
    TreeSettings(policy="dyspec", size=768),
    TreeSettings(policy="opt-tree", size=768),
    TreeSettings(policy="eagle2", size=768, max_children=32),
    TreeSettings(policy="specinfer", branching=(8, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1)),
]


class RandomDrafter:
    """Rows of a fixed table of q, any of them for any node."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.drafted = 0
        self.seconds = 0.0

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Q after nodes."""
        started = time.perf_counter()
        rows = self.q[(tokens * 31 + self.drafted) % self.q.shape[0]]
        self.drafted += tokens.shape[0]
        self.seconds += time.perf_counter() - started
        return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--sharpness", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    generator = torch.Generator(device).manual_seed(0)
    sampling = SamplingSettings(temperature=arguments.temp)

    def logits(rows: int) -> Tensor:
        return torch.randn(rows, arguments.vocab, generator=generator, device=device) * arguments.sharpness

    q, target = to_probs(logits(256), sampling), logits(769)
    times: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
    for _ in range(arguments.repeats + 1):
        for settings in POLICIES:
            policy = open_policy(settings)
            drafter = RandomDrafter(q)
            grow = make_grow(policy, drafter, sampling=sampling, vocab=arguments.vocab, device=device,  # type: ignore[arg-type]
                             generator=generator)  # fmt: skip
            started = time.perf_counter()
            tree = grow(0, 24)
            grown = time.perf_counter()
            rows = TargetRows(target[: tree.num_nodes], lambda hidden: hidden, sampling, vocab=arguments.vocab)
            verifier(sampling, policy.draw(sampling))(tree, rows, generator)
            verified = time.perf_counter()
            name = f"{settings.policy} {settings.draw or ''}".strip()
            times[name].append(
                (grown - started - drafter.seconds, verified - grown, tree.num_nodes - 1, drafter.drafted)
            )
    results = []
    print(f"{'policy':18}{'nodes':>6}{'drafted':>8}{'grow ms':>9}{'verify ms':>10}{'together':>9}")
    for name, runs in times.items():
        grow_ms, verify_ms = (1000 * statistics.median(run[column] for run in runs[1:]) for column in (0, 1))
        nodes, drafted = runs[-1][2:]
        print(f"{name:18}{nodes:>6}{drafted:>8}{grow_ms:>9.1f}{verify_ms:>10.2f}{grow_ms + verify_ms:>9.1f}")
        results.append({"policy": name, "nodes": nodes, "drafted": drafted, "grow_ms": grow_ms, "verify_ms": verify_ms})
    print(json.dumps({"vocab": arguments.vocab, "temperature": arguments.temp, "rows": results}))


if __name__ == "__main__":
    main()
