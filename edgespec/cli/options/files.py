"""The files that a command line names: where one of them is written, no other option may name the same file.

Two names may mean one file: by another path, or by a link; the file need not exist yet.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

from edgespec.cli.log_file import current_log
from edgespec.errors import EdgespecError
from edgespec.hub.gguf_models import files_of
from edgespec.hub.names import is_there
from edgespec.hub.user_config import UserConfig

WRITTEN = ("path", "prompt_cache", "slots_dir", "plot", "export", "records", "features")  # beside the log
READ = (
    "prompts", "prompts_file", "system_file", "json_schema", "grammar", "profile", "imported", "initial", "data",
    "tree_file", "classifier", "stop_model", "acceptance", "chat_template", "api_key_file", "tools", "images",
)  # fmt: skip
NO_FILES = {"-", "auto", "none"}

Named: TypeAlias = tuple[str, Path]  # what a message calls it, and where it is


def check_files(*models: Named, more: Sequence[Named] = ()) -> None:
    """Raise EdgespecError where a file that the running command writes is another that it names.

    Files of the folders of `models` are read, `more` are written, too.
    """
    context = click.get_current_context(silent=True)
    written = [*more, *_given(context, WRITTEN)]
    written += [(f"the waiting records of {name}", waiting_path(path))
                for name, path in written if name == "--output" and path.name]  # fmt: skip
    if (log := current_log()) is not None:
        written.append(("--log-file", log))
    if not written:
        return
    seen: dict[object, Named] = {}
    for name, path in (*_read(context, models), *written):
        identity = _identity(path)
        if identity is None:
            continue
        if identity in seen and (name, path) in written:
            other, its_path = seen[identity]
            also = "" if str(its_path) == str(path) else f", '{path}'"
            raise EdgespecError(
                "E_OUTPUT", f"{other} and {name} are one file: '{its_path}'{also}.", "Give each of them its own."
            )
        seen.setdefault(identity, (name, path))


def waiting_path(output: Path) -> Path:
    """Return the file of the records of an output file that wait for others before them."""
    return output.with_name(f"{output.name}.waiting")


def _read(context: click.Context | None, models: Sequence[Named]) -> Iterator[Named]:
    yield from ((name, path) for name, path in _given(context, READ) if is_there(path))
    config = (context.find_object(UserConfig) if context is not None else None) or UserConfig()
    yield from (("the configuration", file.path) for file in config.files)
    for name, folder in models:
        files = folder.iterdir() if folder.is_dir() else files_of(folder)
        yield from ((f"a file of {name}", path) for path in files)


def _given(context: click.Context | None, names: Sequence[str]) -> Iterator[Named]:
    if context is None:  # no command runs
        return
    for option in context.command.params:
        value = context.params.get(str(option.name)) if option.name in names else None
        for path in value if isinstance(value, tuple) else (value,):
            if path is not None and str(path) not in NO_FILES:
                yield _spelled(option), Path(path)


def _spelled(option: click.Parameter) -> str:
    return next((name for name in option.opts if name.startswith("--")), option.human_readable_name)


def _identity(path: Path) -> Any:
    """Return what two paths share only if they name one file or folder; None for what may be named twice: a device."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return os.path.normcase(path.resolve())
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return None
    return (found.st_dev, found.st_ino) if found.st_ino else os.path.normcase(path.resolve())
