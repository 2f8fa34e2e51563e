"""What growth and verification cost without any model: random logits for draft and target.

    python -m scripts.bench.growth                     16 to 768 nodes, vocabularies of 2,000 and 32,000 tokens
    python -m scripts.bench.growth --only adaptive --sizes 768 --vocabs 32000

Every policy grows and verifies trees in alternation; medians in milliseconds. Drawing, selection, book-keeping
and acceptance are measured, the draft's and the target's forwards are not (their logits are looked up).
"""

import argparse
import json
import statistics
import time
from collections import defaultdict

import torch
from torch import Tensor

from edgespec import SamplingSettings, TreeSettings
from edgespec.grow import batched
from edgespec.grow.policies import make_grow, open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.sampling.distribution import to_probs
from edgespec.sampling.noise import TextNoise
from edgespec.verify import accept_alone
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import verifier

DEPTH = 24
TABLE_ROWS = 256  # of different distributions


def entrants(size: int) -> dict[str, TreeSettings]:
    """Policies and draws at a budget: name -> settings."""
    return {
        "adaptive": TreeSettings(policy="adaptive", size=size),
        "opt-tree": TreeSettings(policy="opt-tree", size=size),
        "sequoia coupled": TreeSettings(policy="sequoia", draw="coupled", size=size),
        "sequoia": TreeSettings(policy="sequoia", size=size),
        "dyspec": TreeSettings(policy="dyspec", size=size),
    }


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


def measure(
    vocab: int, sizes: list[int], *, only: str, sampling: SamplingSettings, sharpness: float, repeats: int,
    device: torch.device,
) -> list[dict[str, object]]:  # fmt: skip
    """A row a size and policy."""
    generator = torch.Generator(device).manual_seed(0)

    def logits(rows: int) -> Tensor:
        return torch.randn(rows, vocab, generator=generator, device=device) * sharpness

    q, target = to_probs(logits(TABLE_ROWS), sampling), logits(max(sizes) + 1)
    times: dict[tuple[int, str], list[tuple[float, float, int, int]]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for size in sizes:
            for name, settings in entrants(size).items():
                if only not in name:
                    continue
                policy = open_policy(settings)
                drafter = RandomDrafter(q)
                noise = TextNoise(seed=0, key=repeat, vocab=vocab, device=device)
                draws = TextDraws(sampling=sampling, device=device, generator=generator, noise=noise)
                grow = make_grow(policy, drafter, draws)  # type: ignore[arg-type]
                started = time.perf_counter()
                tree = batched.grown(grow(0, DEPTH), drafter)  # type: ignore[arg-type]
                grown = time.perf_counter()
                rows = TargetRows(target[: tree.num_nodes], lambda hidden: hidden, sampling, vocab=vocab)
                accept_alone(verifier(sampling, policy.draw, noise)(tree, rows, generator))
                verified = time.perf_counter()
                times[size, name].append(
                    (grown - started - drafter.seconds, verified - grown, tree.num_nodes - 1, drafter.drafted)
                )
    results: list[dict[str, object]] = []
    for (size, name), runs in times.items():
        grow_ms, verify_ms = (1000 * statistics.median(run[column] for run in runs[1:]) for column in (0, 1))
        nodes, drafted = runs[-1][2:]
        print(f"{vocab:>6} {name:16}{size:>5}{nodes:>6}{drafted:>8}{grow_ms:>9.1f}{verify_ms:>10.2f}"
              f"{grow_ms + verify_ms:>9.1f}", flush=True)  # fmt: skip
        results.append({"vocab": vocab, "policy": name, "size": size, "nodes": nodes, "drafted": drafted,
                        "grow_ms": grow_ms, "verify_ms": verify_ms})  # fmt: skip
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[2_000, 32_000])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 768])
    parser.add_argument("--only", default="", help="policies whose name contains this")
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--sharpness", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(
        f"{'vocab':>6} {'policy':16}{'size':>5}{'nodes':>6}{'drafted':>8}{'grow ms':>9}{'verify ms':>10}{'together':>9}"
    )
    rows = [
        row
        for vocab in arguments.vocabs
        for row in measure(
            vocab,
            arguments.sizes,
            only=arguments.only,
            sampling=SamplingSettings(temperature=arguments.temp),
            sharpness=arguments.sharpness,
            repeats=arguments.repeats,
            device=torch.device(arguments.device),
        )
    ]
    print(json.dumps({"temperature": arguments.temp, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
