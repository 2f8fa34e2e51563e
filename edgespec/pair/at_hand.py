"""The drafts that a target has on this machine: in its own file, beside it, and in this machine's stores.

Settings, headers and tokenizers are read, and no weight. What fits is what opening it as the draft would take.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from edgespec.draft.draft_kind import NAMES, Name, kind_of
from edgespec.errors import offload_errors
from edgespec.hub.cache import CACHED_PREFIX, repository_of
from edgespec.hub.gguf_models import named_models
from edgespec.hub.names import WORDS, short_name
from edgespec.hub.ollama import PREFIX as OLLAMA
from edgespec.hub.ollama import resolve_ollama
from edgespec.hub.places import bytes_at, places, places_beside, program_places
from edgespec.model.supported import no_tree_reason
from edgespec.model.tree_support import check_reads_trees
from edgespec.pair.drafts import open_draft, read_kind
from edgespec.pair.folder import ModelFolder, read_json
from edgespec.pair.mtp import own_draft
from edgespec.pair.pair import MAX_PADDING, never_proposed, tokens_of
from edgespec.pair.same_tokens import Tokens
from edgespec.pair.tree_support import check_may_draft
from edgespec.validation import first_line
from offload.errors import OffloadError
from offload.gguf.drafts import DRAFTS
from offload.gguf.files import is_gguf
from offload.gguf.header import TOKENS, first_settings

LOOKING_S = 2.0  # a look at a folder's settings takes milliseconds, and at its tokenizer up to a second
LARGE = "it is no smaller than the target"
SAME = "it has the target's own layers: `draft=self` is its copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDraft:
    """A draft on this machine, or a place that was looked at for one."""

    name: str  # as `draft` takes it
    path: Path  # its folder or file; the word for it where it is in the target's own
    kind: Name | None = None  # None where that could not be told, or was not asked
    num_bytes: int = 0  # of its weights
    why_not: str | None = None  # what keeps it from being the target's draft, in a sentence
    is_beside: bool = False  # it lies where the target lies
    is_default: bool = False  # it drafts where none is named, as far as it pays

    @property
    def fits(self) -> bool:
        """Whether the target takes it for a draft."""
        return self.why_not is None

    @property
    def in_words(self) -> str:
        """What it is."""
        names = {**NAMES, "model": "a smaller model of the same tokens", "head": "a feature head"}
        return "a model" if self.kind is None else names[self.kind]


def drafts_at_hand(
    target: ModelFolder,
    *,
    tokens: Tokens | None = None,
    near: Sequence[Path] = (),
    folders: Sequence[Path] = (),
    limit_s: float = LOOKING_S,
) -> tuple[FoundDraft, ...]:
    """Return what lies on this machine and may draft for a target, and what may not and why.

    Its own layer comes first, then what lies beside it and beside other paths that are `near`, in stores and in
    `folders`. `tokens` are those of its tokenizer where that is open. Whatever is wrong with a place is said of it, and
    never raised; places that are left after `limit_s` are not looked at, and say so.
    """
    ends_at, search = time.monotonic() + limit_s, _Search(target, tokens)
    found = list(search.own_layer())
    seen = {place.path.resolve() for place in found if place.path not in WORDS} | {target.folder.resolve()}
    beside = places_beside([target.folder, *near], found=named_models)
    stores = [places(folders, found=named_models), program_places(found=named_models)]
    listed = [(True, *one) for one in _listed(beside)] + [(False, *one) for each in stores for one in _listed(each)]
    for is_beside, name, place in listed:
        resolved = place.resolve()
        if resolved in seen:
            continue
        seen.add(resolved)
        if time.monotonic() > ends_at:
            why_not = f"it was not looked at within {limit_s:g} s"
            found.append(FoundDraft(name=name, path=place, why_not=why_not, is_beside=is_beside))
        else:
            found.append(search.at(name, place, is_beside=is_beside))
    return tuple(found)


def names_of(target: Path) -> list[str]:
    """Return the names that a model goes by: where it lies, and what a GGUF file says of itself."""
    found = [short_name(target), target.parent.name]
    repository = next((one for one in target.parents if one.name.startswith(CACHED_PREFIX)), None)
    found += [] if repository is None else [repository_of(repository)]
    if is_gguf(target):
        with contextlib.suppress(OffloadError):
            settings = first_settings(target)
            parts = [settings.get(f"general.{part}") for part in ("basename", "size_label", "finetune")]
            found += [str(settings.get("general.name", "")), "-".join(str(part) for part in parts if part)]
    return [name for name in found if name]


def those_that_fit(found: Iterable[FoundDraft]) -> list[FoundDraft]:
    """Return the drafts that fit: those that were made for the target before other models, and the smallest first."""
    return sorted((one for one in found if one.fits), key=lambda one: (one.kind == "model", one.num_bytes))


def _listed(found: Iterator[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    """Yield places up to the first that cannot be listed: a store that is somebody else's is none of a run's faults."""
    with contextlib.suppress(OSError):
        yield from found


class _Search:
    """Looks at places, one by one, for a target."""

    def __init__(self, target: ModelFolder, tokens: Tokens | None) -> None:
        self.target, self._given = target, tokens
        self._text = target.config.get_text_config(decoder=True)
        self._num_bytes = max(bytes_at(target.folder), target.checkpoint.num_bytes)  # a header may be all that is here

    @cached_property
    def _tokens(self) -> Tokens:
        return self._given or tokens_of(self.target.folder)

    def own_layer(self) -> Iterator[FoundDraft]:
        """Yield the target's own multi-token-prediction layer, of its file or of one beside it."""
        _, layer = own_draft(self.target)
        if layer is not None:
            yield FoundDraft(
                name=str(layer.named), path=layer.named, kind="mtp", num_bytes=layer.checkpoint.num_bytes,
                is_beside=True, is_default=True,
            )  # fmt: skip

    def at(self, name: str, place: Path, *, is_beside: bool) -> FoundDraft:
        """Return what a place holds, and why it is no draft of the target."""
        kind, num_bytes, why_not = None, 0, None
        try:
            path = place = resolve_ollama(name) if name.startswith(OLLAMA) else place
            num_bytes = bytes_at(path)
            why_not = self._at_a_glance(path, num_bytes)
            if why_not is None:
                kind = read_kind(path).name
                draft = open_draft(path, self.target)
                num_bytes = draft.checkpoint.num_bytes
                why_not = self._opened(draft)
        except Exception as error:  # others' files: whatever is wrong with one is no fault of the run
            why_not = getattr(error, "what", None) or first_line(error)
        return FoundDraft(
            name=name, path=place, kind=kind, num_bytes=num_bytes, why_not=why_not, is_beside=is_beside
        )  # fmt: skip

    def _at_a_glance(self, path: Path, num_bytes: int) -> str | None:
        """Return why a language model cannot be the draft, by its size and the first of its settings."""
        is_for_one, num_tokens = _glance(path)
        if is_for_one:
            return None
        if num_bytes >= self._num_bytes:
            return LARGE
        ours = int(self._text.vocab_size)
        if isinstance(num_tokens, int) and abs(num_tokens - ours) > MAX_PADDING:
            return f"it has other tokens: {num_tokens} of them, and the target has {ours}"
        return None

    def _opened(self, draft: ModelFolder) -> str | None:
        """Return why a model that was opened cannot be the draft; raises EdgespecError for other reasons."""
        if no_tree_reason(self.target.config) is not None:
            check_may_draft(self.target, draft)
        elif draft.is_language_model:  # what trials would say is said where it is taken: they take seconds
            check_reads_trees(draft.config)
        if draft.is_language_model:
            if _layers(draft) == _layers(self.target):
                return SAME
            if draft.checkpoint.num_bytes >= self.target.checkpoint.num_bytes:
                return LARGE
        never_proposed(lambda: self._tokens, self.target, draft)
        return None


def _glance(path: Path) -> tuple[bool, object]:
    """Return whether a place holds a draft of certain targets alone, and how many tokens it states."""
    if is_gguf(path):
        with offload_errors():
            settings = first_settings(path)
        architecture = settings.get("general.architecture")
        has_layer = bool(settings.get(f"{architecture}.nextn_predict_layers"))
        return architecture in DRAFTS or has_layer, settings.get(TOKENS)
    config = read_json(path / "config.json")
    text = config.get("text_config")
    return kind_of(config, (), named=str(path)).name != "model", {**config, **(text or {})}.get("vocab_size")


def _layers(model: ModelFolder) -> tuple[object, ...]:
    text = model.config.get_text_config(decoder=True)
    return text.model_type, text.num_hidden_layers, text.hidden_size
