"""Write the table of a request's fields into docs/serve.md, from the table that requests are read by.

    python -m scripts.make.request_fields            write it
    python -m scripts.make.request_fields --check    exit with 1 where the page has another table

A test does the latter, so that fields and page cannot part.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.serve.field_table import FIELDS, PROTOCOLS, RequestField
from scripts.make.page_part import write_or_compare

PATH = Path(__file__).parents[2] / "docs" / "serve.md"
BEGIN, END = "<!-- fields of requests: scripts/make/request_fields.py -->\n", "<!-- end of fields -->\n"
TITLES = {"done": "Done", "unused": "Taken without effect, and named", "refused": "Refused by name"}
SHORT = dict(zip(PROTOCOLS, ("chat", "completions", "responses", "messages"), strict=True))


def field_table() -> str:
    """The three tables: what is done, what has no effect, what is refused."""
    parts = []
    for use, title in TITLES.items():
        rows: dict[tuple[Any, ...], list[RequestField]] = {}
        for field in FIELDS:
            if field.use == use and field.other_name_of is None:
                rows.setdefault((field.means, tuple(field.protocols), repr(field.nothing)), []).append(field)
        head = [f"| {title.lower()} | in | |", "| --- | --- | --- |"]
        parts.append("\n".join([*head, *(_row(fields) for fields in rows.values()), ""]))
    return "\n".join(parts)


def page_with_table(page: str) -> str:
    """The page with the tables between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{field_table()}\n{END}{after}"


def _row(fields: Sequence[RequestField]) -> str:
    first = fields[0]
    names = ", ".join(f"`{field.name}`" + _also(field) for field in fields)
    protocols = "all" if len(first.protocols) == len(PROTOCOLS) else ", ".join(SHORT[name] for name in first.protocols)
    asks_nothing = ", ".join(json.dumps(value) for value in first.nothing)
    nothing = f"; {asks_nothing} ask{'s' if len(first.nothing) == 1 else ''} for nothing" if asks_nothing else ""
    is_said = "is none" in first.means or first.use == "done"
    return f"| {names} | {protocols} | {first.means}{'' if is_said else nothing} |"


def _also(field: RequestField) -> str:
    other = [one.name for one in FIELDS if one.other_name_of == field.name and one.protocols == field.protocols]
    return f" ({', '.join(f'`{name}`' for name in other)})" if other else ""


def main() -> int:
    """Write, or compare."""
    return write_or_compare(PATH, page_with_table, module="scripts.make.request_fields", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
