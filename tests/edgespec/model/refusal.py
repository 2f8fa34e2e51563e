"""The self-check on a planted fault: it passes without, and refuses the model with it."""

from collections.abc import Callable

import pytest
from transformers import PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.model.self_check import _failure, check_tree_reading
from tests.offload.streaming import CPU


def check_refuses(
    config_of: Callable[[], PretrainedConfig],
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The self-check finds trees read wrongly once the fault is planted, and not before."""
    _failure.cache_clear()
    check_tree_reading(config_of(), device=CPU)
    _failure.cache_clear()
    fault(monkeypatch)
    with pytest.raises(EdgespecError, match="read token trees correctly"):
        check_tree_reading(config_of(), device=CPU)
    _failure.cache_clear()
