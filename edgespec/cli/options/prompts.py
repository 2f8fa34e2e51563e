"""The options that say which format a source of prompts has: the same in every command that reads prompts."""

from dataclasses import dataclass

import click

from edgespec.cli.options.record import option
from edgespec.cli.prompts.source import INPUT_FORMATS

FORMAT_HELP = (
    "Read prompts in this form. auto goes by the file's suffix; text whose every line is a JSON object is rows too, "
    "and files may be packed (.gz, .bz2, .xz)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """The format of a source of prompts."""

    lines: bool = option("--lines", is_flag=True, help="Read one prompt a line.")
    input_format: str = option(
        "--input-format", type=click.Choice(INPUT_FORMATS), default="auto", show_default=True, help=FORMAT_HELP
    )

    def __post_init__(self) -> None:
        if self.lines and self.input_format not in {"auto", "lines"}:
            raise click.UsageError(f"--lines is --input-format lines, and {self.input_format} was given.")

    @property
    def source_format(self) -> str:
        """One of `prompts.source.INPUT_FORMATS`."""
        return "lines" if self.lines else self.input_format

    @property
    def flag(self) -> str:
        """The flag of the format, for messages."""
        return "--lines" if self.source_format == "lines" else f"--input-format {self.source_format}"
