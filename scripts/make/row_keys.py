"""Write the list of the keys of rows into docs/generate.md, from the tables that rows are read by.

    python -m scripts.make.row_keys            write it
    python -m scripts.make.row_keys --check    exit with 1 where the page has another list

A test does the latter, so that keys and page cannot part.
"""

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from edgespec.cli.prompts.row_keys import HARMLESS, NOT_APPLIED, OPENED, SETTINGS, STRUCTURED
from scripts.make.page_part import write_or_compare

WIDTH = 150  # of a line of names
PATH = Path(__file__).parents[2] / "docs" / "generate.md"
BEGIN, END = "<!-- keys of rows: scripts/make/row_keys.py -->\n", "<!-- end of keys -->\n"


def key_list() -> str:
    """The list: what sets something, what is named as not applied, what changes nothing."""
    rows = [f"| `{name}` | {_names(about.also)} | {about.means} |" for name, about in SETTINGS.items()]
    structured = ", ".join(f"`{name}` is `{key}`" for name, key in STRUCTURED.items())
    texts = [
        f"They are also read in objects under {_names(OPENED)}, and in `structured_outputs`, where {structured}.",
        "Named as not applied, unless they ask for nothing (null, what is empty, and mostly false and 0, or 1): "
        f"{_names(sorted(NOT_APPLIED))}.",
        f"Known to change nothing, and not named: {_names(sorted(HARMLESS))}.",
    ]
    paragraphs = ["\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False)) for text in texts]
    table = "\n".join(["| key | other names | is |", "| --- | --- | --- |", *rows])
    return "\n\n".join([table, *paragraphs, ""])


def page_with_list(page: str) -> str:
    """The page with the list between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{key_list()}{END}{after}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> int:
    """Write, or compare."""
    return write_or_compare(PATH, page_with_list, module="scripts.make.row_keys", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
