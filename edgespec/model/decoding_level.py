"""How a model is decoded: through token trees, or plainly where its cache cannot follow them.

Which of the two is found by trials on a narrow random copy: trees against paths (`edgespec.model.self_check`), and for
what fails there, two texts in company against transformers' own generate.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.model.pass_rows import next_rows
from edgespec.model.plain_model import PlainModel
from edgespec.model.plain_text import PlainText
from edgespec.model.self_check import (
    OTHER_TOKENS,
    TOLERANCE,
    Trial,
    check_tree_reading,
    first_line_of,
    plain_logits,
    random_model_and_text,
    trial_of,
)
from edgespec.model.supported import FIX, plain_reason
from offload.text_part import language_model

FIRST_TOKENS = 17  # of a text, which is read in one piece
NEW_TOKENS = 13  # that follow, token by token
PIECES = (3, 1, 9)  # of them, read at once
BOTH_WAYS = "reads a text in both directions"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLevel:
    """Whether texts grow through trees, or by a token a pass, and what was found of the latter."""

    why: str | None = None  # the rest of a sentence: why no trees can be followed; None: they can
    reads_on: bool = False  # whether several rows may follow others in the family's own cache

    @property
    def is_plain(self) -> bool:
        """Whether texts grow by a token a pass."""
        return self.why is not None

    @property
    def in_words(self) -> str:
        """How a model that is decoded plainly is decoded, and why, as the rest of a sentence."""
        return f"decoded plainly, one token a pass, because it {self.why}"

    def check_no_draft(self, model_type: str) -> None:
        """Raise EdgespecError where trees cannot be followed, for a draft that was named to grow some."""
        if self.is_plain:
            fix = "Leave out `draft`, or use `policy=none`."
            what = f"model type '{model_type}' takes no draft: it is {self.in_words}."
            raise EdgespecError("E_PLAIN", what, fix)


def check_reads_trees(config: PretrainedConfig) -> None:
    """Raise EdgespecError for a draft whose configuration shows that its cache follows no trees."""
    why = plain_reason(config)
    if why is not None:
        what = f"model type '{config.model_type}' cannot draft, because it {why}."
        raise EdgespecError("E_PLAIN", what, "Use a draft that reads trees; docs/models.md lists the types.")


def level_of(config: PretrainedConfig, *, device: torch.device, is_tried: bool = True) -> DecodingLevel:
    """Return the level of a model; raises EdgespecError for one that can be shown to work at none.

    Without `is_tried` only what the configuration shows counts.
    """
    why = plain_reason(config)
    if not is_tried:
        return DecodingLevel(why=why)
    failure = None
    if why is None:
        try:
            check_tree_reading(config, device=device)
        except EdgespecError as error:
            failure = error
        else:
            return DecodingLevel()
    try:
        found: bool | str = _reads_on(trial_of(config, device=device))
    except Exception as error:  # a family's code may raise anything; then nothing is verified
        found = first_line_of(error)
    if isinstance(found, bool):
        return DecodingLevel(why=why or _in_short(failure), reads_on=found)
    if found == BOTH_WAYS:
        raise EdgespecError("E_UNSUPPORTED_ARCHITECTURE", f"model type '{config.model_type}' {found}.", FIX)
    raise EdgespecError(
        "E_SELF_CHECK",
        f"model type '{config.model_type}' could not be shown to be decoded correctly with transformers "
        f"{transformers.__version__}: {found}.",
        "Use another model, or another version of transformers; `self_check=False` runs it without the check, at your "
        "own risk.",
    )


def _in_short(failure: EdgespecError | None) -> str:
    """Return why the trial of trees failed, as the rest of a sentence."""
    what = "" if failure is None else failure.what
    known = what.partition(": it ")[2].partition(";")[0]
    return (
        known
        or f"could not be shown to read token trees ({what.partition(transformers.__version__ + ': ')[2].rstrip('.')})"
    )


@functools.lru_cache
@torch.no_grad()
def _reads_on(trial: Trial) -> bool | str:
    """Return whether several rows may follow others, or the fault of a text that is decoded plainly."""
    model, tokens = random_model_and_text(trial)
    if not _reads_forwards(model, tokens):
        return BOTH_WAYS
    texts, expected = zip(*(_generated(copy.deepcopy(model), text) for text in _beginnings(tokens)), strict=True)
    in_company = PlainModel(model, device=trial.device, reads_on=False)
    caches = [in_company.new_text() for _ in texts]
    for step in range(NEW_TOKENS + 1):
        ends = [len(text) - NEW_TOKENS + step for text in texts]
        rows = [text[cache.length : end] for text, cache, end in zip(texts, caches, ends, strict=True)]
        for logits, wanted in zip(_read(in_company, caches, rows), expected, strict=True):
            error = _error(logits, wanted[step])
            if not error < TOLERANCE:
                return f"logits {step} after the prompt are off by {error:.2g} of the largest"
    in_company.close()
    return _pieces_fit(model, texts[0], expected[0], trial.device)


def _beginnings(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return two prompts of unequal length."""
    return tokens[:FIRST_TOKENS], tokens.flip(0)[:OTHER_TOKENS]


def _reads_forwards(model: PreTrainedModel, tokens: Tensor) -> bool:
    """Return whether a token's logits are the same with and without the tokens after it."""
    whole, beginning = plain_logits(model, tokens[:FIRST_TOKENS]), plain_logits(model, tokens[: FIRST_TOKENS // 2])
    return _error(whole[len(beginning) - 1], beginning[-1]) < TOLERANCE


def _generated(model: PreTrainedModel, prompt: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a prompt [n] with what transformers' own generate adds to it, and the logits [vocab] of each addition."""
    options: Any = {"max_new_tokens": NEW_TOKENS + 1, "do_sample": False, "eos_token_id": None}
    options |= {"forced_eos_token_id": None, "forced_bos_token_id": None, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    found = language_model(model).generate(  # type: ignore[operator]
        input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None], **options
    )
    return found.sequences[0, :-1], [logits[0] for logits in found.logits]


def _read(model: PlainModel, caches: Sequence[PlainText], rows: Sequence[Tensor]) -> list[Tensor]:
    """Append rows [n] to texts in one pass, and return the logits [vocab] after each."""
    found = model.read([next_rows(cache, ids) for cache, ids in zip(caches, rows, strict=True)])
    for cache, ids in zip(caches, rows, strict=True):
        cache.commit_next(ids.tolist())
    return [logits[-1] for logits in found]


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits [vocab], as a part of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def _pieces_fit(model: PreTrainedModel, text: Tensor, expected: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether a text that is read by pieces of several rows has the logits of one that is read whole."""
    in_pieces = PlainModel(model, device=device, reads_on=True)
    cache, first = in_pieces.new_text(), len(text) - NEW_TOKENS
    try:
        _read(in_pieces, [cache], [text[:first]])
        for count in PIECES:
            (logits,) = _read(in_pieces, [cache], [text[first : first + count]])
            first += count
            if not _error(logits, expected[first - len(text) + NEW_TOKENS]) < TOLERANCE:
                return False
    except Exception:  # a cache that takes one row only may raise anything
        return False
    finally:
        in_pieces.close()
    return True
