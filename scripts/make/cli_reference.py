"""Write docs/cli.md from the commands themselves.

    python -m scripts.make.cli_reference            write it
    python -m scripts.make.cli_reference --check    exit with 1 where the file is not what would be written

A test does the latter, so that options and reference cannot part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from edgespec.cli import cli

PATH = Path(__file__).parents[2] / "docs" / "cli.md"
WIDTH = 100  # of the help texts, whatever the terminal
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
5. for trees, the plan of a profile that `edgespec profile` measured of this pair on this machine;
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


def reference() -> str:
    """The whole page."""
    context = _context(cli, "edgespec")
    sections = [_section(context, depth=2)]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        sections += _sections(command, name, context, depth=2)
    return "\n".join([INTRODUCTION, *sections])


def _sections(command: click.Command, name: str, parent: click.Context, depth: int) -> Iterator[str]:
    """A command's help, and that of the commands below it."""
    context = _context(command, name, parent)
    yield _section(context, depth)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _sections(found, below, context, depth + 1)


def _context(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH, **command.context_settings)


def _section(context: click.Context, depth: int) -> str:
    lines = [line.rstrip() for line in context.command.get_help(context).splitlines()]
    return "\n".join([f"{'#' * depth} {context.command_path}", "", "```", *lines, "```", ""])


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the file is stale")
    if parser.parse_args().check:
        is_stale = not PATH.exists() or PATH.read_text(encoding="utf-8") != reference()
        print(f"{PATH} is {'stale: run python -m scripts.make.cli_reference' if is_stale else 'up to date'}")
        return int(is_stale)
    PATH.write_text(reference(), encoding="utf-8")
    print(f"written: {PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
