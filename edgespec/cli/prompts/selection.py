"""Which rows of a prompt file are run, and how often."""

import difflib
from dataclasses import dataclass, replace

from edgespec.cli.prompts.read import check_unique
from edgespec.cli.prompts.rows import PromptRow
from edgespec.config import require
from edgespec.errors import EdgespecError

MAX_NAMED = 8  # ids or categories in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Which rows to run: those of some ids or categories, less those skipped, each `repeat` times."""

    only: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    start: int = 0
    limit: int | None = None
    repeat: int = 1

    def __post_init__(self) -> None:
        require(self.start >= 0, f"--start {self.start} is negative.", "0 is the first row.")
        require(self.limit is None or self.limit >= 1, f"--limit {self.limit} leaves nothing.", "Use 1 or more.")
        require(self.repeat >= 1, f"--repeat {self.repeat} leaves nothing.", "Use 1 or more.")


def select(rows: list[PromptRow], selection: RowSelection) -> list[PromptRow]:
    """Return the selected rows in the file's order; raises EdgespecError for an id or category that no row has."""
    found = rows
    if selection.only:
        _require_known(selection.only, [row.id for row in rows], "--only", "id")
        found = [row for row in found if row.id in set(selection.only)]
    if selection.categories:
        _require_known(selection.categories, [category_of(row) for row in rows], "--category", "category")
        found = [row for row in found if category_of(row) in set(selection.categories)]
    end = None if selection.limit is None else selection.start + selection.limit
    found = found[selection.start : end]
    if not found:
        raise EdgespecError(
            "E_PROMPT_EMPTY", f"of {len(rows)} rows none is left.", "Check --start, --only and --category."
        )
    return found


def repeated(rows: list[PromptRow], times: int) -> list[PromptRow]:
    """Repeat the list of rows; from the second time on, ids end with the number of the repeat."""
    found = [
        row if repeat == 0 else replace(row, id=f"{row.id}#{repeat + 1}", repeat=repeat)
        for repeat in range(times)
        for row in rows
    ]
    check_unique(found)
    return found


def category_of(row: PromptRow) -> str:
    """Return the name of the row's category; empty where the row has none."""
    return "" if row.category is None else str(row.category)


def _require_known(chosen: tuple[str, ...], known: list[str], flag: str, what: str) -> None:
    names = list(dict.fromkeys(name for name in known if name))
    for name in chosen:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=3) or names[:MAX_NAMED]
        more = "" if len(names) <= len(close) else f" and {len(names) - len(close)} more"
        listed = f"There are: {', '.join(close)}{more}." if close else f"No row has a {what}."
        raise EdgespecError("E_SETTING", f"{flag}: no row has {what} '{name}'.", listed)
