"""What each worker asks for, and whether the machines have it."""

from __future__ import annotations

import pytest

from edgespec.distributed.resources import check_places, default_resources, default_workers, parse_resources
from edgespec.errors import EdgespecError

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
