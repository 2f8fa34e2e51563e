"""Free memory is the machine's, and no more than the process's control groups leave."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgespec.machine.host_memory import address_limit_bytes, free_addresses_bytes, free_host_bytes

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
MIB = 1 << 20
NO_LIMIT = 9223372036854771712  # as version 1 says it


def group(version: int, place: str, limit: object, used: int, *, file_pages: int = 0) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    total = "total_" if version == 1 else ""
    half = file_pages // 2
    return {
        f"{place}/{names[0]}": f"{limit}\n",
        f"{place}/{names[1]}": f"{used}\n",
        f"{place}/memory.stat": f"anon 5\n{total}active_file {half}\n{total}inactive_file {half}\n",
    }


OWN = {2: {"proc/self/cgroup": "0::/a/b\n"}, 1: {"proc/self/cgroup": "7:cpu:/x\n4:memory:/a/b\n0::/\n"}}


@pytest.mark.parametrize(
    ("files", "free_mib"),
    [
        ({}, 1000),
        (OWN[2], 1000),
        (OWN[2] | group(2, f"{V2}/a/b", 300 * MIB, 100 * MIB), 200),
        (OWN[2] | group(2, f"{V2}/a/b", 300 * MIB, 290 * MIB, file_pages=90 * MIB), 100),
        (OWN[2] | group(2, f"{V2}/a/b", "max", 100 * MIB), 1000),
        (OWN[2] | group(2, f"{V2}/a/b", 300 * MIB, 100 * MIB) | group(2, f"{V2}/a", 400 * MIB, 350 * MIB), 50),
        (OWN[2] | group(2, f"{V2}/a/b", 300 * MIB, 301 * MIB), 0),
        (OWN[2] | {f"{V2}/a/b/memory.max": "300"}, 1000),
        (OWN[1] | group(1, f"{V1}/a/b", 300 * MIB, 290 * MIB, file_pages=90 * MIB), 100),
        (OWN[1] | group(1, f"{V1}/a/b", NO_LIMIT, 290 * MIB), 1000),
        (OWN[1] | group(1, V1, 600 * MIB, 290 * MIB), 310),  # a container that is shown its path on the host
        (OWN[2] | group(2, f"{V2}/a/b", 5000 * MIB, 100 * MIB), 1000),
    ],
)
def test_control_groups_of_both_versions_limit_what_is_free(
    files: dict[str, str], free_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000 * MIB))
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_host_bytes(tmp_path) == free_mib * MIB


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
@pytest.mark.parametrize(("limit_mib", "free_mib"), [(3000, 2000), (500, 0), (None, None)])
def test_a_limit_of_addresses_leaves_what_is_not_taken(
    limit_mib: int | None, free_mib: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    soft = resource.RLIM_INFINITY if limit_mib is None else limit_mib * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, soft))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(vms=1000 * MIB)))
    assert free_addresses_bytes() == (None if free_mib is None else free_mib * MIB)
    assert address_limit_bytes() == (None if limit_mib is None else limit_mib * MIB)
