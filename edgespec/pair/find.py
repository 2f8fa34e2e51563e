"""A pair is found by its names, as a program gives them: folders, names of the configuration, or of the local cache.

A name of the configuration stands for target and draft, with their revisions; the other settings of its table are
the command line's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edgespec.config import require
from edgespec.errors import EdgespecError
from edgespec.hub.names import AUTO, alias_in, is_there, local_path, resolve_drafts, resolve_model
from edgespec.hub.user_config import read_pairs
from edgespec.user_paths import config_files
from edgespec.validation import checked, shown


def find_pair(
    target: str | Path | None,
    draft: str | Path | Sequence[str | Path] | None,
    revision: str | None = None,
    draft_revision: str | None = None,
    *,
    online: bool = False,
) -> tuple[Path | None, Path | tuple[Path, ...] | None]:
    """Return the folders of target and draft; raises EdgespecError where a name means nothing.

    None stands for the built-in pair's folder. Drafts among which one is to be chosen are a tuple.
    """
    if draft is not None and not isinstance(draft, str | Path):
        several = [find_pair(target, one, revision, draft_revision, online=online) for one in draft]
        require(bool(several), "`draft=[]` names none.", "Leave it out, or use `draft=none`.")
        return several[0][0], tuple(dict.fromkeys(path for _, found in several for path in _as_tuple(found)))
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

    for name, own, role in ((target, revision, "target"), (draft, draft_revision, "draft")):
        if name is None and own is not None:
            raise EdgespecError("E_SETTING", f"revision '{own}' is of no {role}.", f"Name the {role}.")
    found = (
        None if target is None else resolve_model(_as_name(target), revision=revision, aliases=aliases, online=online)
    )
    if draft is None:
        return found, None
    drafts = resolve_drafts(_as_name(draft), revision=draft_revision, aliases=aliases, online=online)
    return found, drafts if len(drafts) > 1 or drafts == (AUTO,) else drafts[0]


def _as_tuple(found: Path | tuple[Path, ...] | None) -> tuple[Path, ...]:
    return found if isinstance(found, tuple) else () if found is None else (found,)


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
