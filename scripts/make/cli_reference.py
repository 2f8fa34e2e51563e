"""Write docs/cli.md from the commands themselves.

    python -m scripts.make.cli_reference            write it
    python -m scripts.make.cli_reference --check    exit with 1 where the file is not what would be written

A test does the latter, so that options and reference cannot part.
"""

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import click

from edgespec.cli import cli
from edgespec.cli.options.sections import FIRST, SectionedCommand
from scripts.make.page_part import write_or_compare

Record: TypeAlias = tuple[str, str]  # spellings of an option, and its help

PATH = Path(__file__).parents[2] / "docs" / "cli.md"
WIDTH = 120  # of the help texts, whatever the terminal
COLUMNS = range(16, 64, 4)  # where the help of options may begin
COMMON = "Common"
INTRODUCTION = """\
# Command line

Made by `scripts/make/cli_reference.py` from the commands' own help; do not edit.

## Models

`-m`, `-md` and TARGET take a folder, a name of the configuration (`[models.NAME]`), or the name of a model in the local
Hugging Face cache, in this order. Nothing is looked up on the network unless `--online` is given; then what the cache
lacks of the model (safetensors, configuration, tokenizer) is downloaded first. `edgespec models` lists what is here.

## Where values come from

Of several, the first counts:

1. the flag;
2. `EDGESPEC_COMMAND_KEY`, then `EDGESPEC_KEY` in the environment: `EDGESPEC_GENERATE_CTX_SIZE=8k`, `EDGESPEC_QUIET=1`;
3. the configuration named by `--config` or `EDGESPEC_CONFIG`;
4. the user's own configuration (`edgespec config path`);
5. for trees, the profile that `edgespec profile` kept of this pair on this machine;
6. for sampling, the model's `generation_config.json`;
7. what is built in.

A key is a long flag's name with underscores: `--ctx-size` is `ctx_size` in a file. Of a flag's spellings any will do.

```toml
[defaults]                  # for every command that has the flag
ctx_size = "8k"
max_gpu_mem = "10GiB"

[sampling]                  # for commands that sample
temperature = 0.7

[models.big]                # edgespec generate prompts.jsonl -m big
model = "Qwen/Qwen2.5-72B-Instruct"
draft_model = "Qwen/Qwen2.5-1.5B-Instruct"
quant = "nf4"               # settings of a name count more than [defaults]
```

A draft is taken from where its target is named: one of the configuration never meets a target of the command line. A
tree setting of the configuration that the chosen policy does not use is left out; one given as a flag is refused.
`edgespec config show --origin` prints each value and its source, `edgespec config init` writes a template. An unknown
key is an error.

`EDGESPEC_HOME` puts configuration, profiles, sessions and cache into one folder, `EDGESPEC_CACHE` the cache alone.

## Errors

An error is one `Error:` line and one `Try:` line on stderr; with `--json`, one object:
`{"error": {"code": "E_MODEL_NOT_FOUND", "message": "...", "fix": "..."}}`.
[Troubleshooting](troubleshooting.md) explains the codes.

## Completion

Commands and options complete with Tab once the shell has been told: `eval "$(edgespec completion bash)"` in `~/.bashrc`
(bash 4.4 or newer), `eval "$(edgespec completion zsh)"` in `~/.zshrc`, or `edgespec completion fish | source` in
`~/.config/fish/config.fish`.
"""


SHARED = """\
## Shared options

Several commands take these options in the same words. Each command below names the groups and options that it takes.
Every command has `-h` and `--help`, which shows all of its options.
"""


class Leaf(NamedTuple):
    """A command that runs, with its own context."""

    command: click.Command
    context: click.Context

    @property
    def options(self) -> list[click.Option]:
        """The command's options but for `--help`."""
        return [option for option in self.command.params if isinstance(option, click.Option) and not option.hidden]

    @property
    def is_told_above(self) -> bool:
        """Return whether the section of the group above says all of a command: it has one sentence, and no options."""
        is_below = self.context.parent is not None and self.context.parent.parent is not None
        return is_below and not self.options and "\n" not in (self.command.help or "").strip()

    def record(self, option: click.Option) -> Record:
        """Return an option's spellings and its help, which tell it from all others."""
        record = option.get_help_record(self.context)
        assert record is not None
        return record

    def title(self, option: click.Option) -> str | None:
        """Return the section of the help that has an option, unless it is the first."""
        title = self.command.section_of(option) if isinstance(self.command, SectionedCommand) else FIRST
        return None if title == FIRST else title


def reference() -> str:
    """The whole page."""
    context = _context(cli, "edgespec")
    groups = _groups([leaf for leaf in _walk(cli, context) if not isinstance(leaf.command, click.Group)])
    sections = [_section(leaf, groups) for leaf in _walk(cli, context) if not leaf.is_told_above]
    return "\n".join([INTRODUCTION, SHARED, *(_group(title, records) for title, records in groups.items()), *sections])


def _walk(command: click.Command, context: click.Context) -> Iterator[Leaf]:
    """A command, and those below it."""
    yield Leaf(command, context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _walk(below, _context(below, name, context))


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, **command.context_settings)


def _groups(leaves: Sequence[Leaf]) -> dict[str, list[Record]]:
    """Return the options that two commands or more have, by a title for each group.

    No group has a name twice, so that a name says which option is meant: the words of most commands are the group's.
    """
    places: dict[Record, list[tuple[Leaf, str | None]]] = {}
    for leaf in leaves:
        for option in leaf.options:
            places.setdefault(leaf.record(option), []).append((leaf, leaf.title(option)))
    groups: dict[str, list[Record]] = {COMMON: []}
    kept: set[tuple[str, str]] = set()
    for record in sorted(places, key=lambda record: -len(places[record])):
        title = _title(places[record])
        if len(places[record]) > 1 and (title, _first_long(record)) not in kept:
            kept.add((title, _first_long(record)))
            groups.setdefault(title, []).append(record)
    order = list(places)
    return {title: sorted(records, key=order.index) for title, records in groups.items() if records}


def _title(places: Sequence[tuple[Leaf, str | None]]) -> str:
    """Return the section that most helps have an option in, else the command that stands above all of them."""
    titles = Counter(title for _, title in places if title is not None)
    above = {leaf.context.parent.command_path for leaf, _ in places if leaf.context.parent is not None}
    if titles:
        return titles.most_common(1)[0][0]
    return COMMON if len(above) > 1 or above == {"edgespec"} else f"Options of {above.pop()}"


def _group(title: str, records: Sequence[Record]) -> str:
    return _page(f"### {title}", _listed(records))


def _listed(records: Sequence[Record], *, indent: int = 0) -> str:
    """Return options with their help, which begins in the column that takes the fewest lines."""
    found = []
    for column in COLUMNS:
        formatter = click.HelpFormatter(width=WIDTH)
        formatter.current_indent = indent
        formatter.write_dl(records, col_max=column)
        found.append(formatter.getvalue())
    return min(found, key=lambda text: text.count("\n"))


def _section(leaf: Leaf, groups: Mapping[str, Sequence[Record]]) -> str:
    """Return a command's help without the options that it shares, and the names of those."""
    command, context = leaf
    formatter = click.HelpFormatter(width=WIDTH)
    command.format_usage(context, formatter)
    command.format_help_text(context, formatter)
    shared = {record for records in groups.values() for record in records}
    mine: dict[str, list[Record]] = {}
    for option in leaf.options:
        if (record := leaf.record(option)) not in shared:
            mine.setdefault(leaf.title(option) or FIRST, []).append(record)
    for title, records in mine.items():
        with formatter.section(title):
            formatter.write(_listed(records, indent=formatter.current_indent))
    if isinstance(command, click.Group):
        command.format_commands(context, formatter)
    command.format_epilog(context, formatter)
    all_of_it = {leaf.record(option) for option in leaf.options}
    taken = [_taken(title, records, all_of_it) for title, records in groups.items() if all_of_it & {*records}]
    page = _page(f"{'#' * (context.command_path.count(' ') + 2)} {context.command_path}", formatter.getvalue())
    return page + (
        textwrap.fill("Shared: " + "; ".join(taken) + ".", WIDTH, break_on_hyphens=False) + "\n" if taken else ""
    )


def _taken(title: str, records: Sequence[Record], mine: set[Record]) -> str:
    """Say which options of a group a command takes, in the shorter way."""
    has = [record for record in records if record in mine]
    lacks = [record for record in records if record not in mine]
    if len(lacks) >= len(has):
        return f"of *{title}* {_names(has)}"
    return f"*{title}*" + (f" but {_names(lacks)}" if lacks else "")


def _names(records: Sequence[Record]) -> str:
    return ", ".join(f"`{_first_long(record)}`" for record in records)


def _first_long(record: Record) -> str:
    return next(word.strip(",") for word in record[0].split() if word.startswith("--"))


def _page(heading: str, text: str) -> str:
    """Return a heading and a block, in which a usage line and a title need no empty line beside them."""
    block = re.sub(r"[ \t]+\n", "\n", text.strip())
    block = re.sub(r"\n\n(?=\S| +[A-Z][a-z ]+:\n)|(?<=\n)\n(?=\n)", "\n", block)
    block = re.sub(r"\A(Usage: [^\n]*\n)\n", r"\1", block)
    return f"{heading}\n```\n{block}\n```\n"


def main() -> int:
    """Write, or compare."""
    return write_or_compare(PATH, lambda _page: reference(), module="scripts.make.cli_reference", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
