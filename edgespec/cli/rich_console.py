"""rich's console, in which texts are visible and its own sequences remain."""

import io
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from edgespec.cli.standard_streams import UNLIMITED_WIDTH, visible


class VisibleConsole(Console):
    """Draws bars and tables; a terminal does not obey the texts in them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the drawn pieces, with their texts made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def table_lines(table: Table) -> list[str]:
    """Return the lines of a table, as wide as its cells are, which hold no markup."""
    drawn = io.StringIO()
    VisibleConsole(file=drawn, width=UNLIMITED_WIDTH, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in drawn.getvalue().splitlines() if line.strip()]
