"""Options declared as fields: a command is given records, also one within another, and what is made of them."""

from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner

from edgespec.cli import cli
from edgespec.cli.config.groups import all_commands
from edgespec.cli.options.record import argument, group, option, options_of, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: int = option("--width", type=int, default=2, help="Set the width.")
    height: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Box(Size):
    height: int = option("--height", type=int, default=3, help="Set the height.")

    def __post_init__(self) -> None:
        if self.width > self.height:
            raise click.UsageError("too wide")
        settle(self, width=self.width * 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    kilos: int = option("--kilos", type=int, default=1, help="Set the weight.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    name: str = argument(required=False)
    box: Box = group(Box)
    grams: int = group(Weight, lambda weight: weight.kilos * 1000)


def run(record: type, line: list[str], **more: Any) -> tuple[int, Any]:
    seen: list[Any] = []

    @click.command()
    @options_of(record, handed_on_as="found", **more)
    @click.option("--other")
    def command(*, found: Any, other: str | None) -> None:
        seen.extend([found, other])

    return CliRunner().invoke(command, line).exit_code, seen


def test_a_command_is_given_the_record_and_its_other_values() -> None:
    assert run(Size, ["--width", "7", "--other", "x"]) == (0, [Size(width=7), "x"])
    assert run(Box, [])[1][0].width == 20


def test_what_a_record_refuses_is_a_mistake_of_the_command_line() -> None:
    assert run(Box, ["--width", "9"]) == (2, [])


def test_what_is_made_of_a_record_is_handed_on_in_its_place() -> None:
    assert run(Size, ["--width", "4"], made=lambda size: size.width + size.height) == (0, [5, None])


def test_options_stand_in_the_order_of_their_fields_and_are_named_by_them() -> None:
    @click.command()
    @options_of(Box, handed_on_as="box")
    def command(*, box: Box) -> None:
        del box

    assert [parameter.name for parameter in command.params] == ["width", "height"]


def test_a_record_holds_others_and_what_is_made_of_them() -> None:
    code, (found, other) = run(Parcel, ["a", "--height", "5", "--kilos", "2", "--other", "x"])
    assert (code, found.name, found.box.height, found.grams, other) == (0, "a", 5, 2000, "x")


def test_commands_take_few_values() -> None:
    """Each is given records: nobody counts on the order or the number of options."""
    for name, command in all_commands(click.Context(cli, info_name="edgespec")).items():
        assert command.callback is not None
        inner: Any = command.callback
        while hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        assert inner.__code__.co_argcount + inner.__code__.co_kwonlyargcount <= 5, name
