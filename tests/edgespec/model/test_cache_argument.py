"""What a forward calls its cache, by the version of transformers and the family."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from edgespec.model.pass_cache import cache_argument


def now(hidden_states: Any, cache: Any = None) -> None: ...


def of_mamba(hidden_states: Any, cache_params: Any = None) -> None: ...


def before(hidden_states: Any, past_key_values: Any = None) -> None: ...


@functools.wraps(now)
def warned(*arguments: Any, **named: Any) -> None:
    """As transformers wraps it to take the old name, too."""


@pytest.mark.parametrize(
    ("forward", "name"), [(now, "cache"), (warned, "cache"), (of_mamba, "cache_params"), (before, "past_key_values")]
)
def test_the_cache_is_named_as_the_forward_names_it(forward: Callable[..., None], name: str) -> None:
    assert cache_argument(forward) == name
