"""A cluster that does not answer is one error, at once; one that does is let go in the end. Ray is a stand-in here."""

import os
import socket
from typing import Any

import pytest

from edgespec.distributed import cluster
from edgespec.distributed.cluster import (
    check_places,
    connected,
    default_resources,
    default_workers,
    machines,
    parse_resources,
)
from edgespec.errors import EdgespecError


class Ray:
    """What is used of the module."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.failure: Exception | None = None
        self.is_shut_down = False

    def init(self, **options: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.options = options

    def shutdown(self) -> None:
        self.is_shut_down = True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 9.0}}]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    ray = Ray()
    monkeypatch.setattr(cluster.importlib, "import_module", lambda _name: ray)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    return ray


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "no Ray cluster at '127.0.0.1:1' answers"),
        ("nobody", "'nobody' is no address"),
        (":1", "':1' is no address"),
        ("127.0.0.1:99999", "no Ray cluster at '127.0.0.1:99999' answers"),
    ],
)
def test_an_address_where_nobody_listens_is_not_tried_for_long(address: str, said: str, ray: Ray) -> None:
    with pytest.raises(EdgespecError, match=said) as caught, connected(address, num_workers=None):
        pass
    assert caught.value.code == "E_CLUSTER"
    assert not ray.options


def test_what_ray_refuses_is_said_with_its_first_line(ray: Ray) -> None:
    ray.failure = ConnectionError("Could not find any running Ray instance.\nPlease start one.")
    with (
        pytest.raises(EdgespecError, match=r"of this machine answers \(Could not find any running Ray instance\.\)"),
        connected("auto", num_workers=None),
    ):
        pass


def test_a_cluster_is_let_go_and_told_to_report_nothing(ray: Ray) -> None:
    with connected("local", num_workers=64) as found:
        assert machines(found) == [{"CPU": 2.0}]
        assert ray.options["num_cpus"] == 64  # a place for each worker
        assert not ray.options["include_dashboard"]
        assert not ray.is_shut_down
    assert ray.is_shut_down
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with connected(address, num_workers=2):
            assert ray.options["address"] == address


PLAIN = {"CPU": 4.0, "memory": 1e9}
CARDS = {"CPU": 8.0, "GPU": 2.0}


def test_amounts_are_named_as_rays() -> None:
    assert parse_resources("cpu=4, gpu=0.5,big=1") == {"CPU": 4.0, "GPU": 0.5, "big": 1.0}


@pytest.mark.parametrize("text", ["", "cpu", "cpu=", "cpu=-1", "cpu=two", "cpu=1;gpu=1", "cpu=1,CPU=2"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(EdgespecError, match=r"`resources=.*cpu=4,gpu=1"):
        parse_resources(text)


@pytest.mark.parametrize(
    ("nodes", "each", "workers"),
    [
        ([PLAIN], {"CPU": 1.0}, 1),
        ([PLAIN, PLAIN], {"CPU": 1.0}, 2),
        ([PLAIN, CARDS], {"GPU": 1.0}, 2),
        ([CARDS, CARDS], {"GPU": 1.0}, 4),
    ],
)
def test_without_a_word_each_gpu_or_machine_has_a_worker(
    nodes: list[dict[str, float]], each: dict[str, float], workers: int
) -> None:
    assert default_resources(nodes) == each
    assert default_workers(nodes, each) == workers
    check_places(nodes, each, workers)


def test_what_no_machine_has_is_told_with_the_numbers() -> None:
    """A worker stands on one machine: two halves are none."""
    with pytest.raises(EdgespecError, match=r"`workers=2`, each with 5 CPU: the cluster has room for 0 .*in all 8 CPU"):
        check_places([PLAIN, PLAIN], {"CPU": 5.0}, 2)
    with pytest.raises(EdgespecError, match=r"`workers=3`.*room for 2 .*Use at most 2, or add machines"):
        check_places([PLAIN, PLAIN], {"CPU": 3.0}, 3)
    check_places([PLAIN], {"CPU": 0.0}, 100)
