"""A cluster that does not answer is one error, at once; one that does is let go in the end. Ray is a stand-in here."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from edgespec.distributed import cluster
from edgespec.distributed.cluster import connected, machines
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
