"""What each worker is to have of a cluster, and how many such workers its machines have room for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from edgespec.errors import EdgespecError

NAMES = {"cpu": "CPU", "gpu": "GPU"}  # as they are given -> Ray's own
EXAMPLE = "Write names and amounts, such as cpu=4,gpu=1."
Amounts = Mapping[str, float]  # by Ray's names


def parse_resources(text: str) -> dict[str, float]:
    """Return the amounts of 'cpu=4,gpu=1,big=1' by Ray's names; raises EdgespecError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([\w.:-]+)\s*=\s*(\d+(?:\.\d+)?)\s*", part)
        if match is None:
            raise EdgespecError("E_SETTING", f"`resources={text}`: '{part.strip()}' is no amount.", EXAMPLE)
        name = NAMES.get(match[1].lower(), match[1])
        if name in found:
            raise EdgespecError("E_SETTING", f"`resources={text}` gives {match[1]} twice.", EXAMPLE)
        found[name] = float(match[2])
    return found


def default_resources(nodes: Sequence[Amounts]) -> dict[str, float]:
    """Return what a worker has where nobody says: a GPU where the cluster has any, else a processor."""
    return {"GPU": 1.0} if any(node.get("GPU") for node in nodes) else {"CPU": 1.0}


def default_workers(nodes: Sequence[Amounts], each: Amounts) -> int:
    """Return how many workers there are where nobody says: one a GPU, else one a machine that has room for one."""
    if each.get("GPU"):
        return max(1, _places(nodes, each))
    return max(1, sum(_places([node], each) > 0 for node in nodes))


def check_places(nodes: Sequence[Amounts], each: Amounts, num_workers: int) -> None:
    """Raise EdgespecError where the machines have no room for so many workers."""
    places = _places(nodes, each)
    if places >= num_workers:
        return
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in each.items())
    has = {name: sum(node.get(name, 0.0) for node in nodes) for name in each}
    total = ", ".join(f"{amount:g} {name}" for name, amount in has.items())
    fix = f"Use at most {places}" if places else "Ask for less with `resources`"
    raise EdgespecError(
        "E_CLUSTER",
        f"`workers={num_workers}`, each with {wanted}: the cluster has room for {places} "
        f"(machines: {len(nodes)}; in all {total}).",
        f"{fix}, or add machines: ray start --address=HOST:PORT.",
    )


def _places(nodes: Sequence[Amounts], each: Amounts) -> int:
    needed = {name: amount for name, amount in each.items() if amount}
    if not needed:
        return len(nodes) * (1 << 16)
    return sum(math.floor(min(node.get(name, 0.0) / amount for name, amount in needed.items())) for node in nodes)
