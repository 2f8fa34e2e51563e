"""`edgespec models --drafts TARGET`: what may draft for one target, of what is here and of what is published."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.console import Console
from edgespec.cli.ctrl_c import importing
from edgespec.cli.spelling import spelled
from edgespec.cli.standard_streams import visible
from edgespec.errors import EdgespecError
from edgespec.hub.gguf_models import size
from edgespec.hub.published_drafts import PublishedName, published_for

if TYPE_CHECKING:
    from edgespec.pair.at_hand import FoundDraft

LOOKING_S = 60.0  # the user asked for it


def list_drafts(console: Console, target: str, folders: Sequence[Path], *, as_json: bool) -> int:
    """List the drafts of a target; of one that is not here what others have published for it, by its name."""
    with importing(console):
        from edgespec.pair.at_hand import drafts_at_hand, names_of
        from edgespec.pair.drafts import check_is_target
        from edgespec.pair.find import find_pair
        from edgespec.pair.folder import open_architecture
    found: tuple[FoundDraft, ...] = ()
    names = [target]
    try:
        path, _ = find_pair(target, None)
    except EdgespecError as error:
        if error.code != "E_MODEL_NOT_FOUND" or not published_for(names):
            raise
        console.say(f"{spelled(error.what)} What is published for it is known by its name.")
    else:
        assert path is not None
        check_is_target(path)
        names += names_of(path)
        with console.status(f"looking for drafts of {path.name}"):
            found = drafts_at_hand(open_architecture(path), folders=folders, limit_s=LOOKING_S)
    known = {_name_of(one) for one in found} | {one.kind for one in found if one.fits and one.kind == "mtp"}
    published = [one for one in published_for(names) if not known & {one.name.lower(), one.kind}]
    if as_json:
        sys.stdout.write(json.dumps(_facts(target, found, published)) + "\n")
    else:
        sys.stdout.write("".join(f"{visible(line)}\n" for line in _lines(found, published)))
        if not found and not published:
            console.say("no other model is here, and none is known to be published: edgespec train head makes a draft")
    return 0


def _name_of(draft: FoundDraft) -> str:
    """Return a draft's name as the hub has it, without a file's type."""
    return draft.name.partition(":")[0].partition(" ")[0].lower()


def _lines(found: Sequence[FoundDraft], published: Sequence[PublishedName]) -> list[str]:
    """Return the lines for people: what fits, what does not, and what is published and not here."""
    from edgespec.pair.at_hand import those_that_fit

    return [
        *(
            f"{spelled(one.name)}: {one.in_words}, {size(one.num_bytes)}"
            + (", which drafts without being named where it pays" if one.is_default else "")
            for one in those_that_fit(found)
        ),
        *(f"    not {spelled(one.name)}: {spelled(one.why_not)}" for one in found if one.why_not is not None),
        *(f"published for {one.target}: {one.name}, {one.in_words} ({one.source})" for one in published),
    ]


def _facts(target: str, found: Sequence[FoundDraft], published: Sequence[PublishedName]) -> dict[str, Any]:
    return {
        "target": target,
        "drafts": [
            {
                "name": spelled(one.name),
                "path": str(one.path),
                "kind": one.kind,
                "bytes": one.num_bytes,
                "fits": one.fits,
                "why_not": one.why_not and spelled(one.why_not),
                "is_beside": one.is_beside,
                "is_default": one.is_default,
            }
            for one in found
        ],
        "published": [
            {"target": one.target, "kind": one.kind, "name": one.name, "source": one.source} for one in published
        ],
    }
