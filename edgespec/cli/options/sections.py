"""Help in sections: first what most people need, last what few do."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from edgespec.cli.options.console import VerboseConsoleOptions
from edgespec.cli.options.distribution import DrawingOptions
from edgespec.cli.options.machine import MachineOptions
from edgespec.cli.options.model import AdaptedPairNames
from edgespec.cli.options.record import option_names
from edgespec.cli.options.tree import ProfileTreeFlags

FIRST = "Options"
LAST = {  # by the records that declare the options
    "Sampling": (*option_names(DrawingOptions), "json_schema", "compact_json", "grammar"),
    "Models": option_names(AdaptedPairNames),
    "Memory, device and formats": (*option_names(MachineOptions), "parallel", "prompt_cache"),
    "Messages": option_names(VerboseConsoleOptions),
    "Advanced (policies and shapes of trees)": (
        *option_names(ProfileTreeFlags),
        "corpus",
        "no_self_check",
        "draft_check",
    ),
}


class SectionedCommand(click.Command):
    """A command whose options stand in sections, each in the first one that names its parameter.

    An option that no section names stands where the one that is declared before it does, but not among the first.
    """

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], examples: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.sections, self.examples = sections, examples

    def section_of(self, option: click.Option) -> str:
        """Return the title of the section that an option stands in."""
        before = reversed(self.params[: self.params.index(option) + 1]) if option in self.params else [option]
        titles = [(other, title) for other in before for title, names in self.sections.items() if other.name in names]
        return next((title for other, title in titles if other is option or title != FIRST), FIRST)

    def format_help_text(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and its examples before all options."""
        super().format_help_text(context, formatter)
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in self.examples.splitlines()))

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options with one long spelling each, and the other spellings below them."""
        options = [option for option in self.get_params(context) if isinstance(option, click.Option)]
        for title, names in self.sections.items():
            shown = [option for option in options if self.section_of(option) == title]
            places = {name: place for place, name in enumerate(names)}
            shown.sort(key=lambda option: places.get(str(option.name), len(places)))
            rows = [(_spelled(option, context), record[1]) for option in shown
                    if (record := option.get_help_record(context)) is not None]  # fmt: skip
            with formatter.section(title):
                formatter.write_dl(rows)
        others = [(long[0], ", ".join(long[1:])) for long in map(_long, options) if len(long) > 1]
        if others:
            with formatter.section("Other spellings"):
                formatter.write_dl(others)


def _long(option: click.Option) -> list[str]:
    return [name for name in option.opts if name.startswith("--")]


def _spelled(option: click.Option, context: click.Context) -> str:
    """Return an option's short names, its first long one, that of its opposite, and what it takes."""
    long = _long(option)
    names = ", ".join([*(name for name in option.opts if name not in long), *long[:1]])
    opposite = f" / {option.secondary_opts[0]}" if option.secondary_opts else ""
    return names + opposite if option.is_flag else f"{names} {option.make_metavar(context)}"
