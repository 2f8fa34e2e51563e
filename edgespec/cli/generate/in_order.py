"""Records in the prompts' order: one that is ready early waits for those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgespec.cli.generate.sinks import OutputFile, Sink


class InOrder:
    """Writes records to a sink in the order of their prompts.

    Those that wait lie in a file of their own meanwhile, so that a run that is killed loses none of them.
    """

    def __init__(
        self, sink: Sink, waiting: OutputFile | None, order: Sequence[str], held: Mapping[str, str] | None = None
    ) -> None:
        """Begin with records that are `held` in the file of those that wait; `order` has their ids, too."""
        self._sink, self._waiting, self._order = sink, waiting, order
        self._held = dict(held or {})
        self._next = 0

    def begin(self) -> None:
        """Drop what is to be overwritten."""
        if self._waiting is not None:
            self._waiting.begin()

    def told(self) -> str:
        """Return what a run that is stopped says of the records that wait; nothing where there are none."""
        if not self._held:
            return ""
        waiting = f", {len(self._held)} more wait for those before them"
        return (
            f"{waiting}, in '{self._waiting.path}'" if self._waiting else f"{waiting} and are lost: -o FILE keeps them"
        )

    def write(self, name: str, text: str) -> int:
        """Take a prompt's record, and write all whose turn has come; return how many."""
        if self._waiting is not None and text and name != self._order[self._next]:
            self._waiting.write(text)
        self._held[name] = text
        before = self._next
        while self._next < len(self._order) and self._order[self._next] in self._held:
            self._sink.write(self._held[self._order[self._next]])
            del self._held[self._order[self._next]]
            self._next += 1
        if self._waiting is not None and self._next == len(self._order):
            self._waiting.clear()
        return self._next - before
