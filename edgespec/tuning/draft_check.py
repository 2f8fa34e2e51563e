"""A published draft is checked with its target once: what was found is kept, by the fingerprints of both."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from edgespec.draft.agreement import (
    CHECK_TEXTS,
    CHECK_TOKENS,
    LEAST_TOKENS,
    Agreement,
    Comparison,
    Misplaced,
    compare_readings,
)
from edgespec.draft.mtp import MtpFuse
from edgespec.draft.own_parts import aux_states_of, has_readings, lent_layers
from edgespec.draft.readings import AS_STATED, Reading, apply_reading
from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel
from edgespec.pair.folder import fingerprint, read_json
from edgespec.pair.pair import DEMO_FOLDER, ModelPair
from edgespec.user_paths import cache_folder, make_folder, written_whole

HEALTHY = 0.3  # agreement on the next token, below which something is wrong
FORMAT = 6

logger = logging.getLogger("edgespec.tuning")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedKind:
    """A form of drafts that are checked, as the result names it."""

    healthy: str  # what is known of published ones
    remedy: str  # where one agrees far less
    flipped_output: str = "norm_output is the other way round"


HEADS = CheckedKind(
    healthy="where published heads reach 60% and more",
    remedy="it may be of another target, or read other hidden states; name them in its config.json (edgespec_taps), or "
    "use another draft",
)
LAYERS = CheckedKind(
    healthy="where published layers reach 80%",
    remedy="it may be of another version of the target, or have lost too much where it was quantised; `draft=none` "
    "leaves it out",
    flipped_output="its own output is recycled before its norm",
)
ASSISTANTS = dataclasses.replace(LAYERS, remedy="it may be of another target; use another draft")
BLOCKS = CheckedKind(
    healthy="which is little",
    remedy="it may be of another target, or read other hidden states; use another draft",
)


def _kind(draft: PreTrainedModel) -> CheckedKind:
    if hasattr(draft, "block"):
        return BLOCKS
    if lent_layers(draft):
        return ASSISTANTS
    return LAYERS if isinstance(draft.fuse, MtpFuse) else HEADS


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheck:
    """What the check of a draft has found."""

    comparison: Comparison
    is_new: bool  # found now, and not in an earlier run
    kind: CheckedKind

    @property
    def is_worth_saying(self) -> bool:
        """Return whether somebody should know of it: when it is new, or something is wrong."""
        found = self.comparison
        is_wrong = found.reading != AS_STATED or found.misplaced is not None or found.best.first < HEALTHY
        return self.is_new or is_wrong

    @property
    def in_words(self) -> str:
        """The agreement, and how the draft is read, in one line."""
        found = self.comparison
        agreed = f"its likeliest token is the target's for {_in_words(found.best)}"
        if found.reading != AS_STATED:
            agreed += (
                f" when {_change(found.reading, self.kind)}, and for {_in_words(found.stated)} as its config.json "
                "says; the former is used; where `draft_check` is off, the latter"
            )
        if found.misplaced is not None:
            side = "later" if found.misplaced.later > 0 else "earlier"
            placed = f"features of a token {side}"
            placed = placed if found.misplaced.what == "features" else f"what it drafts placed a token {side}"
            return (
                f"{agreed}; with {placed} it would be for {_in_words(found.misplaced.agreement)}, so positions are off "
                "by one, in the draft or in how it is read: texts stay right, and fewer tokens are accepted; use "
                "another draft, or report this"
            )
        if found.best.first < HEALTHY:
            return f"{agreed}, {self.kind.healthy}: {self.kind.remedy}"
        return agreed


def _in_words(agreement: Agreement) -> str:
    return f"{agreement.first:.0%} of the next tokens and {agreement.second:.0%} of those after"


def _change(reading: Reading, kind: CheckedKind) -> str:
    layers = f"hidden states are taken {abs(reading.shift)} layer {'later' if reading.shift > 0 else 'earlier'}"
    changes = [
        *([layers] if reading.shift else []),
        *(["the target's last hidden state is taken before its norm"] if reading.before_norm else []),
        *(["norm_before_residual is the other way round"] if reading.flips_residual else []),
        *([kind.flipped_output] if reading.flips_output else []),
        *(["it reads the feature before the embedding"] if reading.swaps_inputs else []),
        *(["sample_from_anchor is the other way round"] if reading.flips_anchor else []),
    ]
    return " and ".join(changes)


class Loaded(Protocol):
    """Models that are loaded: whoever fails to use them closes them."""

    @property
    def target(self) -> CausalModel:
        """The target."""

    @property
    def draft(self) -> CausalModel | None:
        """The draft, if any."""

    def close(self) -> None:
        """Let both go."""


def check_draft(pair: ModelPair, loaded: Loaded) -> DraftCheck | None:
    """Return what was found of a published draft, now or once, and let it be read so; None for other drafts.

    Raises EdgespecError where the target cannot give the states that the draft reads, and closes the models then.
    """
    try:
        return _checked(pair, loaded.target, loaded.draft)
    except BaseException:  # an interrupt, too
        loaded.close()
        raise


def _checked(pair: ModelPair, target: CausalModel, draft: CausalModel | None) -> DraftCheck | None:
    if draft is None or pair.draft is None or not has_readings(draft.model):
        return None
    path = _cache_file(pair)
    found = _read_cached(path)
    is_new = found is None
    if found is None:
        most = min(CHECK_TOKENS, *(limit for limit in (target.max_context, draft.max_context) if limit))
        texts = [torch.tensor(ids, device=target.device) for ids in _texts(pair, most=most) if len(ids) >= LEAST_TOKENS]
        if not texts:
            return None
        found = compare_readings(target, draft, *texts)
        _write_cached(path, found)
    apply_reading(draft.model, found.reading, num_layers=int(target.config.num_hidden_layers))
    if draft.is_native:
        draft.use_native_passes()
    aux_states = aux_states_of(draft.model)
    if aux_states is not None:
        target.use_aux_states(aux_states)
    return DraftCheck(comparison=found, is_new=is_new, kind=_kind(draft.model))


def _texts(pair: ModelPair, *, most: int) -> Iterator[list[int]]:
    """Yield the tokens of texts that the target knows how to go on with: several files in turn, from their beginnings.

    What a reading gains or loses differs from file to file, more than chance explains in one.
    """
    lines = (DEMO_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    files = [pair.tokenizer(str(json.loads(line)["prompt"]), add_special_tokens=False)["input_ids"] for line in lines]
    begin = [token for token in pair.tokenizer("")["input_ids"][:1] if token == pair.tokenizer.bos_token_id]
    share = math.ceil(most / len(files))
    for number in range(CHECK_TEXTS):
        parts = [file[number * share : (number + 1) * share] for file in files]
        yield [token for part in (begin, *parts) for token in part if token < pair.vocab][:most]


def _cache_file(pair: ModelPair) -> Path:
    assert pair.draft is not None
    return cache_folder() / "draft-checks" / f"{fingerprint(pair.target)}-{fingerprint(pair.draft)}.json"


def _read_cached(path: Path) -> Comparison | None:
    """Return what is kept; None where nothing is, or of another version."""
    try:
        content: dict[str, Any] = read_json(path)
        if content.pop("format", None) != FORMAT:
            return None
        return Comparison(
            stated=Agreement(**content["stated"]),
            best=Agreement(**content["best"]),
            reading=Reading(**content["reading"]),
            misplaced=_misplaced(content["misplaced"]),
        )
    except (EdgespecError, OSError, KeyError, TypeError):
        return None


def _misplaced(content: dict[str, Any] | None) -> Misplaced | None:
    return None if content is None else Misplaced(**{**content, "agreement": Agreement(**content["agreement"])})


def _write_cached(path: Path, found: Comparison) -> None:
    try:
        make_folder(path.parent)
        with written_whole(path) as file:
            file.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(found)}), encoding="utf-8")
    except (EdgespecError, OSError) as error:
        logger.warning("what the draft's check found is not kept: %s", error)
