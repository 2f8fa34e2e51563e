"""Opening the pair that a command is given: tokens that do not fit are answered with local models whose tokens do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.console import Console
from edgespec.cli.options.engine import EngineOptions
from edgespec.cli.options.model import ModelOptions
from edgespec.cli.options.template import TemplateOptions
from edgespec.cli.spelling import spelled
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.doctor.inventory import LocalModel
    from edgespec.pair.pair import ModelPair

NUM_NAMED = 3
MAX_LOOKED_AT = 40  # folders; each takes up to a second, for its tokenizer
MAX_LOOKING_S = 10.0  # the user waits for an error


def open_named_pair(models: ModelOptions, template: TemplateOptions | None = None) -> ModelPair:
    """The pair, as `open_pair` checks it; where the token ids differ, the error names local drafts that fit."""
    from edgespec.chat.given_template import with_template
    from edgespec.chat.tools import Toolset
    from edgespec.pair.pair import open_pair

    with naming_drafts(models):
        pair = open_pair(models.target, models.draft, models.tokenizer)
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
    target, draft = models.target, models.draft
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
    """The pair for making texts, which may lack a draft; without trees it is checked, and left out."""
    from edgespec.model.supported import no_tree_reason

    pair = open_named_pair(options.models, options.template).tried(options.self_check)
    tree = options.trees.settings
    if not tree.needs_draft:
        return replace(pair, draft=None)
    if pair.draft is None and no_tree_reason(pair.target.config) is None:  # else the plan says why
        console.say("no draft (-md): trees have what the text repeats" if tree.lookup else
                    "no draft (-md): decoding plainly, one token a pass")  # fmt: skip
    return pair


def open_pair_with_draft(models: ModelOptions, purpose: str) -> ModelPair:
    """The pair for a `purpose` that takes a draft, or the target's own layer; raises EdgespecError for neither."""
    pair = replace(open_named_pair(models), has_default_draft=False)  # whether it pays is what is measured
    if pair.draft is None:
        raise EdgespecError("E_SETTING", f"there is no draft to {purpose}.", "Name one with -md.")
    return pair


def _fitting_drafts(target: Path, draft: Path) -> list[str]:
    """Name the smallest drafts for the target, with their ratios; none where looking for them fails."""
    from edgespec.doctor.inventory import Inspector, drafts_for

    inspector, models = Inspector(), []
    ends_at = time.monotonic() + MAX_LOOKING_S
    try:
        target_model = inspector.inspect(str(target), target)
        found = _places_near(target, draft)
    except Exception:  # the search is a courtesy: if it fails, the first error is still the one to report
        return []
    for name, folder in found[:MAX_LOOKED_AT]:
        if time.monotonic() > ends_at:
            break
        try:
            models.append(inspector.inspect(name, folder))
        except Exception:  # as above; other folders may still hold a draft
            continue
    return [_in_words(target_model, model) for model in drafts_for(target_model, models)[:NUM_NAMED]]


def _places_near(target: Path, draft: Path) -> list[tuple[str, Path]]:
    """Return names and folders of the models beside the two, then of those in the local cache, each folder once."""
    from edgespec.doctor.places import places

    # What lies beside a snapshot of the cache are other revisions of it.
    parents = {path.absolute().parent for path in (target, draft)}
    beside = sorted(path for path in parents if path.name != "snapshots")
    found = {folder.resolve(): (name, folder) for name, folder in places(beside, depth=1)}
    for path in (target, draft):
        found.pop(path.resolve(), None)
    # Those beside come first: a large cache must not use up the folders that are looked at.
    return sorted(found.values(), key=lambda model: model[1].parent not in parents)


def _in_words(target: LocalModel, draft: LocalModel) -> str:
    # A draft's revision has an option of its own; and the fix is one line even if a name has a newline.
    name = spelled(draft.name.replace(" `revision=", " `draft_revision="))
    return f"{name.replace(chr(10), chr(92) + 'n')} ({target.draft_ratio(draft.num_parameters)})"
