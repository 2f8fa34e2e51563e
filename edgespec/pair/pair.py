"""A target and its draft as folders, which are found, read and checked before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from edgespec.config import SamplingSettings
from edgespec.draft.own_parts import is_copy
from edgespec.errors import EdgespecError, offload_errors
from edgespec.hub.names import NO_DRAFT
from edgespec.pair.adapters import AdapterSpec, GivenAdapter, open_adapters
from edgespec.pair.choices import DraftChoice, each_draft
from edgespec.pair.drafts import check_is_target, open_draft
from edgespec.pair.folder import ModelFolder, check_no_pointer, open_model, processor_template
from edgespec.pair.generation_config import own_options, stated_in, undone_note
from edgespec.pair.gguf_tokenizer import gguf_tokens, open_gguf_tokenizer
from edgespec.pair.mtp import own_draft
from edgespec.pair.same_tokens import MISMATCH_FIX, Tokens, check_same_ids, unshared_note, unshared_tokens
from edgespec.validation import first_line, shown
from offload.gguf.files import is_gguf
from offload.gguf.vocabulary import forget_vocabulary

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
MAX_PADDING = 1024  # tokens of a table that stand for nothing; Qwen's differ by 128
TOKENIZER_FILES = ("tokenizer.*json", "tekken.json", "*.model", "vocab.*", "*.tiktoken")  # one of them holds the tokens


def adapted_draft(draft: ModelFolder, given: tuple[GivenAdapter, ...], own: Sequence[AdapterSpec]) -> ModelFolder:
    """Return a draft with its adapters: a copy of its target has those given to that, others their own, or none.

    Raises EdgespecError.
    """
    if is_copy(draft.parts):
        return replace(draft, adapters=given)
    if own and not draft.is_language_model:
        what = f"the draft '{draft.named.name}' is no language model, and takes no adapter."
        raise EdgespecError("E_ADAPTER", what, "Leave out `draft_adapters`.")
    return replace(draft, adapters=open_adapters(own, draft.config)) if own else draft


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """A target, perhaps a draft of its tokens, and their tokenizer."""

    target: ModelFolder
    draft: ModelFolder | None
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: frozenset[int]  # ids that end a text
    unshared: frozenset[int] = frozenset()  # ids that are no token of both, which the draft never proposes
    template_args: Mapping[str, Any] = field(default_factory=dict)  # what the chat template reads beside messages
    reasoning_budget: int | None = None  # tokens of thought before an answer to messages; None and -1: any number
    reasoning_budget_message: str = ""  # before the words that close a thought whose budget is spent
    has_default_draft: bool = False  # the draft is the target's own layer, which nobody has named
    at_hand: tuple[DraftChoice, ...] = ()  # one of which is to draft, or was chosen to
    choice: str | None = None  # how one was chosen, in words; None: none is chosen yet
    passed_over: tuple[ModelFolder, ...] = ()  # of those at hand the ones that could draft, and are to bring less

    @property
    def names(self) -> tuple[str, str | None]:
        """The names of the target's folder, and of the draft's or the word for one."""
        return self.target.folder.name, self.draft.named.name if self.draft else None

    @property
    def vocab(self) -> int:
        """The number of the target's tokens."""
        return int(self.target.config.get_text_config(decoder=True).vocab_size)

    @property
    def max_context(self) -> int | None:
        """The number of tokens that fit the target; where fewer fit the draft, longer texts grow no trees."""
        return self.target.max_context

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody who runs the pair should know of it."""
        unshared = unshared_note(len(self.unshared)) if self.draft is not None and self.unshared else None
        undone = undone_note(self.target.generation_config, self.target.folder)
        return tuple(note for note in (unshared, undone, self.choice) if note is not None)

    @property
    def is_undecided(self) -> bool:
        """Return whether one of several drafts is still to be chosen."""
        return bool(self.at_hand) and self.choice is None

    def decided(self, draft: DraftChoice, why: str, passed_over: Iterable[ModelFolder] = ()) -> ModelPair:
        """Return the pair with one of its drafts at hand, and what is to be said of that."""
        return replace(self, draft=draft.model, unshared=draft.unshared, choice=why, passed_over=tuple(passed_over))

    def tried(self, self_check: bool) -> ModelPair:
        """Return the pair, whose support trials find, or without them its configuration alone."""
        return self if self_check else replace(self, target=replace(self.target, is_tried=False))

    def with_adapters(self, adapters: Iterable[AdapterSpec], draft_adapters: Iterable[AdapterSpec] = ()) -> ModelPair:
        """Return the pair whose models have these adapters; raises EdgespecError for one that cannot be read.

        A draft that is a copy of its target has the target's. Others have their own, or none.
        """
        given = open_adapters(adapters, self.target.config.get_text_config(decoder=True))
        own = list(draft_adapters)
        if not given and not own:
            return self

        drafts = [self.draft, *(one.model for one in self.at_hand)]
        if own and all(draft is None or is_copy(draft.parts) for draft in drafts):
            what = "there is no draft of its own that could have the adapters `draft_adapters`."
            raise EdgespecError("E_ADAPTER", what, "Name a small model with `draft`.")
        return replace(
            self,
            target=replace(self.target, adapters=given),
            draft=self.draft and adapted_draft(self.draft, given, own),
            at_hand=tuple(
                replace(one, model=one.model and adapted_draft(one.model, given, own)) for one in self.at_hand
            ),
        )

    def default_options(self) -> dict[str, Any]:
        """Return which tokens the target's generation config wants drawn, and when; raises EdgespecError."""
        return own_options(self.target.generation_config, self.target.folder, vocab=self.vocab)

    def default_sampling(self, *, draws: bool = False) -> SamplingSettings:
        """Return what the target's generation config asks for: greedy where it asks for no sampling.

        A config that says neither draws or is greedy, by `draws`. A repetition penalty counts for greedy texts too, as
        in transformers.
        """
        wanted = self.target.generation_config
        neutral = {"repetition_penalty": 1.0}
        if draws if wanted.get("do_sample") is None else wanted["do_sample"]:
            neutral |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        chosen = {name: neutral[name] if wanted.get(name) is None else wanted[name] for name in neutral}
        try:
            return SamplingSettings(**chosen)  # type: ignore[arg-type]
        except (TypeError, EdgespecError) as error:
            raise EdgespecError(
                "E_CONFIG_INVALID",
                f"'{stated_in(self.target.folder)}' asks for sampling that makes no sense: {chosen}.",
                "Correct the file.",
            ) from error


def open_pair(
    target: Path | None, draft: Path | Sequence[Path] | None, tokenizer_folder: Path | None = None
) -> ModelPair:
    """Check both folders against themselves and each other; None for the target is the built-in pair.

    None for the draft is the target's own multi-token-prediction layer, where it has one; the word none is none. Of a
    list one is to be chosen, which `estimate/choice.py` does: the pair has none of them yet.
    The tokenizer is the target's, or that of a folder which has the same tokens. Raises EdgespecError for whatever
    would fail later: a missing or damaged file, an architecture that is unknown or cannot roll back, different ids.
    """
    if target is None:
        target, draft = DEMO_FOLDER / "target", draft or DEMO_FOLDER / "draft"
    check_is_target(target)
    target_model = open_model(target)
    tokenizer = _tokenizer(target_model, tokenizer_folder)
    found, at_hand = DraftChoice(model=None), tuple[DraftChoice, ...]()
    if draft is None:
        target_model, own = own_draft(target_model)
        found = DraftChoice(model=own)
    elif draft != NO_DRAFT:
        ours = tokens_of(tokenizer_folder or target_model.folder, tokenizer)  # a file's, before another is read
        if isinstance(draft, Path):
            found = _opened_draft(draft, target_model, ours)
        else:
            at_hand = tuple(_opened_draft(one, target_model, ours) for one in each_draft(draft, target_model))
    pair = ModelPair(
        target=target_model,
        draft=found.model,
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(target_model, tokenizer),
        unshared=found.unshared,
        has_default_draft=draft is None and found.model is not None,
        at_hand=at_hand,
    )
    forget_vocabulary()
    pair.default_options()  # refused before a weight is read
    return pair


def never_proposed(ours: Callable[[], Tokens], target: ModelFolder, draft: ModelFolder) -> frozenset[int]:
    """Return the ids of a target's tokens that its draft is kept from; raises EdgespecError where tokens differ.

    A head in a folder has none, and asks for none of the target's.
    """
    if draft.is_language_model:
        return unshared_tokens(ours(), tokens_of(draft.folder))
    if is_gguf(draft.folder) and draft.folder != target.folder:  # a head's file has its target's
        unshared_tokens(ours(), tokens_of(draft.folder))
    return frozenset()


def _opened_draft(draft: Path, target: ModelFolder, ours: Tokens) -> DraftChoice:
    """Return a draft that is checked against its target, whose tokens are `ours`."""
    if draft == NO_DRAFT:
        return DraftChoice(model=None)
    model = open_draft(draft, target)
    return DraftChoice(model=model, unshared=never_proposed(lambda: ours, target, model))


def _tokenizer(target: ModelFolder, folder: Path | None) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer, or the folder's; raises EdgespecError where that has other tokens."""
    if folder is None:
        return open_tokenizer(target.folder)
    if not folder.exists():
        fix = "Name a folder with a tokenizer.json, or a GGUF file."
        raise EdgespecError("E_MODEL_NOT_FOUND", f"there is no tokenizer '{folder}'.", fix)
    tokenizer = open_tokenizer(folder)
    own = tokens_of(target.folder).ids if _has_tokenizer(target.folder) else {}
    vocab = target.config.get_text_config(decoder=True).vocab_size
    check_same_ids(own, tokenizer.get_vocab(), vocab=vocab, names=(target.folder, folder))
    return tokenizer


def tokens_of(path: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Tokens:
    """Return a GGUF file's tokens, or those of a folder's tokenizer, which may be open already."""
    if not is_gguf(path):
        return Tokens.of(tokenizer or open_tokenizer(path))
    with offload_errors():
        return gguf_tokens(path)


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the folder's tokenizer in its fast form.

    Raises EdgespecError where there is none, or where it takes code to be run.
    """
    if is_gguf(folder):
        with offload_errors():
            return open_gguf_tokenizer(folder)
    fix = "Put the model's tokenizer.json and tokenizer_config.json into the folder; code in it is never run."
    if not _has_tokenizer(folder):  # of some families transformers makes one that has no tokens
        what = f"'{folder}' has no usable tokenizer: there is no tokenizer.json."
        raise EdgespecError("E_TOKENIZER", what, fix)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # damaged JSON and missing backends all look different
        check_no_pointer(*(path for pattern in (*TOKENIZER_FILES, "*.json") for path in sorted(folder.glob(pattern))))
        what = f"'{folder}' has no usable tokenizer ({first_line(error)})."
        raise EdgespecError("E_TOKENIZER", what, fix) from error
    if not tokenizer.is_fast:
        raise EdgespecError(
            "E_TOKENIZER",
            f"the tokenizer of '{folder}' ({type(tokenizer).__name__}) has no tokenizer.json form.",
            "Convert it with transformers, and save it into the folder.",
        )
    tokenizer.chat_template = tokenizer.chat_template or processor_template(folder)
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return is_gguf(folder) or any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def _stop_tokens(model: ModelFolder, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a text: the generation config's, else the config's, and the tokenizer's own.

    A config of several parts may have them at its top, and in its text part. Raises EdgespecError for others than the
    model's tokens.
    """
    text_config = model.config.get_text_config(decoder=True)
    if "eos_token_id" in model.generation_config:
        file, stated = stated_in(model.folder), [model.generation_config["eos_token_id"]]
    else:
        file = model.folder / "config.json"
        stated = [getattr(part, "eos_token_id", None) for part in (model.config, text_config)]
    own = tokenizer.eos_token_id  # one beyond the table never comes
    stops = set() if own is None or own >= text_config.vocab_size else {own}
    for value in stated:
        ids = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [token for token in ids if type(token) is not int or not 0 <= token < text_config.vocab_size]
        if wrong:
            raise EdgespecError(
                "E_CONFIG_INVALID",
                f"'{file}' has eos_token_id {shown(value)}, and {shown(wrong[0])} is none of the "
                f"{text_config.vocab_size} token ids.",
                f"Correct {file.name}.",
            )
        stops.update(ids)
    return frozenset(stops)


def check_vocabularies(target: ModelFolder, draft: ModelFolder | None, tokenizer_folder: Path | None = None) -> None:
    """Raise EdgespecError where the tokenizer's or the draft's tokens cannot be the target's, as far as folders tell.

    They may hold a config.json alone: tables of the same tokens differ in size by what they are padded with.
    """
    own_tokenizer = None if tokenizer_folder is None else _tokenizer(target, tokenizer_folder)
    if draft is None or not draft.is_language_model:
        return
    if (own_tokenizer is not None or _has_tokenizer(target.folder)) and _has_tokenizer(draft.folder):
        unshared_tokens(tokens_of(tokenizer_folder or target.folder, own_tokenizer), tokens_of(draft.folder))
        return
    ours, theirs = (model.config.get_text_config(decoder=True).vocab_size for model in (target, draft))
    if abs(ours - theirs) > MAX_PADDING:
        what = f"the draft's token ids differ from the target's: its config.json has {theirs} of them, and that {ours}."
        raise EdgespecError("E_TOKENIZER_MISMATCH", what, MISMATCH_FIX)
