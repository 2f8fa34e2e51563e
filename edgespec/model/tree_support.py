"""How a model is decoded: through token trees, by chains where its cache follows no branches, or else plainly.

Trials on a narrow random copy find which: trees against paths (`edgespec.model.self_check`), and for what fails there
two texts in company against transformers' own generate, which for chains read more rows than they keep.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.errors import EdgespecError
from edgespec.model.narrow_copy import VOCAB
from edgespec.model.own_pass_model import UNCACHED, OwnPassModel
from edgespec.model.own_pass_text import OwnPassText
from edgespec.model.pass_rows import next_rows
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
from edgespec.model.supported import FIX, no_tree_reason
from edgespec.model.target import Target
from edgespec.tree.token_tree import chain_of
from offload.text_part import language_model

FIRST_TOKENS = 17  # of a text, which is read in one piece
NEW_TOKENS = 13  # that follow, token by token
PIECES = (3, 1, 9)  # of them, read at once
CHAINS = ((6, 2), (5, 5), (4, 1), (3, 2), (6, 3))  # rows that are read at once, and how many of them are kept
BOTH_WAYS = "reads a text in both directions"


Support = Literal["trees", "chains", "plainly"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSupport:
    """Whether texts grow through trees, by chains, or by a token a pass, and what the family's own cache can do."""

    why: str | None = None  # the rest of a sentence: why no trees can be followed; None: they can
    reads_on: bool = False  # whether several rows may follow others in the family's own cache
    cuts_back: bool = False  # and whether the last of them can be removed again, so that others may follow

    @property
    def name(self) -> Support:
        """Its name."""
        if self.why is None:
            return "trees"
        return "chains" if self.cuts_back else "plainly"

    @property
    def is_plain(self) -> bool:
        """Whether texts grow by a token a pass."""
        return self.name == "plainly"

    @property
    def has_own_passes(self) -> bool:
        """Whether texts are read by transformers' own forward, with its own cache."""
        return self.why is not None

    @property
    def in_words(self) -> str:
        """How a model whose passes are its own is decoded, and why, as the rest of a sentence."""
        how = "plainly, one token a pass" if self.is_plain else "by chains, trees without branches"
        return f"decoded {how}, because it {self.why}"

    def check_takes(self, model_type: str, *, is_language_model: bool) -> None:
        """Raise EdgespecError where a draft that was named can grow nothing; only some are language models."""
        if self.is_plain:
            fix = "Leave out `draft`, or use `policy=none`."
            what = f"model type '{model_type}' takes no draft: it is {self.in_words}."
            raise EdgespecError("E_PLAIN", what, fix)
        if self.has_own_passes and not is_language_model:
            what = (
                f"model type '{model_type}' takes no draft that reads its hidden states or is its copy: "
                f"it is {self.in_words}."
            )
            raise EdgespecError("E_PLAIN", what, "Use a language model for a draft, or leave out `draft`.")


def check_reads_trees(config: PretrainedConfig) -> None:
    """Raise EdgespecError for a draft whose configuration shows that its cache follows no trees."""
    why = no_tree_reason(config)
    if why is not None:
        what = f"model type '{config.model_type}' cannot draft, because it {why}."
        raise EdgespecError("E_PLAIN", what, "Use a draft that reads trees; docs/models.md lists the types.")


def support_of(config: PretrainedConfig, *, device: torch.device, is_tried: bool = True) -> TreeSupport:
    """Return how a model is decoded; raises EdgespecError for one that can be shown to work in no way.

    Without `is_tried` only what the configuration shows counts.
    """
    why = no_tree_reason(config)
    if not is_tried:
        return TreeSupport(why=why)
    failure = None
    if why is None:
        try:
            check_tree_reading(config, device=device)
        except EdgespecError as error:
            failure = error
        else:
            return TreeSupport()
    try:
        found: TreeSupport | str = _of_own_passes(trial_of(config, device=device))
    except Exception as error:  # a family's code may raise anything; then nothing is verified
        found = first_line_of(error)
    if isinstance(found, TreeSupport):
        return replace(found, why=why or _in_short(failure))
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
def _of_own_passes(trial: Trial) -> TreeSupport | str:
    """Return what the family's own cache can do, or the fault of a text that is decoded plainly."""
    model, tokens = random_model_and_text(trial)
    if not _reads_forwards(model, tokens):
        return BOTH_WAYS
    texts, expected = zip(*(_generated(copy.deepcopy(model), text) for text in _beginnings(tokens)), strict=True)
    in_company = OwnPassModel(model, device=trial.device, reads_on=False)
    caches = [in_company.new_text() for _ in texts]
    for step in range(NEW_TOKENS + 1):
        ends = [len(text) - NEW_TOKENS + step for text in texts]
        rows = [text[cache.length : end] for text, cache, end in zip(texts, caches, ends, strict=True)]
        for logits, wanted in zip(_read(in_company, caches, rows), expected, strict=True):
            error = _error(logits, wanted[step])
            if not error < TOLERANCE:
                return f"logits {step} after the prompt are off by {error:.2g} of the largest"
    in_company.close()
    if not _fits(_pieces_fit, model, texts[:1], expected, trial.device):
        return TreeSupport()
    return TreeSupport(reads_on=True, cuts_back=_fits(_chains_fit, model, texts, expected, trial.device))


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
    options |= {"use_cache": model.config.model_type not in UNCACHED}
    found = language_model(model).generate(  # type: ignore[operator]
        input_ids=prompt[None], attention_mask=torch.ones_like(prompt)[None], **options
    )
    return found.sequences[0, :-1], [logits[0] for logits in found.logits]


def _read(model: OwnPassModel, caches: Sequence[OwnPassText], rows: Sequence[Tensor]) -> list[Tensor]:
    """Append rows [n] to texts in one pass, and return the logits [vocab] after each."""
    found = model.read([next_rows(cache, ids) for cache, ids in zip(caches, rows, strict=True)])
    for cache, ids in zip(caches, rows, strict=True):
        cache.commit_next(ids.tolist())
    return [logits[-1] for logits in found]


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits, as a part of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


Reading = Callable[[OwnPassModel, Sequence[Tensor], Sequence[Sequence[Tensor]]], bool]


def _fits(
    reading: Reading,
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    expected: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> bool:
    """Return whether a way to read texts can be taken, and gives the logits of texts that are read token by token."""
    plain = OwnPassModel(model, device=device, reads_on=True)
    try:
        return reading(plain, texts, expected)
    except Exception:  # a cache that takes one row only, or gives none back, may raise anything
        return False
    finally:
        plain.close()


def _pieces_fit(model: OwnPassModel, texts: Sequence[Tensor], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether a text that is read by pieces of several rows has the logits of one that is read whole."""
    text = texts[0]
    cache, first = model.new_text(), len(text) - NEW_TOKENS
    _read(model, [cache], [text[:first]])
    for count in PIECES:
        (logits,) = _read(model, [cache], [text[first : first + count]])
        first += count
        if not _error(logits, expected[0][first - len(text) + NEW_TOKENS]) < TOLERANCE:
            return False
    return True


def _chains_fit(model: OwnPassModel, texts: Sequence[Tensor], expected: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether texts that grow by chains, of which they keep a part, have the logits of those read whole.

    They share their passes, and their chains are of unequal length.
    """
    targets = [Target(model) for _ in texts]
    starts = [len(text) - NEW_TOKENS for text in texts]
    for target, text, start in zip(targets, texts, starts, strict=True):
        target.begin(text[:start].tolist())
    targets[0].read([target.text_rows(start) for target, start in zip(targets, starts, strict=True)])
    for target, start in zip(targets, starts, strict=True):
        target.took_in(start)
    num_new = [0] * len(texts)
    for chains in zip(CHAINS, reversed(CHAINS), strict=True):
        rows = []
        for target, text, start, new, (num_read, num_kept) in zip(targets, texts, starts, num_new, chains, strict=True):
            kept = text[start + new : start + new + num_kept]
            others = (kept[-1] + torch.arange(1, 1 + num_read - num_kept, device=kept.device)) % VOCAB
            rows.append(target.tree_rows(chain_of(torch.cat([kept, others]))))
            if target.cache.length != start + new:  # the cache could not be cut, and the text would be read anew
                return False
        for number, logits in enumerate(targets[0].read(rows)):
            num_kept, new = chains[number][1], num_new[number]
            wanted = torch.stack(list(expected[number][new + 1 : new + 1 + num_kept]))
            if logits.shape[0] != chains[number][0] or not _error(logits[:num_kept], wanted) < TOLERANCE:
                return False
            targets[number].commit(tuple(range(1, num_kept)))
            num_new[number] += num_kept
    return True
