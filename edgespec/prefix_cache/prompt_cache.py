"""A file of the keys and values of a prompt's beginning, so that later runs do not read it again.

It holds the rows of the target and of the draft, and the tokens that they are of. A text begins on as many of them as
its own prompt has in common with those tokens. The file belongs to one model in one format: of another, or damaged, it
is refused. Writing replaces it whole or not at all. Others may write it too, while it is in use: each use opens it, and
a file that is not the one that was checked last is checked anew, or no longer used.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from edgespec.draft.own_parts import is_copy
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel, shares_passes
from edgespec.model.mechanisms.known import keeps_states
from edgespec.model.mechanisms.state_cache import Window, reach
from edgespec.model.text_cache import shared_length
from edgespec.pair.adapters import use_digest
from edgespec.pair.folder import ModelFolder, fingerprint
from edgespec.pair.pair import ModelPair
from edgespec.pair.tree_support import tree_support
from edgespec.placement.number_formats import quant_named
from edgespec.placement.run_config import RunConfig
from edgespec.prefix_cache.caches import TextCaches, new_caches
from edgespec.prefix_cache.prompt_files import HEADER, SCHEMA, note_use
from edgespec.prefix_cache.prompt_rows import PromptRows, digest_of, windows_of
from edgespec.user_paths import written_whole
from offload.adapters.use import AdapterUse

MIN_TOKENS = 16  # of a beginning that it pays to keep

logger = logging.getLogger("edgespec.text")


def _check_rows_can_begin_texts(pair: ModelPair, *, are_whole_texts: bool) -> None:
    """Raise EdgespecError for models whose rows depend on more than the tokens before them, or have no form here."""
    support = tree_support(pair.target)
    if support.has_own_passes:
        what = f"'{pair.target.folder.name}' is {support.in_words}; its own cache has no form in a file."
        raise EdgespecError("E_PROMPT_CACHE", what, "Leave out `prompt_cache`.")
    if not shares_passes(pair.target.config.get_text_config(decoder=True)):
        raise EdgespecError(
            "E_PROMPT_CACHE",
            f"the rows of '{pair.target.folder.name}' depend on the length of the whole text (its rotation does).",
            "Leave out `prompt_cache`.",
        )
    for model in (pair.target, pair.draft):
        if model is not None and not are_whole_texts and _has_states(model):
            raise EdgespecError(
                "E_PROMPT_CACHE",
                f"'{model.folder.name}' has recurrent layers, whose state is of a whole text and of no part of it.",
                "Leave out `prompt_cache`.",
            )


def _has_states(model: ModelFolder) -> bool:
    return keeps_states(model.config.get_text_config(decoder=True))


def _key_of(model: ModelFolder, quant: str | None, run_config: RunConfig) -> dict[str, str]:
    """Return what a model's rows depend on beside the tokens: its content, and the format that it computes in."""
    return {
        "model": fingerprint(replace(model, adapters=()) if model.adapters else model),
        "name": model.folder.name,
        "dtype": str(run_config.dtype).removeprefix("torch."),
        "quant": quant_named(model, quant),
        "device": run_config.device.type,
        **({"transformers": transformers.__version__} if _has_states(model) else {}),  # whose states they are
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """What a file has of a text: the tokens by model, "target" and "draft", and their rows."""

    ids: dict[str, list[int]]
    tensors: dict[str, Tensor]
    adapters: dict[str, AdapterUse]


class PromptCache:
    """The file at work: texts begin on its rows, and rows that it should have are written to it."""

    def __init__(self, path: Path, pair: ModelPair, run_config: RunConfig, *, has_whole_texts: bool = False) -> None:
        """Read and check the file, where there is one; raises EdgespecError, also for a pair that can have none.

        What has states can only go on where they reach: from the ends of whole texts' turns. A file of whole texts may
        be of any adapters of the pair's, others are of those that texts have which choose none.
        """
        self._models = {"target": pair.target, "draft": pair.draft}
        self._adapters: AdapterUse | None = None if has_whole_texts else pair.target.default_adapters
        _check_rows_can_begin_texts(pair, are_whole_texts=has_whole_texts)
        self.path = path
        self._target_key = _key_of(pair.target, run_config.quant, run_config)
        self._draft_key = _key_of(pair.draft, run_config.draft_quant, run_config) if pair.draft else None
        self._common: list[int] = []
        self.ids: list[int] = []  # of the target's rows
        self._draft_ids: list[int] = []
        self._windows: dict[str, dict[str, Window]] = {"target": {}, "draft": {}}  # of states
        self._checked: object = None  # the identity of the file that these ids are of
        self._is_used = True
        if path.is_dir() or not path.parent.is_dir():
            raise _refused(path, "is a folder" if path.is_dir() else "lies in a folder that is not there")
        with contextlib.suppress(FileNotFoundError), self._opened():
            pass

    def keep_beginning(self, prompts: Iterable[Sequence[int]]) -> None:
        """Let the file have what these prompts begin with alike, once a text has read it."""
        first, *others = prompts
        self._common = list(first[:-1])  # the last token's row is always computed
        for prompt in others:
            del self._common[shared_length(self._common, prompt) :]

    @property
    def num_common(self) -> int:
        """The number of tokens that the prompts begin with alike."""
        return len(self._common)

    @property
    def num_known(self) -> int:
        """The number of those that the file has."""
        return shared_length(self.ids, self._common)

    def is_of(self, adapters: AdapterUse) -> bool:
        """Return whether the file's rows, where it has any, are of texts with these adapters."""
        return self._adapters is None or self._adapters == adapters

    def shared(self, ids: Sequence[int], adapters: AdapterUse) -> int:
        """Return how many rows of a prompt the file has; the last token's is always computed."""
        return self._reach("target", shared_length(self.ids, ids[:-1])) if self.is_of(adapters) else 0

    def has_whole(self, ids: Sequence[int], adapters: AdapterUse) -> bool:
        """Return whether a text that goes on from all these tokens can begin on the file."""
        return self.is_of(adapters) and self._reach("target", shared_length(self.ids, ids)) == len(ids)

    def _reach(self, role: str, rows: int) -> int:
        return reach(rows, [window.cut for window in self._windows[role].values()])

    def begin(
        self, ids: Sequence[int], target: CausalModel, draft: CausalModel | None, adapters: AdapterUse
    ) -> TextCaches | None:
        """Return caches with the rows that the file has of this prompt; None where those are too few to pay."""

        def filled(rows: PromptRows) -> TextCaches | None:
            num_shared = self.shared(ids, adapters)
            if num_shared < MIN_TOKENS:
                return None
            caches = new_caches(target, draft, adapters)
            num_draft = self._reach("draft", shared_length(self._draft_ids, ids[:num_shared]))
            for role, cache, count in (("target", caches.target, num_shared), ("draft", caches.draft, num_draft)):
                if cache is not None and count:
                    cache.fill(rows.beginning(role, count, target.device), list(ids[:count]), self._windows[role])
            return caches

        return self._from_file(filled)

    def keep(self, caches: TextCaches) -> None:
        """Write what the file should have, where it lacks it and these rows have it; what fails ends nothing."""
        common = self._common
        if (
            len(common) < MIN_TOKENS
            or not self.is_of(caches.target.adapters)
            or (caches.shared(common, caches.target.adapters) < len(common))
        ):
            return
        self._from_file(lambda _: None)  # another run may have written it by now
        if not self._is_used or not self._lacks(common, caches):
            return
        try:
            rows = rows_of(caches.copy_of(common))
            self.write(rows)
            self.has_written(rows)
        except (OSError, SafetensorError) as error:  # safetensors words a full disk in its own way
            logger.warning("the prompt cache '%s' cannot be written: %s", self.path, error)
        self._common = []  # once a run

    def write(self, rows: TextRows) -> None:
        """Let the file have these rows; raises OSError and SafetensorError, which leave it as it was.

        Any thread may: what the file is known to have changes by `has_written` alone.
        """
        header = {
            "schema": SCHEMA,
            "target": self._target_key,
            "draft": self._draft_key,
            **{name: use for name, use in self._used(rows).items() if use},
            "ids": rows.ids,
            "digest": digest_of(rows.ids, rows.tensors),
        }
        with written_whole(self.path) as partial:
            save_file(rows.tensors, partial, metadata={HEADER: json.dumps(header)})
        note_use(self.path)

    def has_written(self, rows: TextRows) -> None:
        """Note that the file has these rows by now."""
        self.ids, self._draft_ids = rows.ids["target"], rows.ids["draft"]
        self._adapters = rows.adapters["target"]
        self._windows = {role: windows_of(role, rows.tensors, rows.tensors.__getitem__) for role in self._windows}

    def _from_file(self, use: Callable[[PromptRows], TextCaches | None]) -> TextCaches | None:
        """Return what is made of the file as it is now; None where there is none, or none that is of any use."""
        if not self._is_used:
            return None
        try:
            with self._opened() as rows:
                return use(rows)
        except FileNotFoundError:
            if self.ids:
                self._leave(_refused(self.path, "is gone"))
        except EdgespecError as error:  # it was overwritten or replaced
            self._leave(error)
        return None

    def _leave(self, error: EdgespecError) -> None:
        logger.warning("the prompt cache is no longer used: %s", error.what)
        self._is_used = False
        self.ids, self._draft_ids, self._common = [], [], []

    def _lacks(self, common: list[int], caches: TextCaches) -> bool:
        """Return whether the file has none of these rows, or the first of them alone, or none of the draft's.

        A file that goes on with other tokens is left as it is: else two prompts with one beginning would write in turn.
        """
        shared = shared_length(self.ids, common)
        if shared < MIN_TOKENS:
            return True
        has_more = caches.draft is not None and len(caches.draft.ids) >= MIN_TOKENS and not self._draft_ids
        return len(self.ids) == shared < len(common) or has_more

    @contextlib.contextmanager
    def _opened(self) -> Iterator[PromptRows]:
        """Yield the open file, checked; raises FileNotFoundError, and EdgespecError for one that cannot be used."""
        try:
            with self.path.open("rb") as file:
                rows = PromptRows(file)
                if rows.identity != self._checked:
                    self._check(rows)
                yield rows
                rows.check_unchanged()
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _refused(self.path, f"cannot be read ({error})") from error

    def _check(self, rows: PromptRows) -> None:
        """Take a file's ids for those that count, once its header and its rows are found to be right."""
        header = rows.content
        if not isinstance(header, dict) or header.get("schema") != SCHEMA:
            raise _refused(self.path, f"is no prompt cache of schema {SCHEMA!r}")
        self._check_key(header)
        self._check_adapters(header)
        if rows.digest() != header["digest"]:
            raise _refused(self.path, "is damaged: its rows are not those that were written")
        rows.check_unchanged()
        # Another draft's rows are of no use, and replaced.
        is_of_draft = header["draft"] == self._draft_key and self._is_of_draft(header)
        draft_ids = header["ids"]["draft"] if is_of_draft else []
        self.ids, self._draft_ids, self._checked = header["ids"]["target"], draft_ids, rows.identity
        self._windows = {role: rows.windows(role) for role in self._windows}
        note_use(self.path)

    def _check_key(self, header: dict[str, Any]) -> None:
        theirs, ours = header["target"], self._target_key
        if theirs["model"] != ours["model"]:
            raise _refused(self.path, f"is of '{theirs['name']}' ({theirs['model']}), not of '{ours['name']}' as it is")
        for name in [name for name in ours if name not in {"model", "name"}]:
            if theirs[name] != ours[name]:
                raise _refused(self.path, f"was made with `{name}={theirs[name]}`, and this is `{name}={ours[name]}`")

    def _used(self, rows: TextRows) -> dict[str, Any]:
        """Return the adapters of rows by their contents, under what a header calls them."""
        return {
            f"{role} adapters": use_digest(model.adapters, rows.adapters[role])
            for role, model in self._models.items()
            if model is not None
        }

    def _check_adapters(self, header: dict[str, Any]) -> None:
        """Take the adapters of a file's rows; raises EdgespecError for others than this file is to be of."""
        target = self._models["target"]
        assert target is not None
        theirs = header.get("target adapters", [])
        known = {one.digest: one.name for one in target.adapters}
        use = tuple((known.get(digest, ""), scale) for digest, scale in theirs)
        if any(not name for name, _ in use) or not self.is_of(use):
            raise _refused(self.path, "is of texts with other adapters, or none")
        self._adapters = use

    def _is_of_draft(self, header: dict[str, Any]) -> bool:
        """Return whether a file's rows of the draft have the adapters that the draft has beside the target's."""
        draft = self._models["draft"]
        assert self._adapters is not None
        if draft is None:
            return True
        use = self._adapters if is_copy(draft.parts) else draft.default_adapters
        return bool(header.get("draft adapters", []) == use_digest(draft.adapters, use))


def rows_of(caches: TextCaches) -> TextRows:
    """Return a copy of a text's rows."""
    both = {"target": caches.target, "draft": caches.draft}
    found = {role: cache for role, cache in both.items() if cache is not None and cache.ids}
    return TextRows(
        ids={role: list(found[role].ids) if role in found else [] for role in both},
        tensors={f"{role}.{name}": rows for role, cache in found.items() for name, rows in cache.tensors().items()},
        adapters={role: () if cache is None else cache.adapters for role, cache in both.items()},
    )


def _refused(path: Path, what: str) -> EdgespecError:
    return EdgespecError("E_PROMPT_CACHE", f"'{path}' {what}.", "Name another file for `prompt_cache`, or remove it.")
