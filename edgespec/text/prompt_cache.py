"""A file of the keys and values of a prompt's beginning, so that later runs do not read it again.

It holds the rows of the target and of the draft, and the tokens that they are of. A text begins on as many of them as
its own prompt has in common with those tokens. The file belongs to one model in one format: of another, or damaged, it
is refused. Writing replaces it whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from edgespec.errors import EdgespecError
from edgespec.files import written_whole
from edgespec.model.causal_model import CausalModel, shares_passes
from edgespec.model.layer_kinds import has_recurrent_layers
from edgespec.model.text_cache import TextCache, shared_length
from edgespec.pair.folder import ModelFolder, fingerprint
from edgespec.pair.pair import ModelPair
from edgespec.placement.run_place import RunPlace
from edgespec.text.caches import TextCaches, new_caches
from edgespec.text.prompt_files import HEADER, SCHEMA, note_use

LEAST_TOKENS = 16  # of a beginning that it pays to keep

logger = logging.getLogger("edgespec.text")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKey:
    """What rows depend on beside the tokens, of either model: its content, and the format that it computes in."""

    target: dict[str, str]
    draft: dict[str, str] | None


def prompt_key(pair: ModelPair, place: RunPlace) -> PromptKey:
    """Return the key of a pair at a place; raises EdgespecError for models whose rows cannot begin another text."""
    if not shares_passes(pair.target.config.get_text_config(decoder=True)):
        raise EdgespecError(
            "E_PROMPT_CACHE",
            f"the rows of '{pair.target.folder.name}' depend on the length of the whole text (its rotation does).",
            "Leave out `prompt_cache`.",
        )

    for model in (pair.target, pair.draft):
        if model is not None and has_recurrent_layers(model.config.get_text_config(decoder=True)):
            raise EdgespecError(
                "E_PROMPT_CACHE",
                f"'{model.folder.name}' has recurrent layers, whose state is of a whole text and of no part of it.",
                "Leave out `prompt_cache`.",
            )

    def of(model: ModelFolder, quant: str | None) -> dict[str, str]:
        dtype = str(place.dtype).removeprefix("torch.")
        return {
            "model": fingerprint(model),
            "name": model.folder.name,
            "dtype": dtype,
            "quant": quant or "none",
            "device": place.device.type,
        }

    return PromptKey(
        target=of(pair.target, place.quant), draft=of(pair.draft, place.draft_quant) if pair.draft else None
    )


class PromptCache:
    """The file at work: texts begin on its rows, and rows that it should have are written to it."""

    def __init__(self, path: Path, key: PromptKey) -> None:
        """Read and check the file, where there is one; raises EdgespecError."""
        self.path, self._key = path, key
        self._wanted: list[int] = []
        self.ids: list[int] = []  # of the target's rows
        self._draft_ids: list[int] = []
        if path.is_dir() or not path.parent.is_dir():
            raise _refused(path, "is a folder" if path.is_dir() else "lies in a folder that is not there")
        if path.exists():
            self._open()

    def keep_beginning(self, prompts: Iterable[Sequence[int]]) -> None:
        """Let the file have what these prompts begin with alike, once a text has read it."""
        first, *others = prompts
        self._wanted = list(first[:-1])  # the last token's row is always computed
        for prompt in others:
            del self._wanted[shared_length(self._wanted, prompt) :]

    @property
    def num_wanted(self) -> int:
        """The number of tokens that the prompts begin with alike."""
        return len(self._wanted)

    @property
    def num_known(self) -> int:
        """The number of those that the file has."""
        return shared_length(self.ids, self._wanted)

    def begin(self, ids: Sequence[int], target: CausalModel, draft: CausalModel | None) -> TextCaches | None:
        """Return caches with the rows that the file has of this prompt; None where those are too few to pay."""
        kept = shared_length(self.ids, ids[:-1])
        if kept < LEAST_TOKENS:
            return None
        caches = new_caches(target, draft)
        try:
            with safe_open(self.path, "pt", device=str(target.device)) as file:
                _fill(caches.target, file, "target", self.ids[:kept])
                if caches.draft is not None:
                    _fill(caches.draft, file, "draft", self._draft_ids[: shared_length(self._draft_ids, ids[:kept])])
        except (OSError, SafetensorError) as error:  # somebody removed or replaced it: the prompt is read, then
            logger.warning("the prompt cache '%s' is no longer used: %s", self.path, error)
            self.ids, self._draft_ids, self._wanted = [], [], []
            return None
        return caches

    def keep(self, caches: TextCaches) -> None:
        """Write what the file should have, where it lacks it and these rows have it; what fails ends nothing."""
        wanted = self._wanted
        if len(wanted) < LEAST_TOKENS or caches.shared(wanted) < len(wanted) or not self._lacks(wanted, caches):
            return
        try:
            self._write(caches.copy_of(wanted))
        except (OSError, SafetensorError) as error:  # safetensors words a full disk in its own way
            logger.warning("the prompt cache '%s' cannot be written: %s", self.path, error)
        self._wanted = []  # once a run

    def _lacks(self, wanted: list[int], caches: TextCaches) -> bool:
        """Return whether the file has none of these rows, or the first of them alone, or none of the draft's.

        A file that goes on with other tokens is left as it is: else two prompts with one beginning would write in turn.
        """
        shared = shared_length(self.ids, wanted)
        if shared < LEAST_TOKENS:
            return True
        has_more = caches.draft is not None and len(caches.draft.ids) >= LEAST_TOKENS and not self._draft_ids
        return len(self.ids) == shared < len(wanted) or has_more

    def _write(self, caches: TextCaches) -> None:
        tensors = _named("target", caches.target)
        ids = {"target": list(caches.target.ids), "draft": []}
        if caches.draft is not None and caches.draft.ids:
            tensors |= _named("draft", caches.draft)
            ids["draft"] = list(caches.draft.ids)
        header = {
            "schema": SCHEMA,
            "target": self._key.target,
            "draft": self._key.draft,
            "ids": ids,
            "digest": _digest(tensors[name] for name in sorted(tensors)),
        }
        with written_whole(self.path) as partial:
            save_file(tensors, partial, metadata={HEADER: json.dumps(header)})
        self.ids, self._draft_ids = ids["target"], ids["draft"]
        note_use(self.path)

    def _open(self) -> None:
        try:
            with safe_open(self.path, "pt") as file:
                header = json.loads((file.metadata() or {}).get(HEADER, "null"))
                if not isinstance(header, dict) or header.get("schema") != SCHEMA:
                    raise _refused(self.path, f"is no prompt cache of schema {SCHEMA!r}")
                self._check_key(header)
                ids, draft_ids = header["ids"]["target"], header["ids"]["draft"]
                if _digest(file.get_tensor(name) for name in sorted(file.keys())) != header["digest"]:
                    raise _refused(self.path, "is damaged: its rows are not those that were written")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise _refused(self.path, f"cannot be read ({error})") from error
        # Another draft's rows are of no use, and replaced.
        self.ids, self._draft_ids = ids, draft_ids if header["draft"] == self._key.draft else []
        note_use(self.path)

    def _check_key(self, header: dict[str, Any]) -> None:
        theirs, ours = header["target"], self._key.target
        if theirs["model"] != ours["model"]:
            raise _refused(self.path, f"is of '{theirs['name']}' ({theirs['model']}), not of '{ours['name']}' as it is")
        for name in ("dtype", "quant", "device"):
            if theirs[name] != ours[name]:
                raise _refused(self.path, f"was made with `{name}={theirs[name]}`, and this is `{name}={ours[name]}`")


def _named(role: str, cache: TextCache) -> dict[str, Tensor]:
    return {f"{role}.{name}": tensor.cpu() for name, tensor in cache.tensors().items()}


def _fill(cache: TextCache, file: Any, role: str, ids: list[int]) -> None:
    if ids:
        prefix = f"{role}."
        names = [name.removeprefix(prefix) for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        cache.fill({name: file.get_slice(prefix + name)[: len(ids)] for name in names}, ids)


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _refused(path: Path, what: str) -> EdgespecError:
    return EdgespecError("E_PROMPT_CACHE", f"'{path}' {what}.", "Name another file for `prompt_cache`, or remove it.")
