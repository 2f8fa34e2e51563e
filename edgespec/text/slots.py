"""A folder of conversations' rows, so that they survive a restart: a prompt cache's file for each.

A text begins on the file that has most of its prompt. A file is replaced when its conversation has gone on. The folder
has at most so many bytes: the files that were written longest ago go first, whichever model they are of.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from safetensors import SafetensorError

from edgespec.errors import EdgespecError
from edgespec.files import make_folder
from edgespec.model.causal_model import CausalModel
from edgespec.model.text_cache import shared_length
from edgespec.pair.pair import ModelPair
from edgespec.placement.run_config import RunConfig
from edgespec.text.caches import TextCaches
from edgespec.text.prompt_cache import MIN_TOKENS, PromptCache

SUFFIX = ".rows.safetensors"
DEFAULT_SLOT_BYTES = 16 << 30

logger = logging.getLogger("edgespec.text")


class Slots:
    """The folder at work."""

    def __init__(
        self, folder: Path, pair: ModelPair, run_config: RunConfig, *, max_bytes: int = DEFAULT_SLOT_BYTES
    ) -> None:
        """Read and check all files; raises EdgespecError for a pair that can have none, and a folder that is none."""
        self.folder, self.max_bytes = folder, max_bytes
        self._pair, self._run_config = pair, run_config
        try:
            make_folder(folder)
            paths = sorted(folder.glob(f"*{SUFFIX}"), key=_written_s)
            self._open(folder / _new_name())  # a pair that can have none is refused
        except OSError as error:
            what = f"'{folder}' cannot be a folder of conversations ({error.strerror})."
            raise EdgespecError("E_PROMPT_CACHE", what, "Name another for `slots_dir`.") from error
        except EdgespecError as error:
            raise EdgespecError(error.code, error.what, "Leave out `slots_dir`.") from error
        self._files: list[PromptCache] = []
        self.not_used: list[str] = []  # why files were skipped
        for path in paths:
            try:
                self._files.append(self._open(path))
            except EdgespecError as error:
                self.not_used.append(error.what)
        self._file_of: WeakKeyDictionary[TextCaches, PromptCache] = WeakKeyDictionary()

    @property
    def num_files(self) -> int:
        """The number of conversations that texts may begin on."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """The size of all files in the folder, of other models and broken ones included."""
        return sum(_size(path) for path in self.folder.glob(f"*{SUFFIX}"))

    def shared(self, ids: Sequence[int]) -> int:
        """Return the most rows of a prompt that a file has."""
        return max((file.shared(ids) for file in self._files), default=0)

    def begin(self, ids: Sequence[int], target: CausalModel, draft: CausalModel | None) -> TextCaches | None:
        """Return caches with the rows that the best file has of this prompt; None where those are too few to pay."""
        while self._files:
            best = max(self._files, key=lambda file: file.shared(ids))
            caches = best.begin(ids, target, draft)
            if best.ids:
                return caches
            self._files.remove(best)  # it is broken or gone by now, which was said
        return None

    def fitting(self, kept: Sequence[TextCaches]) -> list[TextCaches]:
        """Return those used last, at the end of `kept`, whose files fit in the folder together."""
        found: list[TextCaches] = []
        left = self.max_bytes
        for caches in reversed(kept):
            left -= _bytes_of(caches)
            if left < 0:
                break
            found.append(caches)
        return found[::-1]

    def has(self, caches: TextCaches) -> bool:
        """Return whether a file has these rows, or they are too few to be written."""
        ids = caches.target.ids
        is_written = any(shared_length(file.ids, ids) == len(ids) for file in self._files)
        return is_written or len(ids) < MIN_TOKENS

    def keep(self, caches: TextCaches) -> bool:
        """Write a conversation, and return whether that was done; a warning says what is in the way."""
        ids = caches.target.ids
        earlier = self._file_of.get(caches)
        if earlier not in self._files:
            earlier = next((file for file in self._files if shared_length(file.ids, ids) == len(file.ids)), None)
        file = earlier or self._open(self.folder / _new_name())
        self._make_room(_bytes_of(caches), file)
        try:
            file.replace(caches)
        except (OSError, SafetensorError) as error:
            logger.warning("conversations cannot be written to '%s': %s", self.folder, error)
            return False
        self._make_room(_size(file.path), file)
        self._file_of[caches] = file
        if earlier is None:
            self._files.append(file)
        return True

    def _open(self, path: Path) -> PromptCache:
        return PromptCache(path, self._pair, self._run_config)

    def _make_room(self, num_bytes: int, replaced: PromptCache) -> None:
        """Remove the oldest files until a new one fits, which may replace one."""
        paths = [path for path in self.folder.glob(f"*{SUFFIX}") if path != replaced.path]
        free = self.max_bytes - num_bytes - sum(map(_size, paths))
        for path in sorted(paths, key=_written_s):
            if free >= 0:
                return
            free += _size(path)
            with contextlib.suppress(OSError):
                path.unlink()
            self._files = [file for file in self._files if file.path != path]


def _new_name() -> str:
    return f"{secrets.token_hex(8)}{SUFFIX}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it is gone
        return 0


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _bytes_of(caches: TextCaches) -> int:
    """Return the size of the keys and values in use, which are nearly all of a file."""
    both = [cache for cache in (caches.target, caches.draft) if cache is not None]
    layers = [(layer, len(cache.ids)) for cache in both for layer in cache.layers if layer.capacity]
    return sum(part.nbytes // layer.capacity * rows for layer, rows in layers for part in layer.storage)
