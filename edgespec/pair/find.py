"""A pair is found by its names, as a program gives them: folders, names of the configuration, or of the local cache.

A name of the configuration stands for target and draft, with their revisions; the other settings of its table are
the command line's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.hub.names import alias_in, is_there, local_path, resolve_model
from edgespec.hub.user_config import read_pairs
from edgespec.user_paths import config_files
from edgespec.validation import checked, shown


def find_pair(
    target: str | Path | None,
    draft: str | Path | None,
    revision: str | None = None,
    draft_revision: str | None = None,
    *,
    online: bool = False,
) -> tuple[Path | None, Path | None]:
    """Return the folders of target and draft; raises EdgespecError where a name means nothing.

    None stands for the built-in pair's folder.
    """
    revision = checked("revision", revision, str | None)
    draft_revision = checked("draft_revision", draft_revision, str | None)
    names = [_as_name(name) for name in (target, draft) if name is not None]
    # The configuration is nobody's business where folders are named.
    pairs = {} if all(is_there(local_path(name)) for name in names) else _configured_pairs()
    aliases = {name: pair["model"] for name, pair in pairs.items()}
    if target is not None and not is_there(local_path(_as_name(target))):
        named = pairs.get(alias_in(_as_name(target), pairs) or "", {})
        revision = revision or named.get("revision")
        if draft is None:
            draft, draft_revision = named.get("draft_model"), draft_revision or named.get("draft_revision")

    def folder(name: str | Path | None, revision: str | None, role: str) -> Path | None:
        if name is None:
            if revision is not None:
                raise EdgespecError("E_SETTING", f"revision '{revision}' is of no {role}.", f"Name the {role}.")
            return None
        return resolve_model(_as_name(name), revision=revision, aliases=aliases, online=online)

    return folder(target, revision, "target"), folder(draft, draft_revision, "draft")


def _as_name(name: str | Path) -> str:
    if not isinstance(name, str | Path):
        raise EdgespecError("E_MODEL_NOT_FOUND", f"{shown(name)} is no model.", "Give a folder or a name.")
    # A path has backslashes on Windows, where names have none.
    return name.as_posix() if isinstance(name, Path) else name


def _configured_pairs() -> Mapping[str, Mapping[str, str]]:
    """Return all names for pairs; where two files have the same name, the first file counts."""
    found: dict[str, Mapping[str, str]] = {}
    for path in reversed(config_files()):
        found |= read_pairs(path)
    return found
