"""The drafts of a target among which one is to be chosen: those of a list of names, or whatever is at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.hub.names import AUTO, BUILT_IN_HEAD_FOLDER, BUILT_IN_TARGET, NO_DRAFT, SELF, short_name
from edgespec.pair.folder import ModelFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """A draft that a target may have; without a model none, so that looked up text alone drafts."""

    model: ModelFolder | None
    unshared: frozenset[int] = frozenset()  # ids that are no token of both, which the draft never proposes

    @property
    def name(self) -> str:
        """What people call it."""
        return str(NO_DRAFT) if self.model is None else short_name(self.model.named)


def each_draft(names: Sequence[Path], target: ModelFolder) -> tuple[Path, ...]:
    """Return the folders, files and words of a list, each once; `auto` stands for what the target has at hand."""
    return tuple(dict.fromkeys(one for name in names for one in (_at_hand(target) if name == AUTO else (name,))))


def _at_hand(target: ModelFolder) -> Iterator[Path]:
    yield NO_DRAFT
    if target.folder == BUILT_IN_TARGET:
        yield BUILT_IN_TARGET.with_name("draft")
        yield BUILT_IN_HEAD_FOLDER
    yield next(iter(SELF))
    from edgespec.pair.at_hand import drafts_at_hand, those_that_fit  # which opens pairs

    for found in those_that_fit(drafts_at_hand(target)):
        yield found.path
