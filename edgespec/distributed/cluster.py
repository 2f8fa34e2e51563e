"""A Ray cluster, running already or of this machine alone, and the workers that its machines have resources for.

Nothing is reported to Ray's makers.
"""

import importlib
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from edgespec.errors import EdgespecError

LOCAL, AUTO = "local", "auto"
ANSWER_S = 10.0  # to wait for a cluster's address
OBJECT_STORE_BYTES = 128 << 20  # of a local cluster: rows and records are small
NAMES = {"cpu": "CPU", "gpu": "GPU"}  # as they are given -> Ray's own
EXAMPLE = "Write names and amounts, such as cpu=4,gpu=1."
Amounts = Mapping[str, float]  # by Ray's names


def import_ray() -> Any:
    """Return the module, set to report nothing; raises EdgespecError where it is not installed."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        what = f"Ray is not installed here ({error})."
        raise EdgespecError("E_RAY", what, "Install it: pip install 'edgespec[ray]'.") from error


@contextmanager
def connected(address: str, *, num_workers: int | None) -> Iterator[Any]:
    """Within this block Ray is connected to the cluster; yields the module. Raises EdgespecError.

    `local` starts one on this machine, with a place for each worker, which ends with the block.
    """
    ray = import_ray()
    if address not in (LOCAL, AUTO):
        _require_answer(address)
    own: dict[str, Any] = {}
    if address == LOCAL:
        num_cpus = max(num_workers or 1, os.cpu_count() or 1)
        own = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **own)
    except Exception as error:  # a ConnectionError, a RuntimeError or a ValueError, as it went
        raise _unreachable(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def machines(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each machine that is there."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


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
    """Return what a worker has by default: a GPU where the cluster has any, else a processor."""
    return {"GPU": 1.0} if any(node.get("GPU") for node in nodes) else {"CPU": 1.0}


def default_workers(nodes: Sequence[Amounts], each: Amounts) -> int:
    """Return the default number of workers: one a GPU, else one a machine that can hold one."""
    if each.get("GPU"):
        return max(1, _places(nodes, each))
    return max(1, sum(_places([node], each) > 0 for node in nodes))


def check_places(nodes: Sequence[Amounts], each: Amounts, num_workers: int) -> None:
    """Raise EdgespecError where the machines cannot hold this number of workers."""
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


def _require_answer(address: str) -> None:
    """Raise EdgespecError where no program listens at an address: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise EdgespecError("E_CLUSTER", f"'{address}' is no address of a cluster.", "Write it as HOST:PORT.")
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> EdgespecError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    if address == LOCAL:
        return EdgespecError("E_CLUSTER", f"Ray did not start on this machine ({reason}).", "See Ray's logs.")
    where = "of this machine" if address == AUTO else f"at '{address}'"
    fix = "Start one: ray start --head, and give its HOST:PORT; or give local, for this machine alone."
    return EdgespecError("E_CLUSTER", f"no Ray cluster {where} answers ({reason}).", fix)
