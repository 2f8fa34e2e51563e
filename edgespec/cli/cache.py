"""`edgespec cache`: what edgespec has written that can be made again, with sizes; and its removal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.console import counted
from edgespec.errors import EdgespecError
from edgespec.user_paths import recent_folder

if TYPE_CHECKING:
    from edgespec.doctor.kept_files import KeptFile


@click.group(
    name="cache",
    short_help="List or remove what edgespec keeps here and can make again.",
    epilog="""\b
Examples:
  edgespec cache list
  edgespec cache clear quantized           asks before it removes
  edgespec cache clear nf4-0f3a2b --yes    one of the names of the list
  edgespec cache clear drafts              what runs have learned of all drafts

Files of --prompt-cache that were used here are listed by their paths, wherever they lie.
Models and saved chats are yours, and are no part of it; `list` says where the last chats lie.
""",
)
def command() -> None:
    """What can be made again: quantised copies, tokenizers, kernels, profiles, speeds, drafts' yields, prompts."""


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to stdout.")
def list_command(*, as_json: bool) -> int:
    """List what there is, with sizes."""
    from edgespec.doctor.checks import describe_size
    from edgespec.doctor.kept_files import kept_files

    found = list(kept_files())
    if as_json:
        entries = [
            {"kind": file.kind, "name": file.name, "path": str(file.path), "bytes": file.num_bytes,
             "changed": file.changed, "model": file.model, "used": file.used}
            for file in found
        ]  # fmt: skip
        sys.stdout.write(json.dumps({"kept": entries, "chats": str(recent_folder())}) + "\n")
        return 0
    for file in found:
        line = f"{file.kind:<10} {describe_size(file.num_bytes):>10}  {file.changed}  {file.name}"
        if file.used is not None:
            line += f" (of {file.model}, last used {file.used})"
        sys.stdout.write(line + "\n")
    total = describe_size(sum(file.num_bytes for file in found))
    sys.stdout.write(f"together {total}\n" if found else "nothing is kept\n")
    if num_chats := len(list(recent_folder().glob("*.json"))):
        sys.stdout.write(
            f"the last {counted(num_chats, 'chat')}, which are yours, and no part of this: {recent_folder()}\n"
        )
    return 0


@command.command(name="clear")
@click.argument("names", nargs=-1)
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear_command(*, names: tuple[str, ...], yes: bool) -> int:
    """Remove NAMES: of the list, or quantized, tokenizers, kernels, profiles, speeds, drafts, prompts.

    Without NAMES all.
    """
    from edgespec.doctor.checks import describe_size
    from edgespec.doctor.kept_files import kept_files, remove

    chosen = _chosen(list(kept_files()), names)
    if not chosen:
        sys.stdout.write("nothing is kept\n")
        return 0
    size = describe_size(sum(file.num_bytes for file in chosen))
    for file in chosen:
        sys.stdout.write(f"{file.kind}: {file.path}\n")
    if any(file.kind == "prompts" for file in chosen):
        sys.stdout.write("prompt caches lie where --prompt-cache put them, outside of edgespec's own folders\n")
    if not yes and not _agrees(f"remove {len(chosen)} of these, {size}?"):
        sys.stdout.write("nothing is removed\n")
        return 0
    for file in chosen:
        try:
            if not remove(file):
                sys.stderr.write(f"'{file.path}' is being written, and stays\n")
        except OSError as error:
            raise EdgespecError(
                "E_OUTPUT", f"'{file.path}' cannot be removed ({error.strerror}).", "Remove it by hand."
            ) from error
    sys.stdout.write(f"removed: {size}\n")
    return 0


def _chosen(found: Sequence[KeptFile], names: Sequence[str]) -> list[KeptFile]:
    """Return what the names mean, each a kind or one of the list; raises click.UsageError for another."""
    from edgespec.doctor.kept_files import KINDS

    for name in names:
        if name not in KINDS and not any(_is_named(file, name) for file in found):
            own = " It is a file of your own, to be removed by hand." if Path(name).exists() else ""
            raise click.UsageError(f"'{name}' is neither in the list nor a kind ({', '.join(KINDS)}).{own}")
    return [file for file in found if not names or file.kind in names or any(_is_named(file, name) for name in names)]


def _is_named(file: KeptFile, name: str) -> bool:
    return file.path.resolve() == Path(name).resolve() if file.kind == "prompts" else file.name == name


def _agrees(question: str) -> bool:
    """Ask on the terminal; raises click.UsageError where there is none."""
    if not sys.stdin.isatty():
        raise click.UsageError("This removes files: without a terminal to ask on, give --yes.")
    return click.confirm(question, default=False)
