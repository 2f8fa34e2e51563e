"""How many passes of a draft a tree takes: one a layer, or one in which all of it is guessed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCalls:
    """The passes of a draft; whoever reckons what a tree costs looks here."""

    num_places: int | None = None  # behind the text, that one pass guesses; None: a pass guesses one layer of a tree
    num_rows: int | None = None  # of a text in that pass; None: the nodes of the layer

    @property
    def deepest(self) -> int | None:
        """The most layers of a tree; None: any number."""
        return self.num_places

    def layers(self, layers: float) -> float:
        """Return how many of so many layers a tree has."""
        return layers if self.num_places is None else min(layers, self.num_places)

    def of(self, layers: float) -> float:
        """Return the passes of a tree of so many layers."""
        return layers if self.num_places is None else min(layers, 1)


BY_LAYER = DraftCalls()
