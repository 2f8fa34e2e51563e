"""Write the table of published drafts into docs/heads.md, from the file that `edgespec models --drafts` reads.

    python -m scripts.make.published_drafts            write it
    python -m scripts.make.published_drafts --check    exit with 1 where the page has another table

A test does the latter, so that command and page cannot part.
"""

import sys
from itertools import groupby
from pathlib import Path

from edgespec.hub.published_drafts import published_drafts
from scripts.make.page_part import write_or_compare

PATH = Path(__file__).parents[2] / "docs" / "heads.md"
BEGIN, END = "<!-- published drafts: scripts/make/published_drafts.py -->\n", "<!-- end of drafts -->\n"


def draft_table() -> str:
    """A line for each target; a draft's kind leads to the page that names it."""
    lines = ["| target | drafts, and where each is named |", "| --- | --- |"]
    for target, drafts in groupby(published_drafts(), key=lambda one: one.target):
        named = [f"`{one.name}` ([{one.in_words}]({one.source}))" for one in drafts]
        lines.append(f"| {target} | {', '.join(named)} |")
    return "\n".join([*lines, ""])


def page_with_table(page: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{draft_table()}\n{END}{after}"


def main() -> int:
    """Write, or compare."""
    return write_or_compare(PATH, page_with_table, module="scripts.make.published_drafts", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
