"""Drafts that others have published, by the names of their targets: a table in a file, and no network.

docs/heads.md has the same table. What it names may have changed since, and a draft that is here says itself what it is.
"""

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).with_suffix(".json")
OWN_PAGE = "card"  # the source of what was seen on the draft's own page
OTHER_NUMBER = re.compile(r"\.?\d")  # behind a name: GLM-5 is not GLM-5.3, nor 4B 40B
UNSAID = re.compile(r"(instruct|it|chat)$")  # ends names of targets that people leave out


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedName:
    """A draft that somebody has published."""

    target: str  # the model that it was made for
    kind: str  # as `draft_kind.Name` has it
    in_words: str  # what that is
    name: str  # on the hub
    source: str  # the address of the page that says so


@functools.cache
def published_drafts() -> tuple[PublishedName, ...]:
    """Return the table."""
    table = json.loads(PATH.read_text(encoding="utf-8"))
    return tuple(
        PublishedName(
            target=target, kind=kind, in_words=table["kinds"][kind], name=name,
            source=table["sources"][source] + (name if source == OWN_PAGE else ""),
        )
        for target, kind, name, source in table["drafts"]
    )  # fmt: skip


def published_for(names: Iterable[str]) -> list[PublishedName]:
    """Return the drafts of a model that goes by these names, whatever is behind its own in them: owner, type, file.

    Of several targets whose names begin one, the longest is meant.
    """
    found: list[tuple[int, PublishedName]] = []
    for one in published_drafts():
        key = UNSAID.sub("", _squeezed(one.target))
        for squeezed in map(_squeezed, names):
            if squeezed.startswith(key) and not OTHER_NUMBER.match(squeezed[len(key) :]):
                found.append((len(key), one))
                break
    longest = max((length for length, _ in found), default=0)
    return [one for length, one in found if length == longest]


def _squeezed(name: str) -> str:
    """Return a name without its owner and all that people write otherwise."""
    own = re.sub(r"[^a-z0-9.]", "", name.rpartition("/")[2].lower().removeprefix("ollama:"))
    return own.removeprefix("meta")
