"""The models on this machine: what they are, whether they can run here, and which can draft for which.

This module reads configurations, headers and tokenizers, and no weight. The same checks as in a run find what
keeps a model from running.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.errors import EdgespecError, offload_errors
from edgespec.inputs import parse_json
from edgespec.model.self_check import check_tree_reading
from edgespec.pair.folder import ModelFolder, fingerprint, is_head, open_architecture, open_model, read_head_facts
from edgespec.pair.hub_names import cached_repositories, find_cached, folder_bytes
from edgespec.pair.pair import open_tokenizer
from edgespec.placement.weights import weights_by_size
from offload.formats.stated import format_stated, stated_packing

TOKENIZER_FILES = ("tokenizer*", "added_tokens.json", "special_tokens_map.json", "vocab.*", "merges.txt")
SEARCH_DEPTH = 2  # of folders below one that was given


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine; what could not be read of it is None."""

    name: str  # as `target` takes it
    folder: Path
    num_bytes: int  # of its weights; of all its files, where those are not readable
    model_type: str | None = None
    num_parameters: int | None = None
    dtype: str | None = None  # of most bytes of its weights
    quant: str | None = None  # its packed weights' formats; what config.json states where they cannot be read
    max_context: int | None = None
    tokens: str | None = None  # a digest of which id is which token
    ordinary_tokens: str | None = None  # the same of those that are not added
    fingerprint: str | None = None
    head_of: str | None = None  # of a feature head: its target's fingerprint
    num_unread: int = 0  # weights of towers for images or sounds, which are left out
    notes: tuple[str, ...] = ()  # what is to be said of it, behind its name
    problem: EdgespecError | None = None  # why it cannot run

    def draft_ratio(self, draft: LocalModel) -> str:
        """Return in words how much smaller a draft is than this model."""
        return f"{(self.num_parameters or 0) / max(1, draft.num_parameters or 0):.3g} times smaller"


def places(folders: Sequence[Path], *, depth: int = SEARCH_DEPTH) -> Iterator[tuple[str, Path]]:
    """Yield names and folders of the models in the local cache and in the given folders.

    Folders up to `depth` levels below those are searched too.
    """
    for repository, cached in cached_repositories():
        folder = find_cached(repository)
        if folder is not None:
            yield repository, folder
            continue
        # Downloaded at a revision of its own: it has to be named with `revision`.
        snapshots = sorted((cached / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
        if snapshots:
            yield f"{repository} `revision={snapshots[-1].name}`", snapshots[-1]
    for folder in folders:
        yield from ((str(found), found) for found in _model_folders(folder, depth))


def _model_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        is_model = (folder / "config.json").exists()
        below = sorted(folder.iterdir()) if depth > 0 and not is_model and folder.is_dir() else []
    except OSError:  # somebody else's
        return
    if is_model:
        yield folder
    for path in below:
        yield from _model_folders(path, depth - 1)


class Inspector:
    """Looks at models one by one, and remembers the token ids of the tokenizers that it has read."""

    def __init__(self) -> None:
        self._tokens: dict[
            str, tuple[str, str]
        ] = {}  # digest of the tokenizer's files -> those of all, of ordinary ids

    def inspect(self, name: str, folder: Path) -> LocalModel:
        """Return what can be known of a model without loading it, including what is wrong with it."""
        facts: dict[str, Any] = {"name": name, "folder": folder, "num_bytes": folder_bytes(folder)}
        try:
            has_files = any(folder.glob("*.safetensors*"))
            model = open_model(folder) if has_files else open_architecture(folder)
            facts |= _describe(model) if has_files else {"model_type": model.config.model_type}
            if is_head(folder):
                head_of = read_head_facts(folder).target_fingerprint
                num_parameters = sum(math.prod(entry.shape) for entry in model.checkpoint.tensors.values())
                return LocalModel(**facts, num_parameters=num_parameters, head_of=head_of)
            with offload_errors():
                weights = weights_by_size(model, dtype=torch.bfloat16, quant=None)
            facts |= {"num_parameters": weights.num_parameters, "num_unread": weights.skeleton.num_unread}
            if not has_files:  # what keeps the family from running comes before that
                check_tree_reading(model.config, device=torch.device("cpu"))
                open_model(folder)
            facts["fingerprint"] = fingerprint(model)
            facts["quant"] = weights.formats or facts["quant"]
            facts["tokens"], facts["ordinary_tokens"] = self._token_digests(folder)
            check_tree_reading(model.config, device=torch.device("cpu"))
        except EdgespecError as error:
            facts["problem"] = error
            facts.setdefault("model_type", _stated_type(folder))
        return LocalModel(**facts)

    def _token_digests(self, folder: Path) -> tuple[str, str]:
        digest = hashlib.sha256()
        for path in sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}):
            digest.update(path.name.encode() + path.read_bytes())
        files = digest.hexdigest()
        if files not in self._tokens:
            tokenizer = open_tokenizer(folder)
            vocab = sorted((index, token) for token, index in tokenizer.get_vocab().items())
            ordinary = [entry for entry in vocab if entry[0] not in tokenizer.added_tokens_decoder]
            every, without_added = (hashlib.sha256(json.dumps(ids).encode()).hexdigest() for ids in (vocab, ordinary))
            self._tokens[files] = every, without_added
        return self._tokens[files]


def drafts_for(target: LocalModel, models: Iterable[LocalModel]) -> list[LocalModel]:
    """Return the models that can draft for the target, the smallest first.

    They have the target's token ids, added ones aside, and fewer parameters, or are its own feature heads.
    """
    if target.problem is not None or target.head_of is not None:
        return []
    size = target.num_parameters or 0
    fitting = [
        model
        for model in models
        if model.problem is None and (model.num_parameters or 0) < size
        if (_same_tokens(model, target) if model.head_of is None else model.head_of == target.fingerprint)
    ]
    return sorted(fitting, key=lambda model: model.num_parameters or 0)


def _same_tokens(draft: LocalModel, target: LocalModel) -> bool:
    return draft.tokens == target.tokens or (
        draft.ordinary_tokens is not None and draft.ordinary_tokens == target.ordinary_tokens
    )


def _describe(model: ModelFolder) -> dict[str, Any]:
    by_dtype: Counter[torch.dtype] = Counter()
    for entry in model.checkpoint.tensors.values():
        by_dtype[entry.dtype] += entry.num_bytes
    return {
        "model_type": model.config.model_type,
        "num_bytes": model.checkpoint.num_bytes,
        "dtype": str(by_dtype.most_common(1)[0][0]).removeprefix("torch.") if by_dtype else None,
        "quant": format_stated(stated_packing(model.config)),
        "max_context": model.max_context,
        "notes": model.notes,
    }


def _stated_type(folder: Path) -> str | None:
    """Return what config.json says of a model that is not known otherwise."""
    try:
        found = parse_json((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return str(found) if found else None
