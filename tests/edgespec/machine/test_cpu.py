"""The cores that a process may keep busy: physical ones, within affinity and quota; what the user chose counts."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgespec.errors import EdgespecError
from edgespec.machine import cpu
from edgespec.machine.cpu import Cpu, check_threads, chosen_by, processor_share, read_cpu, threads_in_words

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu,cpuacct"


def machine(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    files: dict[str, str],
    *,
    processors: int = 8,
    affinity: list[int] | None = None,
) -> Cpu:
    """What is read on a machine with these files; without topology files two processors are one core."""
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setattr(os, "process_cpu_count", lambda: processors, raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: processors if logical else processors // 2)
    process = SimpleNamespace(cpu_affinity=lambda: affinity or list(range(processors)))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_cpu(root)


def siblings(*groups: str) -> dict[str, str]:
    """The topology's files: `groups` say which processors share a core, in the order of their numbers."""
    return {cpu.TOPOLOGY.format(number): f"{group}\n" for number, group in enumerate(groups)}


def test_two_threads_of_a_core_count_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")
    assert machine(monkeypatch, tmp_path, files).usable == 4


@pytest.mark.parametrize(("affinity", "usable"), [([0, 4], 1), ([0, 1], 2), ([0, 1, 5, 7], 3)])
def test_the_affinitys_cores_are_counted_by_whose_siblings_they_are(
    affinity: list[int], usable: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = siblings("0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7")
    found = machine(monkeypatch, tmp_path, files, affinity=affinity)
    assert (found.usable, found.allowed) == (usable, tuple(affinity))


def test_without_topology_the_machines_cores_count_within_the_affinity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert machine(monkeypatch, tmp_path, {}).usable == 4
    assert machine(monkeypatch, tmp_path, {}, affinity=[2, 3, 6]).usable == 3


def test_a_system_without_affinity_has_all_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(psutil, "Process", SimpleNamespace)
    assert read_cpu(tmp_path).allowed == tuple(range(8))


@pytest.mark.parametrize(
    ("files", "quota", "usable"),
    [
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "250000 100000\n"}, 2.5, 2),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "50000 100000\n"}, 0.5, 1),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, None, 4),
        # the least of the process's own group and those above it
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/cpu.max": "300000 100000", f"{V2}/a/b/cpu.max": "max 1"}, 3.0, 3),
        ({"proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "300000 100000", f"{V2}/cpu.max": "200000 100000"}, 2.0, 2),
        # a container that is shown the path on its host
        (
            {
                "proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n",
                f"{V1}/cpu.cfs_quota_us": "150000\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            1.5,
            1,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/group\n",
                "sys/fs/cgroup/cpu/group/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/group/cpu.cfs_period_us": "100000\n",
            },
            None,
            4,
        ),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "nonsense"}, None, 4),
        ({}, None, 4),
    ],
)
def test_the_cgroups_quota_is_a_limit_in_both_versions(
    files: dict[str, str], quota: float | None, usable: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = machine(monkeypatch, tmp_path, files)
    assert (found.quota, found.usable) == (quota, usable)


def test_the_users_variables_are_a_choice_and_an_empty_one_is_none() -> None:
    assert chosen_by({"OMP_NUM_THREADS": "3"}) == "OMP_NUM_THREADS"
    assert chosen_by({"MKL_NUM_THREADS": "3"}) == "MKL_NUM_THREADS"
    assert chosen_by({"OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": "passive"}) is None


def test_words_say_the_number_and_why() -> None:
    held = Cpu(machine=8, allowed=(0, 1, 2, 3), physical=4, quota=2.5)
    assert threads_in_words(held, {}) == (
        "as many as pay, at most 2 (4 cores, the affinity allows 4 of 8 processors, the cgroup's quota is 2.5)"
    )
    assert threads_in_words(held, {"OMP_NUM_THREADS": "7"}) == "as OMP_NUM_THREADS=7 says"
    assert threads_in_words(Cpu(machine=1, allowed=(0,), physical=1, quota=None), {}) == "1 (1 core)"


@pytest.mark.parametrize("threads", [0, -1, 9])
def test_a_number_that_the_machine_does_not_have_is_one_error(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with pytest.raises(EdgespecError, match=rf"`threads={threads}` is not between 1 and 8") as caught:
        check_threads(threads)
    assert caught.value.code == "E_SETTING"
    assert [check_threads(given) for given in (None, 1, 8)] == [None, 1, 8]


SAYS = (
    "import os, sys; before = dict(os.environ); import edgespec, edgespec.cli\n"
    "assert not {'torch', 'psutil'} & set(sys.modules)\n"
    "import edgespec.engine\n"
    "changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}\n"
    "assert not [name for name in changed if name.startswith(('OMP_', 'GOMP_', 'KMP_', 'MKL_'))], changed\n"
    "import torch; print(torch.get_num_threads())\n"
)


def test_what_the_user_told_openmp_is_untouched_and_importing_needs_no_torch() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    outcome = subprocess.run([sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True, check=False)
    assert (outcome.stdout, outcome.stderr) == ("1\n", "")


@pytest.mark.parametrize(("own_ms", "waited_ms", "share"), [(50, 0, 1.0), (47, 3, 1.0), (50, 150, 0.25)])
def test_what_other_programs_leave_of_a_core_is_what_the_thread_did_not_wait(
    own_ms: int, waited_ms: int, share: float, tmp_path: Path
) -> None:
    """The system takes a little by itself: that is nobody's."""
    (tmp_path / "proc/thread-self").mkdir(parents=True)
    (tmp_path / "proc/thread-self/schedstat").write_text(f"{own_ms * 10**6} {waited_ms * 10**6} 374\n")
    assert processor_share(tmp_path) == pytest.approx(share)


def test_where_nobody_counts_it_is_looked_at_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"perf_counter": iter([0.0, 0.05]), "thread_time": iter([3.0, 3.0125])}
    clock = SimpleNamespace(**{name: lambda found=found: next(found) for name, found in times.items()})
    monkeypatch.setattr(cpu, "time", clock)
    assert processor_share(tmp_path) == pytest.approx(0.25)
