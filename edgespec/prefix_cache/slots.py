"""A folder of conversations' rows, so that they survive a restart: a prompt cache's file for each.

A text begins on the file that has most of its prompt. A file is replaced when its conversation has gone on. The folder
has at most so many bytes: the files that were written longest ago go first, whichever model they are of.

Rows are copied between two steps, and the copy is written while texts go on: a long conversation's takes seconds, in
which all prompts and answers would wait. What is known of the files changes between steps alone.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from safetensors import SafetensorError

from edgespec.errors import EdgespecError
from edgespec.machine.host_memory import free_host_bytes
from edgespec.model.causal_model import CausalModel
from edgespec.model.text_cache import shared_length
from edgespec.pair.pair import ModelPair
from edgespec.placement.run_config import RunConfig
from edgespec.prefix_cache.caches import TextCaches
from edgespec.prefix_cache.prompt_cache import MIN_TOKENS, PromptCache, TextRows, rows_of
from edgespec.user_paths import drop_left_over, make_folder
from offload.adapters.use import AdapterUse

PREFIX, SUFFIX = "conversation-", ".rows.safetensors"
NAMES = f"{PREFIX}*{SUFFIX}"
DEFAULT_SLOT_BYTES = 16 << 30
MIB = 1 << 20

BetweenSteps: TypeAlias = Callable[[Callable[[], Any]], Any]  # returns what a function returns while no text changes

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
            drop_left_over(folder, f".{PREFIX}")
            paths = sorted(folder.glob(NAMES), key=_written_s)
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
        if self.not_used:
            count = f"{len(self.not_used)} of {len(paths)}"
            logger.warning("%s files in '%s' are not used; the first: %s", count, folder, self.not_used[0])
        self._said: set[str] = set()  # which bounds a text was beyond
        self._file_of: WeakKeyDictionary[TextCaches, PromptCache] = WeakKeyDictionary()

    @property
    def num_files(self) -> int:
        """The number of conversations that texts may begin on."""
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """The size of all files in the folder, of other models and broken ones included."""
        return sum(_size(path) for path in self.folder.glob(NAMES))

    def shared(self, ids: Sequence[int], adapters: AdapterUse) -> int:
        """Return the most rows of a prompt that a file has, with these adapters."""
        return max((file.shared(ids, adapters) for file in self._files), default=0)

    def begin(
        self, ids: Sequence[int], target: CausalModel, draft: CausalModel | None, adapters: AdapterUse
    ) -> TextCaches | None:
        """Return caches with the rows that the best file has of this prompt; None where those are too few to pay."""
        while self.shared(ids, adapters) >= MIN_TOKENS:
            best = max(self._files, key=lambda file: file.shared(ids, adapters))
            caches = best.begin(ids, target, draft, adapters)
            if best.ids:
                return caches
            self._files.remove(best)  # it is broken or gone by now, which was said
        return None

    def store(self, texts: Callable[[], Sequence[TextCaches]], between_steps: BetweenSteps) -> int:
        """Write the texts that are kept, the one used last at the end, and that no file has; returns how many.

        Of those that are more than the folder may have, the ones used last are written. A warning says what cannot be.
        """
        tried: list[TextCaches] = []
        num_written = 0
        while (copied := between_steps(lambda: self._copy_of_next(texts(), tried))) is not None:
            caches, file, rows = copied
            try:
                file.write(rows)
            except (OSError, SafetensorError) as error:
                logger.warning("conversations cannot be written to '%s': %s", self.folder, error)
                break
            between_steps(partial(self._has_written, caches, file, rows))
            num_written += 1
        return num_written

    def _copy_of_next(
        self, texts: Sequence[TextCaches], tried: list[TextCaches]
    ) -> tuple[TextCaches, PromptCache, TextRows] | None:
        """Return the rows of a text that is to be written, and the file, with room for it in the folder."""
        for caches in self._fitting(texts):
            if caches in tried or self._has(caches):
                continue
            tried.append(caches)
            num_bytes = _bytes_of(caches)
            room_bytes = free_host_bytes() // 2  # the other half is for texts, which go on beside the copy
            if num_bytes > room_bytes:
                self._say_once("half of the free memory, for a copy of its rows,", num_bytes, room_bytes)
                continue
            file = self._file_for(caches)
            self._make_room(num_bytes, file)
            return caches, file, rows_of(caches)
        return None

    def _has_written(self, caches: TextCaches, file: PromptCache, rows: TextRows) -> None:
        file.has_written(rows)
        self._make_room(_size(file.path), file)
        self._file_of[caches] = file
        if file not in self._files:
            self._files.append(file)

    def _fitting(self, texts: Sequence[TextCaches]) -> list[TextCaches]:
        """Return those used last, at the end of `kept`, whose files fit in the folder together."""
        found: list[TextCaches] = []
        left = self.max_bytes
        for caches in reversed(texts):
            num_bytes = _bytes_of(caches)
            if num_bytes > self.max_bytes:
                self._say_once("the folder's bound", num_bytes, self.max_bytes)
                continue
            left -= num_bytes
            if left < 0:
                break
            found.append(caches)
        return found[::-1]

    def _say_once(self, bound: str, num_bytes: int, max_bytes: int) -> None:
        if bound not in self._said:
            self._said.add(bound)
            sizes = f"{num_bytes / MIB:.1f} MiB, and {bound} is {max_bytes / MIB:.1f} MiB"
            logger.warning("a conversation is not written to '%s': it has %s", self.folder, sizes)

    def _has(self, caches: TextCaches) -> bool:
        """Return whether a file has these rows, or they are too few to be written."""
        ids = caches.target.ids
        is_written = any(file.has_whole(ids, caches.target.adapters) for file in self._files)
        return is_written or len(ids) < MIN_TOKENS

    def _file_for(self, caches: TextCaches) -> PromptCache:
        """Return the file of a conversation, which it replaces, or a new one."""
        if (earlier := self._file_of.get(caches)) in self._files and earlier is not None:
            return earlier
        ids = caches.target.ids
        adapters = caches.target.adapters
        own = (file for file in self._files if file.is_of(adapters))
        before = (file for file in own if shared_length(file.ids, ids) == len(file.ids))
        return next(before, None) or self._open(self.folder / _new_name())

    def _open(self, path: Path) -> PromptCache:
        return PromptCache(path, self._pair, self._run_config, has_whole_texts=True)

    def _make_room(self, num_bytes: int, replaced: PromptCache) -> None:
        """Remove the oldest files until a new one fits, which may replace one."""
        paths = [path for path in self.folder.glob(NAMES) if path != replaced.path]
        free = self.max_bytes - num_bytes - sum(map(_size, paths))
        for path in sorted(paths, key=_written_s):
            if free >= 0:
                return
            free += _size(path)
            with contextlib.suppress(OSError):
                path.unlink()
            self._files = [file for file in self._files if file.path != path]


def _new_name() -> str:
    return f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"


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
    """Return the size of a text's rows, which are nearly all of a file."""
    return sum(cache.text_bytes for cache in (caches.target, caches.draft) if cache is not None)
