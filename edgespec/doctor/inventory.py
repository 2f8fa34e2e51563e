"""The models on this machine: what they are, whether they can run here, and which can draft for which.

This module reads configurations, headers and tokenizers, and no weight. The same checks as in a run find what
keeps a model from running.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from edgespec.draft.draft_kind import DraftKind, check_is_read
from edgespec.errors import EdgespecError, offload_errors
from edgespec.hub.ollama import PREFIX as OLLAMA
from edgespec.hub.ollama import resolve_ollama
from edgespec.hub.places import bytes_at
from edgespec.model.tree_support import Support
from edgespec.pair.drafts import read_draft_tensors, read_kind
from edgespec.pair.folder import ModelFolder, fingerprint, is_head, open_architecture, open_model, read_head_facts
from edgespec.pair.mtp import own_draft
from edgespec.pair.pair import open_tokenizer, tokens_of
from edgespec.pair.published import as_published
from edgespec.pair.published_kinds import read_published
from edgespec.pair.side_layer import read_side_layer
from edgespec.pair.tree_support import tree_support
from edgespec.placement.weights import weights_by_size
from edgespec.validation import parse_json
from offload.checkpoint import Checkpoint
from offload.errors import OffloadError
from offload.formats.stated import format_stated, stated_packing
from offload.gguf.files import is_gguf
from offload.gguf.header import read_gguf
from offload.gguf.kinds import bytes_by_type
from offload.gguf.vocabulary import Vocabulary, read_vocabulary

TOKENIZER_FILES = ("tokenizer*", "added_tokens.json", "special_tokens_map.json", "vocab.*", "merges.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine; what could not be read of it is None."""

    name: str  # as `target` takes it
    folder: Path
    num_bytes: int  # of its weights; of all its files, where those are not readable
    model_type: str | None = None
    num_parameters: int | None = None
    dtype: str | None = None  # of most bytes of its weights
    types: Mapping[str, int] = field(default_factory=dict)  # of a GGUF file: a type of its tensors -> bytes
    quant: str | None = None  # its packed weights' formats; what config.json states where they cannot be read
    max_context: int | None = None
    tokens: str | None = None  # a digest of which id is which token
    ordinary_tokens: str | None = None  # the same of those that are not added
    fingerprint: str | None = None
    head_of: str | None = None  # of a feature head: its target's fingerprint
    draft_form: str | None = None  # of a published draft that reads a target's hidden states
    check_target: Callable[[PretrainedConfig], None] | None = None  # raises EdgespecError for another's
    text_config: PretrainedConfig | None = None
    own_layer_parameters: int | None = None  # of the layer in its checkpoint that drafts for it (`draft=mtp`), if any
    support: Support = "trees"  # how it is decoded: only what reads trees is a draft, and plainly it takes none
    num_unread: int = 0  # weights of towers for images or sounds, which words do not pass through
    has_tower: bool = False  # whether that for images can be read
    notes: tuple[str, ...] = ()  # what is to be said of it, behind its name
    problem: EdgespecError | None = None  # why it cannot run

    @property
    def bits(self) -> float | None:
        """The bits that a weight of a GGUF file takes."""
        return 8 * self.num_bytes / self.num_parameters if self.types and self.num_parameters else None

    def draft_ratio(self, num_parameters: int | None) -> str:
        """Return in words how much smaller a draft of so many parameters is than this model."""
        return f"{(self.num_parameters or 0) / max(1, num_parameters or 0):.3g} times smaller"


class Inspector:
    """Looks at models one by one, and remembers the token ids of the tokenizers that it has read."""

    def __init__(self) -> None:
        self._tokens: dict[
            str, tuple[str, str]
        ] = {}  # digest of the tokenizer's files -> those of all, of ordinary ids

    def inspect(self, name: str, place: Path) -> LocalModel:
        """Return what can be known of a model without loading it, including what is wrong with it."""
        facts: dict[str, Any] = {"name": name, "folder": place, "num_bytes": bytes_at(place)}
        try:
            folder = facts["folder"] = resolve_ollama(name) if name.startswith(OLLAMA) else place
            kind = read_kind(folder)
            if kind.is_published:
                return self._published(facts, kind)
            has_files = is_gguf(folder) or any(folder.glob("*.safetensors*"))
            model = open_model(folder) if has_files else open_architecture(folder)
            facts |= _describe(model) if has_files else {"model_type": model.config.model_type}
            if is_head(folder):
                head_of = read_head_facts(folder).target_fingerprint
                num_parameters = sum(math.prod(entry.shape) for entry in model.checkpoint.tensors.values())
                return LocalModel(**facts, num_parameters=num_parameters, head_of=head_of)
            with offload_errors():
                weights = weights_by_size(model, dtype=torch.bfloat16, quant=None)
            facts |= {"num_parameters": weights.num_parameters, "num_unread": weights.skeleton.num_unread}
            facts["has_tower"] = weights.skeleton.tower is not None
            support = tree_support(model)
            facts["support"] = support.name
            facts["notes"] = (*facts.get("notes", ()), *([f"is {support.in_words}"] if support.has_own_passes else []))
            if not has_files:  # what keeps the family from running comes before that
                open_model(folder)
            facts |= {"fingerprint": fingerprint(model), "text_config": model.config.get_text_config(decoder=True)}
            facts["quant"] = weights.formats or facts["quant"]
            if not support.has_own_passes:
                facts |= _own_layer(model, facts["notes"])
            facts["tokens"], facts["ordinary_tokens"] = self._token_digests(folder)
        except EdgespecError as error:
            facts["problem"] = error
            facts.setdefault("model_type", _stated_type(facts["folder"]))
        return LocalModel(**facts)

    def _published(self, facts: dict[str, Any], kind: DraftKind) -> LocalModel:
        """Return what can be known of a published draft without its target."""
        folder: Path = facts["folder"]
        check_is_read(kind, named=str(folder))
        if kind.name == "mtp":
            side = read_side_layer(folder)
            facts |= _described(side.checkpoint) | {"model_type": side.fields["model_type"], "draft_form": kind.name}
            return LocalModel(**facts, num_parameters=side.num_parameters, check_target=side.check_fits)
        checkpoint = read_draft_tensors(folder)
        head, layer = read_published(folder, kind, checkpoint)
        facts |= _described(checkpoint) | {"model_type": layer.model_type, "draft_form": kind.name}
        num_parameters = sum(math.prod(entry.shape) for entry in as_published(checkpoint).values())
        return LocalModel(**facts, num_parameters=num_parameters, check_target=head.check_fits, notes=head.notes)

    def _token_digests(self, folder: Path) -> tuple[str, str]:
        digest = hashlib.sha256(repr(_vocabulary(folder)).encode() if is_gguf(folder) else b"")
        for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}):
            digest.update(path.name.encode() + path.read_bytes())
        files = digest.hexdigest()
        if files not in self._tokens:
            tokens = tokens_of(folder, open_tokenizer(folder))
            vocab = sorted((index, token) for token, index in tokens.ids.items())
            ordinary = [entry for entry in vocab if entry[0] not in tokens.added]
            every, without_added = (hashlib.sha256(json.dumps(ids).encode()).hexdigest() for ids in (vocab, ordinary))
            self._tokens[files] = every, without_added
        return self._tokens[files]


def _vocabulary(path: Path) -> Vocabulary:
    with offload_errors():
        return read_vocabulary(read_gguf(path))


def drafts_for(target: LocalModel, models: Iterable[LocalModel]) -> list[LocalModel]:
    """Return the models that can draft for the target, the smallest first.

    They have the target's token ids, added ones aside, and fewer parameters, or are its own feature heads.
    """
    if target.support == "plainly" or not _is_target(target):
        return []
    size = target.num_parameters or 0
    fitting = [
        model
        for model in models
        if model.problem is None and model.support == "trees" and (model.num_parameters or 0) < size
        if why_not(model, target) is None
    ]
    return sorted(fitting, key=lambda model: model.num_parameters or 0)


def targets_of(draft: LocalModel, models: Iterable[LocalModel]) -> dict[str, str | None]:
    """Return what keeps a draft that was made for one target from each of the models; None of those that it fits.

    A language model was made for none: nothing is said of it.
    """
    if draft.head_of is None and draft.check_target is None:
        return {}
    return {model.name: why_not(draft, model) for model in models if _is_target(model)}


def _is_target(model: LocalModel) -> bool:
    return model.problem is None and model.head_of is None and model.draft_form is None


def why_not(draft: LocalModel, target: LocalModel) -> str | None:
    """Return what keeps a draft from a target, in a sentence; None where it fits."""
    if target.support != "trees" and (draft.head_of is not None or draft.check_target is not None):
        return "it would read hidden states, which the target does not give"
    if draft.check_target is None:
        if draft.head_of is not None:
            return None if draft.head_of == target.fingerprint else "it is a head of another target"
        return None if _same_tokens(draft, target) else "it has other token ids"
    if target.text_config is None:
        return "nothing is known of the target"
    try:
        draft.check_target(target.text_config)
    except EdgespecError as error:
        return error.what
    return None


def _same_tokens(draft: LocalModel, target: LocalModel) -> bool:
    return draft.tokens == target.tokens or (
        draft.ordinary_tokens is not None and draft.ordinary_tokens == target.ordinary_tokens
    )


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    by_dtype: Counter[torch.dtype] = Counter()
    for entry in checkpoint.tensors.values():
        by_dtype[entry.dtype] += entry.num_bytes
    dtype = str(by_dtype.most_common(1)[0][0]).removeprefix("torch.") if by_dtype else None
    return {"num_bytes": checkpoint.num_bytes, "dtype": dtype}


def _describe(model: ModelFolder) -> dict[str, Any]:
    return {
        **_described(model.checkpoint),
        "model_type": model.config.model_type,
        "types": _types(model.folder),
        "quant": format_stated(stated_packing(model.config)),
        "max_context": model.max_context,
        "notes": model.notes,
    }


def _own_layer(model: ModelFolder, notes: tuple[str, ...]) -> dict[str, Any]:
    """Return the size of a target's own multi-token-prediction layer, or the note why one is not read."""
    target, layer = own_draft(model)
    if layer is None:
        return {"notes": (*notes, *(note for note in target.own_notes if note not in notes))}
    with offload_errors():
        return {"own_layer_parameters": weights_by_size(layer, dtype=torch.bfloat16, quant=None).num_parameters}


def _types(path: Path) -> dict[str, int]:
    with offload_errors():
        return bytes_by_type(read_gguf(path)) if is_gguf(path) else {}


def _stated_type(folder: Path) -> str | None:
    """Return what config.json, or a GGUF file's header, says of a model that is not known otherwise."""
    if is_gguf(folder):
        with contextlib.suppress(OffloadError):
            return read_gguf(folder).architecture
        return None
    try:
        found = parse_json((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return str(found) if found else None
