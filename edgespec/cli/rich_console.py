"""rich's console, in which texts are visible and its own sequences remain."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from edgespec.cli.standard_streams import visible


class VisibleConsole(Console):
    """Draws bars and tables; whatever texts are in them, a terminal does not obey them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the pieces of what is drawn, with their texts made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
