"""A Ray cluster: one that is there already, or one of this machine alone. Nothing is reported to Ray's makers."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edgespec.errors import EdgespecError

LOCAL, AUTO = "local", "auto"
ANSWER_S = 10.0  # to wait for a cluster's address
OBJECT_STORE_BYTES = 128 << 20  # of a local cluster: rows and records are small


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
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
    if address == LOCAL:
        num_cpus = max(num_workers or 1, os.cpu_count() or 1)
        options |= {"address": LOCAL, "num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        options = {"address": address, "log_to_driver": False, "configure_logging": False}
    try:
        ray.init(**options)
    except Exception as error:  # a ConnectionError, a RuntimeError or a ValueError, as it went
        raise _unreachable(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def machines(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each machine that is there."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _require_answer(address: str) -> None:
    """Raise EdgespecError where nobody listens at an address: Ray itself would try for minutes."""
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
