"""The options that name models; what -m, -md and TARGET mean: names become folders here."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from edgespec.cli.config.groups import load_config
from edgespec.cli.console import Console, OnProgress
from edgespec.cli.options.files import Named, check_files
from edgespec.cli.options.record import FOLDER, argument, option, options_of
from edgespec.errors import EdgespecError
from edgespec.hub.adapter_names import NamedAdapter, named_adapter, on_its_base
from edgespec.hub.cache import cached_repositories
from edgespec.hub.download import Progress
from edgespec.hub.names import AUTO, BUILT_IN_HEAD, NO_DRAFT, SELF, resolve_drafts, resolve_model
from edgespec.hub.user_config import UserConfig

GIB = 1 << 30
DRAFT_SPELLINGS = ("--draft-model", "--draft", "--model-draft", "--assistant-model")
MODEL_HELP = "Use this target: a folder, a GGUF file, or a configured or cached name. [default: built in]"
DRAFT_HELP = "Draft by this, mtp, self, none, auto, or A,B."
REVISION_HELP = "Use this branch, tag or commit of the target, by its name in the cache. [main]"
DRAFT_REVISION_HELP = "Use this branch, tag or commit of the draft."
TOKENIZER_HELP = "Use this folder's tokenizer in the place of the target's; its tokens have to be the same."
LORA_HELP = (
    "Add this LoRA adapter, a folder or a GGUF file, with :SCALE behind it; 0 is for texts that name it. Repeatable."
)
LORA_DRAFT_HELP = "Add this LoRA adapter to a draft of its own. Repeatable."
CONFIG_HELP = "Read this configuration above the user's own."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The folders of target and draft; without a target, the built-in pair."""

    target: Path | None
    draft: Path | None
    tokenizer: Path | None = None
    drafts: tuple[Path, ...] = ()  # in place of one, where one of them is to be chosen
    adapters: tuple[NamedAdapter, ...] = ()
    draft_adapters: tuple[NamedAdapter, ...] = ()

    def named_folders(self) -> Iterator[Named]:
        """Yield the folders that there are, with what messages call them."""
        drafts = [("the draft", folder) for folder in (self.draft, *self.drafts)]
        for name, folder in (("the target", self.target), *drafts, ("the tokenizer", self.tokenizer)):
            if folder is not None:
                yield name, folder
        yield from ((f"the adapter {one.name}", one.path) for one in (*self.adapters, *self.draft_adapters))


def complete_model(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names that the shell may offer, beside folders and files."""
    try:
        aliases = load_config(context).aliases
    except EdgespecError:  # said by the command itself
        aliases = {}
    names = [*aliases, *(name for name, _ in cached_repositories())]
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetNames:
    """The name of a target alone."""

    model: str | None = option("-m", "--model", metavar="MODEL", shell_complete=complete_model, help=MODEL_HELP)
    target: Path | None = None  # TARGET, where the command has one
    draft_model: str | None = None
    revision: str | None = option("--revision", help=REVISION_HELP)
    draft_revision: str | None = None
    takes_adapters: ClassVar[bool] = False
    lora: tuple[str, ...] = ()
    lora_draft: tuple[str, ...] = ()
    tokenizer: Path | None = option("--tokenizer", type=FOLDER, metavar="FOLDER", help=TOKENIZER_HELP)
    online: bool = option("--online/--offline", help="Download what the cache lacks. [default: offline]")
    config: Path | None = option("--config", type=FOLDER, help=CONFIG_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairNames(TargetNames):
    """The names of target and draft."""

    draft_model: str | None = option(
        "-md", *DRAFT_SPELLINGS, metavar="MODEL", shell_complete=complete_model, help=DRAFT_HELP
    )
    draft_revision: str | None = option("--draft-revision", help=DRAFT_REVISION_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPairNames(PairNames):
    """The names of target, draft and adapters."""

    takes_adapters: ClassVar[bool] = True
    lora: tuple[str, ...] = option("--lora", multiple=True, metavar="ADAPTER", help=LORA_HELP)
    lora_draft: tuple[str, ...] = option("--lora-draft", multiple=True, metavar="ADAPTER", help=LORA_DRAFT_HELP)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedPairNamesWithTarget(AdaptedPairNames):
    """The same, where the target may be the command's argument."""

    target: Path | None = argument(required=False, type=FOLDER)


def find_models(names: TargetNames) -> ModelOptions:
    """Return the folders that names mean, after a check that no file in them is written.

    Raises EdgespecError for a name that means nothing, click.UsageError for what belongs to no name.
    """
    context = click.get_current_context()
    names = _without_other_pairs(context, names)
    target = names.model if names.target is None else names.target
    if target is None and names.revision is not None:
        raise click.UsageError("--revision belongs to a model's name: -m NAME.")
    if names.draft_model is None and names.draft_revision is not None:
        raise click.UsageError("--draft-revision belongs to a draft's name: -md NAME.")
    if target is None and names.tokenizer is not None:
        raise click.UsageError("--tokenizer belongs to a target: -m MODEL.")
    of_built_in = {BUILT_IN_HEAD, *map(str, (NO_DRAFT, AUTO, *SELF))}
    if target is None and names.draft_model is not None and not of_built_in.issuperset(names.draft_model.split(",")):
        raise click.UsageError("-md needs a target: a draft goes with one. Name both, or neither.")
    targets = _folders(context, target, names.revision, online=names.online)
    drafts = _folders(context, names.draft_model, names.draft_revision, online=names.online, may_be_several=True)
    is_choice = len(drafts) > 1 or drafts == (AUTO,)
    folder = targets[0] if targets else None
    base, own = on_its_base(folder) if names.takes_adapters else (folder, ())
    found = ModelOptions(
        target=base,
        draft=drafts[0] if drafts and not is_choice else None,
        tokenizer=names.tokenizer,
        drafts=drafts if is_choice else (),
        adapters=(*own, *map(named_adapter, names.lora)),
        draft_adapters=tuple(map(named_adapter, names.lora_draft)),
    )
    check_files(*found.named_folders())
    return found


model_options = options_of(PairNames, handed_on_as="models", made=find_models)
adapted_options_with_target = options_of(AdaptedPairNamesWithTarget, handed_on_as="models", made=find_models)
target_options = options_of(TargetNames, handed_on_as="models", made=find_models)


def _folders(
    context: click.Context, name: str | Path | None, revision: str | None, *, online: bool, may_be_several: bool = False
) -> tuple[Path, ...]:
    """Return the folder of a model, or several, downloaded where the cache lacks some of it; raises EdgespecError."""
    if name is None:
        return ()
    aliases = (context.find_object(UserConfig) or UserConfig()).aliases
    console = Console(quiet=bool(context.params.get("quiet")), verbose=False)
    # A path that click made of TARGET has backslashes on Windows, where names have none.
    name = name.as_posix() if isinstance(name, Path) else name
    with console.progress_bar(is_shown=online) as bar:
        progress = _download_progress(console.task(bar, f"downloading {name}")) if online else None
        if may_be_several:
            return resolve_drafts(name, revision=revision, aliases=aliases, online=online, progress=progress)
        return (resolve_model(name, revision=revision, aliases=aliases, online=online, progress=progress),)


def _without_other_pairs(context: click.Context, names: TargetNames) -> TargetNames:
    """Leave out a model that TARGET replaces, and the environment's draft where its model is not used."""
    source = context.get_parameter_source
    has_target = names.target is not None
    if has_target and source("model") is ParameterSource.COMMANDLINE:
        raise click.UsageError("Give the target once: TARGET, or -m TARGET.")
    is_from_environment = source("model") is ParameterSource.ENVIRONMENT and not has_target
    model = next(one for one in context.command.params if one.name == "model")
    if model.resolve_envvar_value(context) and not is_from_environment:
        draft_names = ("draft_model", "revision", "draft_revision")
        changes: dict[str, Any] = {name: None for name in draft_names if source(name) is ParameterSource.ENVIRONMENT}
        names = replace(names, **changes)
    return replace(names, model=None) if has_target else names


def _download_progress(show: OnProgress) -> Progress:
    return lambda done, total: show(done, total, f"{done / GIB:.2f} of {total / GIB:.2f} GiB")
