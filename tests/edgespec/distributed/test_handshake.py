"""Workers that would write other texts are refused by name, before they read a weight."""

from dataclasses import replace

import pytest

from edgespec.distributed.worker import WorkerInfo, check_joining, shared_settings
from edgespec.errors import EdgespecError

HELLO = WorkerInfo(
    settings={"target": "t 1a2b", "dtype": "bfloat16", "tree.draw": "sampled", "tree.size": 16},
    versions={"edgespec": "0.1.0", "torch": "2.13.0"},
    num_texts=4,
    shared={},
)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replace(HELLO, settings={**HELLO.settings, "target": "t ffff"}), "target t ffff, not target t 1a2b"),
        (replace(HELLO, settings={**HELLO.settings, "dtype": "float32"}), "dtype float32, not dtype bfloat16"),
        (replace(HELLO, versions={"edgespec": "0.2.0", "torch": "2.13.0"}), "edgespec 0.2.0, not edgespec 0.1.0"),
        (replace(HELLO, settings={**HELLO.settings, "seed": 3}), "seed 3, not seed none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_models_settings_and_versions_are_refused(other: WorkerInfo, told: str) -> None:
    with pytest.raises(EdgespecError, match=told) as caught:
        shared_settings({"worker 1 on a": HELLO, "worker 2 on b": other})
    assert caught.value.what.startswith("worker 2 on b would not write what worker 1 on a writes")
    with pytest.raises(EdgespecError, match=told):
        check_joining("worker 9", other, "worker 1", HELLO)


def test_where_texts_depend_on_trees_those_must_agree() -> None:
    """Where none does, trees are no settings: each machine may have those that pay there."""
    other = replace(HELLO, settings={**HELLO.settings, "tree.size": 64})
    with pytest.raises(EdgespecError, match=r"tree\.size 64, not tree\.size 16"):
        shared_settings({"a": HELLO, "b": other})
    assert shared_settings({"a": HELLO, "b": HELLO}) == HELLO.settings
    check_joining("c", HELLO, "a", HELLO)
