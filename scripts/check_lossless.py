"""Is every policy, with every rule it may use, lossless?

    python scripts/check_lossless.py                    every cell, about half an hour
    python scripts/check_lossless.py --only dyspec -n 5000

A vocabulary of four tokens; target and draft are tables of random distributions that disagree, in
float64. Each cell draws texts of two tokens through trees and compares the distribution of the 16
outcomes with the target's own by chi-square (15 degrees of freedom). A right policy falls below
--bound with that probability; with a bound of 1e-4 and 70 cells one run in 140 raises a false alarm.
At temperature 0 texts of four tokens from many tables must equal the target's, token by token.
Prints a line a cell and one JSON line; exits 1 when a cell fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor

from edgespec import SamplingSettings, TreeSettings
from edgespec.decode import Session, Verify, decode
from edgespec.grow.policies import Policy, make_grow, make_grow_branches, open_policy
from edgespec.sampling import to_probs
from edgespec.target_initialized import decode_target_initialized
from edgespec.tree import TokenTree
from edgespec.verify.rules import verifier

VOCAB = 4
CPU = torch.device("cpu")
PRESET = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
Prefix = tuple[int, ...]


def tree_settings(folder: Path) -> dict[str, TreeSettings]:
    """Every policy in every form, small enough for four tokens: name -> settings."""
    preset = folder / "preset.json"
    preset.write_text(json.dumps(PRESET), encoding="utf-8")
    forms = {
        "adaptive sampled": TreeSettings(policy="adaptive", draw="sampled", size=6, depth=3),
        "adaptive chosen": TreeSettings(policy="adaptive", draw="chosen", size=6, depth=3),
        "dyspec": TreeSettings(policy="dyspec", size=6, depth=3),
        "dyspec threshold": TreeSettings(policy="dyspec", size=40, depth=3, threshold=0.15),
        "opt-tree": TreeSettings(policy="opt-tree", size=6, depth=3, stop_gain=0.2),
        "eagle2": TreeSettings(policy="eagle2", size=6, depth=3, max_children=3),
        "eagle2 ddd": TreeSettings(policy="eagle2", size=6, depth=3, stop_depths=(1, 2), stop_log_probability=-0.5),
        "c2t": TreeSettings(policy="c2t", size=12, depth=3, confidence=0.3, max_children=3),
    }
    for draw in ("sampled", "chosen"):
        forms |= {
            f"sequoia {draw}": TreeSettings(policy="sequoia", draw=draw, size=6, depth=3, max_children=3),
            f"specinfer {draw}": TreeSettings(policy="specinfer", draw=draw, branching=(2, 2, 1)),
            f"mcsd {draw}": TreeSettings(policy="mcsd", draw=draw, branching=(3, 1)),
            f"mcsd fork {draw}": TreeSettings(policy="mcsd", draw=draw, fork=(2, 3)),
            f"chain {draw}": TreeSettings(policy="chain", draw=draw, draft_tokens=3),
            f"static {draw}": TreeSettings(policy="static", draw=draw, tree_file=preset),
        }
    return forms


def table(seed: int, length: int, *, sharpness: float = 1.2) -> dict[Prefix, Tensor]:
    """Random logits [vocab] after every text of up to `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [path for size in range(length + 1) for path in itertools.product(range(VOCAB), repeat=size)]
    logits = torch.randn(len(prefixes), VOCAB, generator=generator, dtype=torch.float64) * sharpness
    return dict(zip(prefixes, logits, strict=True))


def distributions(logits: dict[Prefix, Tensor], sampling: SamplingSettings) -> dict[Prefix, Tensor]:
    """What is sampled from."""
    return dict(zip(logits, to_probs(torch.stack(list(logits.values())), sampling), strict=True))


class TableTarget:
    """A target that looks its logits up; the prompt is followed by token 0 for certain."""

    vocab = VOCAB
    device = CPU

    def __init__(self, logits: dict[Prefix, Tensor], sampling: SamplingSettings) -> None:
        self.logits_after = logits
        self.probs = distributions(logits, sampling)

    def prefill(self, ids: Tensor, *, capacity: int) -> Tensor:
        """Start a text."""
        self.text: Prefix = ()
        return torch.tensor([1e3] + [0.0] * (VOCAB - 1), dtype=torch.float64)

    def look(self, tree: TokenTree) -> Tensor:
        """Logits after every node, which stand for hidden states."""
        self.paths: list[Prefix] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            self.paths.append((*(self.text if parent < 0 else self.paths[parent]), token))
        return torch.stack([self.logits_after[path[1:]] for path in self.paths])

    def logits(self, hidden: Tensor) -> Tensor:
        """They are."""
        return hidden

    def commit(self, path: tuple[int, ...]) -> None:
        """The path became text."""
        self.text = self.paths[path[-1] if path else 0]


class TableDrafter:
    """A draft that looks its q up."""

    def __init__(self, q: dict[Prefix, Tensor]) -> None:
        self.q = q

    def prefill(self, ids: Tensor, *, capacity: int) -> None:
        """Start a text."""
        self.text: Prefix = ()
        self.rows: list[Prefix] = []

    def expand(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """Q after nodes."""
        new = [
            (*(self.text if parent < 0 else self.rows[parent]), token)
            for token, parent in zip(tokens.tolist(), parent_rows.tolist(), strict=True)
        ]
        self.rows += new
        return torch.stack([self.q[path[1:]] for path in new])

    def commit(self, root: int, path_rows: list[int], path_tokens: list[int]) -> None:
        """The root and the path became text."""
        self.text, self.rows = (*self.text, root, *path_tokens), []


def texts(
    policy: Policy,
    sampling: SamplingSettings,
    *,
    count: int,
    num_tokens: int,
    seed: int,
    verify: Verify | None = None,
) -> Iterator[tuple[TableTarget, Prefix]]:
    """Texts of `num_tokens` tokens behind the first, from one pair of tables."""
    # One more than is looked at: a tree that ended with the text would lack its last layer.
    length = num_tokens + 1
    target = TableTarget(table(seed, length), sampling)
    drafter = TableDrafter(distributions(table(seed + 1, length), policy.settings.draft_sampling(sampling)))
    session = Session(target=target, drafter=drafter)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    grow = make_grow(policy, drafter, sampling=sampling, vocab=VOCAB, device=CPU, generator=generator)  # type: ignore[arg-type]
    for _ in range(count):
        steps = decode(
            session,
            torch.tensor([0]),
            grow=grow,
            verify=verify or verifier(sampling, policy.draw(sampling)),
            sampling=sampling,
            generator=generator,
            max_new_tokens=1 + length,
            stop_tokens=frozenset(),
            capacities=(8, 8),
        )
        yield target, tuple(token for step in steps for token in step.tokens)[1 : num_tokens + 1]


def p_value(
    policy: Policy, sampling: SamplingSettings, *, count: int, seed: int = 5, verify: Verify | None = None
) -> float:
    """The chi-square p-value of two-token texts against the target's own distribution."""
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=2), 0)
    probs: dict[Prefix, Tensor] = {}
    for target, text in texts(policy, sampling, count=count, num_tokens=2, seed=seed, verify=verify):
        counts[text] += 1
        probs = target.probs
    expected = {text: count * float(probs[()][text[0]] * probs[text[:1]][text[1]]) for text in counts}
    possible = [text for text in counts if expected[text] > 0]
    if sum(counts[text] for text in possible) < count:
        return 0.0  # a token of no probability came out
    observed = [counts[text] for text in possible]
    return float(stats.chisquare(observed, [expected[text] for text in possible], sum_check=False).pvalue)


def is_greedy(policy: Policy, *, count: int, num_tokens: int = 4) -> bool:
    """Whether texts at temperature 0 are the target's argmaxes, for `count` pairs of tables."""
    sampling = SamplingSettings(temperature=0)
    for seed in range(count):
        for target, text in texts(policy, sampling, count=1, num_tokens=num_tokens, seed=2 * seed):
            expected: Prefix = ()
            for _ in range(num_tokens):
                expected = (*expected, int(target.probs[expected].argmax()))
            if text != expected:
                return False
    return True


class OpenTarget(TableTarget):
    """The same, its first token drawn as the others are."""

    def prefill(self, ids: Tensor, *, capacity: int) -> Tensor:
        """Start a text."""
        super().prefill(ids, capacity=capacity)
        return self.logits_after[()]

    def uncommit_last(self) -> None:
        """The prompt's token is no part of the tables."""


def total_variation(*, width: int, count: int, seed: int = 5) -> float:
    """Distance between two-token texts of target-initialised trees and the target's own, sampling error included."""
    policy = open_policy(TreeSettings(policy="mcsd", branching=(2, 1), target_width=width))
    sampling, length = SamplingSettings(temperature=1.0), 3
    target = OpenTarget(table(seed, length), sampling)
    drafter = TableDrafter(distributions(table(seed + 1, length), sampling))
    generator = torch.Generator().manual_seed(seed)
    grow = make_grow_branches(
        policy, drafter, sampling=sampling, vocab=VOCAB, device=CPU, generator=generator  # type: ignore[arg-type]
    )  # fmt: skip
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=2), 0)
    for _ in range(count):
        steps = decode_target_initialized(
            Session(target=target, drafter=drafter),  # type: ignore[arg-type]
            torch.tensor([0]),
            grow=grow,
            verify=verifier(sampling, "without_replacement"),
            sampling=sampling,
            generator=generator,
            max_new_tokens=3,
            stop_tokens=frozenset(),
            capacities=(8, 8),
            width=width,
        )
        first, second, *_ = (token for step in steps for token in step.tokens)
        counts[first, second] += 1
    p = target.probs
    return sum(abs(counts[a, b] / count - float(p[()][a] * p[a,][b])) for a, b in counts) / 2


SAMPLINGS = {
    f"temperature {temperature}{', top-p 0.9' if top_p < 1 else ''}": SamplingSettings(
        temperature=temperature, top_p=top_p
    )
    for temperature in (0.7, 1.0)
    for top_p in (1.0, 0.9)
}


def main() -> int:
    """Every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--texts", type=int, default=20_000)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--bound", type=float, default=1e-4)
    parser.add_argument("--lossy", action="store_true", help="only measure target-initialised trees' distance")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.lossy:
        distances = {width: total_variation(width=width, count=arguments.texts) for width in (1, 2, 3)}
        for width, distance in distances.items():
            print(f"target width {width}: total variation {distance:.4f} over {arguments.texts} texts of two tokens")
        print(json.dumps({"texts": arguments.texts, "total_variation": distances}))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in tree_settings(Path(folder)).items():
            if arguments.only not in name:
                continue
            policy = open_policy(settings)
            started = time.perf_counter()
            passed = is_greedy(policy, count=100)
            rows.append({"policy": name, "sampling": "temperature 0", "passed": passed})
            print(f"{name:20} {'temperature 0':28} {'equal' if passed else 'DIFFERENT'}", flush=True)
            for label, sampling in SAMPLINGS.items():
                p = p_value(policy, sampling, count=arguments.texts)
                passed = p > arguments.bound
                rows.append({"policy": name, "sampling": label, "p_value": p, "passed": passed})
                print(f"{name:20} {label:28} p = {p:.4f}{'' if passed else '  FAILED'}", flush=True)
            print(f"{name:20} {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    num_passed = sum(bool(row["passed"]) for row in rows)
    print(f"{num_passed} of {len(rows)} cells passed: {arguments.texts} texts each, bound {arguments.bound:g}")
    print(json.dumps({"texts": arguments.texts, "bound": arguments.bound, "cells": rows}))
    return 0 if num_passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
