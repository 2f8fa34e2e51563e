"""Options as fields of records: each is declared once, and a command is given the record, checked and typed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

import click

FOLDER = click.Path(path_type=Path)
Command = Callable[..., Any]
Made = Callable[[Any], Any]  # what a command is given of a record
_DECLARED, _GROUP = "declared", "group"


def option(*names: str, **settings: Any) -> Any:
    """Declare a field of a record as an option; the field's name is the parameter's."""
    return field(metadata={_DECLARED: lambda name: click.option(*names, name, **settings)})


def argument(**settings: Any) -> Any:
    """Declare a field of a record as an argument."""
    return field(metadata={_DECLARED: lambda name: click.argument(name, **settings)})


def group(record: type, made: Made | None = None) -> Any:
    """Declare a field that holds a record of options itself, or the object that `made` returns for that."""
    return field(metadata={_GROUP: (record, made)})


def options_of(record: type, *, handed_on_as: str, made: Made | None = None) -> Callable[[Command], Command]:
    """Add the options of a record's fields to a command, which gets the record, or what `made` returns for it."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            handed_on = _filled(record, made, values)
            return function(**{handed_on_as: handed_on}, **values)

        decorated: Command = call
        for declare in reversed(list(_declared(record))):
            decorated = declare(decorated)
        return decorated

    return decorate


def option_names(record: Any) -> tuple[str, ...]:
    """Return the names of a record's options, in the order of its fields."""
    return tuple(one.name for one in dataclasses.fields(record) if _DECLARED in one.metadata)


def settle(record: Any, **values: Any) -> None:
    """Set fields of a frozen record while it is made: what its options mean together."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def _declared(record: Any) -> Iterator[Callable[[Command], Command]]:
    """Yield what adds each option of a record to a command, in the order of its fields."""
    for one in dataclasses.fields(record):
        if _GROUP in one.metadata:
            yield from _declared(one.metadata[_GROUP][0])
        elif _DECLARED in one.metadata:
            yield one.metadata[_DECLARED](one.name)


def _filled(record: Any, made: Made | None, values: dict[str, Any]) -> Any:
    """Return a record of the values of its options, which are taken out of `values`."""
    found = {}
    for one in dataclasses.fields(record):
        if _GROUP in one.metadata:
            below, made_below = one.metadata[_GROUP]
            found[one.name] = _filled(below, made_below, values)
        elif _DECLARED in one.metadata:
            found[one.name] = values.pop(one.name)
    filled = record(**found)
    return filled if made is None else made(filled)
