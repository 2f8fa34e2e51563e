"""Groups of options: declared in one place, handed on to a command as one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path)

Command = Callable[..., Any]


def with_options(function: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """Decorate a function with options, which stand in the help in the order of the list."""
    for option in reversed(options):
        function = option(function)
    return function
