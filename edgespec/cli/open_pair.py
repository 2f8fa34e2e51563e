"""Opening the pair that a command is given: tokens that do not fit are answered with local models whose tokens do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from edgespec.cli.console import Console, named
from edgespec.cli.options.engine import EngineOptions
from edgespec.cli.options.model import ModelOptions
from edgespec.cli.options.template import TemplateOptions
from edgespec.cli.spelling import spelled
from edgespec.config import require
from edgespec.errors import EdgespecError
from edgespec.hub.gguf_models import size
from edgespec.hub.names import WORDS

if TYPE_CHECKING:
    from edgespec.pair.at_hand import FoundDraft
    from edgespec.pair.pair import ModelPair
    from edgespec.placement.parallel import Workload
    from edgespec.placement.run_config import RunConfigOptions

NUM_NAMED = 3
MAX_LOOKING_S = 10.0  # the user waits for an error
GLANCE_S = 1.0  # and here for a text


def open_named_pair(
    models: ModelOptions, template: TemplateOptions | None = None, *, may_choose: bool = False
) -> ModelPair:
    """The pair, as `open_pair` checks it; where the token ids differ, the error names local drafts that fit.

    Raises EdgespecError for several drafts where none of them `may_choose`.
    """
    from edgespec.chat.given_template import with_template
    from edgespec.chat.tools import Toolset
    from edgespec.pair.pair import open_pair

    with naming_drafts(models):
        pair = open_pair(models.target, models.drafts or models.draft, models.tokenizer)
    pair = pair.with_adapters(models.adapters, models.draft_adapters)
    require(may_choose or not pair.is_undecided, "several drafts are named where one is needed.", "Name one with -md.")
    if template is None:
        return pair
    pair = with_template(pair, template.template, template.values)
    if template.reasoning_budget is None:
        return pair
    pair = replace(
        pair, reasoning_budget=template.reasoning_budget, reasoning_budget_message=template.reasoning_budget_message
    )
    Toolset().budget(pair, ())  # which refuses it where no thought could be bounded
    return pair


@contextmanager
def naming_drafts(models: ModelOptions) -> Iterator[None]:
    """Within this block an error of token ids that differ names local drafts that fit."""
    places = [path for path in (models.draft, *models.drafts) if path is not None and path not in WORDS]
    target, draft = models.target, places[0] if places else None
    try:
        yield
    except EdgespecError as error:
        if error.code != "E_TOKENIZER_MISMATCH" or target is None or draft is None:
            raise
        found = _fitting_drafts(target, draft)
        if not found:
            raise
        fix = f"Use a draft with the target's tokens: {', '.join(found)}; or --policy none without a draft."
        raise EdgespecError(error.code, error.what, fix) from error


def open_pair_for(console: Console, options: EngineOptions) -> ModelPair:
    """The pair for making texts, which may lack a draft; without trees it is checked, and left out.

    Of several drafts `decided` takes one, once it is known how texts are drawn.
    """
    from edgespec.model.supported import no_tree_reason

    pair = open_named_pair(options.models, options.template, may_choose=True).tried(options.self_check)
    tree = options.trees.settings
    if not tree.needs_draft:
        return replace(pair, draft=None, at_hand=())
    if pair.is_undecided:
        return pair
    if pair.draft is None and no_tree_reason(pair.target.config) is None:  # else the plan says why
        console.say("no draft (-md): trees have what the text repeats" if tree.lookup else
                    "no draft (-md): decoding plainly, one token a pass")  # fmt: skip
    if options.models.draft is None and not console.quiet:
        _say_what_fits(console, pair, options.models)
    return pair


def _say_what_fits(console: Console, pair: ModelPair, models: ModelOptions) -> None:
    """Name drafts of this machine that nobody has named, and that would fit.

    Nothing is said of a target whose cache follows no trees as its configuration is: trials would say what it takes.
    """
    from edgespec.model.supported import no_tree_reason
    from edgespec.pair.at_hand import drafts_at_hand, those_that_fit
    from edgespec.pair.pair import tokens_of

    if models.target is None or no_tree_reason(pair.target.config) is not None:
        return
    tokens = tokens_of(models.tokenizer or pair.target.folder, pair.tokenizer)
    found = drafts_at_hand(pair.target, tokens=tokens, limit_s=GLANCE_S)
    fitting = [one for one in those_that_fit(found) if not one.is_default]
    if fitting:
        what = named([_named(one) for one in fitting], most=NUM_NAMED)
        console.say(f"drafts here that fit: {what} (-md takes one, and -md auto the one that pays most)")


def decided(
    pair: ModelPair, options: EngineOptions, *, temperature: float, workload: Workload | None = None,
    **run_options: Unpack[RunConfigOptions],
) -> ModelPair:  # fmt: skip
    """The pair with the one of its drafts that pays most by the sums of estimates, where one is still to be chosen.

    `run_options` are what is known of the run's texts, beside the machine's options.
    """
    from edgespec.estimate.choice import DraftTrees, with_best_draft
    from edgespec.placement.run_config import DEFAULT_CONTEXT_TOKENS

    context_tokens = options.machine.ctx_size or min(DEFAULT_CONTEXT_TOKENS, pair.max_context or DEFAULT_CONTEXT_TOKENS)
    run_options = {**options.machine.options(context_tokens=context_tokens), **run_options}
    trees = DraftTrees.given(options.trees)
    return with_best_draft(pair, trees, temperature=temperature, workload=workload, **run_options)


def open_pair_with_draft(models: ModelOptions, purpose: str) -> ModelPair:
    """The pair for a `purpose` that takes a draft, or the target's own layer; raises EdgespecError for neither."""
    pair = replace(open_named_pair(models), has_default_draft=False)  # whether it pays is what is measured
    if pair.draft is None:
        raise EdgespecError("E_SETTING", f"there is no draft to {purpose}.", "Name one with -md.")
    return pair


def _fitting_drafts(target: Path, draft: Path) -> list[str]:
    """Name the smallest drafts for the target, with their ratios; none where looking for them fails."""
    from edgespec.pair.at_hand import drafts_at_hand, those_that_fit
    from edgespec.pair.folder import open_model

    try:
        model = open_model(target)
        found = those_that_fit(drafts_at_hand(model, near=[draft], limit_s=MAX_LOOKING_S))
    except Exception:  # the search is a courtesy: if it fails, the first error is still the one to report
        return []
    return [_in_words(one, model.checkpoint.num_bytes) for one in found[:NUM_NAMED]]


def _in_words(draft: FoundDraft, target_bytes: int) -> str:
    return f"{_as_option(draft.name)} ({target_bytes / max(1, draft.num_bytes):.3g} times smaller)"


def _named(draft: FoundDraft) -> str:
    return f"{_as_option(draft.name)} ({draft.in_words}, {size(draft.num_bytes)})"


def _as_option(name: str) -> str:
    """Return a draft's name as -md takes it: its revision has an option of its own, and the line is one line."""
    return spelled(name.replace(" `revision=", " `draft_revision=")).replace("\n", "\\n")
