"""A row made ready to run: its settings over the run's, its tokens, and the length that its text may have."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from edgespec.chat.chat_template import Message
from edgespec.chat.picture_prompt import Encoded, ids_of, picture_reader
from edgespec.chat.template_date import telling
from edgespec.chat.tools import Toolset
from edgespec.cli.prompts.read import OF_ONE_ROW, encode_turn
from edgespec.cli.prompts.row_settings import ROW_SPELLINGS, RowSettings
from edgespec.cli.prompts.row_tools import before_answers, row_tools, tool_grammar
from edgespec.cli.prompts.rows import PromptRow, with_digests
from edgespec.cli.spelling import spelled
from edgespec.config import SamplingSettings, require
from edgespec.errors import EdgespecError
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.sampling.grammar import Grammar
from edgespec.text.bias import known_ids, options_of_ends, with_token_ids
from edgespec.text.context import new_token_limit
from edgespec.validation import shown

if TYPE_CHECKING:
    from edgespec.pair.adapters import AdapterChoice
    from edgespec.pair.pair import ModelPair
    from edgespec.sampling.thought_budget import ThoughtBudget

Side = Literal["left", "right"]
# Answers are encoded again with the next turn, and may have a few more tokens then than were drawn.
SLACK_SHARE = 8  # one token in this many
# In the place of answers that are not there yet; some templates refuse an empty one
ANSWER = Message(role="assistant", content=".")
MOST_PIXEL_BYTES = 256 << 20  # that are kept of rows which wait
NO_CALLS = (None, "none", "auto")  # choices that a row without tools may make

# a row, its answers so far -> the next turn as the model reads it
EncodeTurn = Callable[[PromptRow, tuple[Message, ...]], Encoded]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What all prompts of a run share, except where a row sets its own."""

    sampling: SamplingSettings
    max_new_tokens: int
    seed: int
    raw: bool
    system: str | None = None
    day: datetime.date | None = None  # for a chat template; None: it needs none
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True  # of texts
    grammar: Grammar | None = None  # None: any text
    parses: bool = False  # whether records have what JSON stands for
    logprobs: int | None = None  # alternatives in records of each token; None: nothing
    prompt_logprobs: int | None = None  # and of each token of the prompts
    max_context: int | None = None  # tokens at which any text ends; None: the models have no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What was cut off a prompt."""

    side: Side
    dropped_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A row and what it is run with."""

    row: PromptRow
    ids: list[int]  # up to the first answer
    pictures: PicturePrompt | None = None  # the same with its pictures; None: it has none, or they are read again
    sampling: SamplingSettings
    max_new_tokens: int  # of each turn
    seed: int
    stop: tuple[str, ...]
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    toolset: Toolset = field(default_factory=Toolset)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_options: dict[str, Any] = field(default_factory=dict)  # which tokens may be drawn, and which end the text
    adapters: AdapterChoice | None = None  # None: those that count where none are named
    thought_budget: ThoughtBudget | None = None
    parses: bool = False  # whether the record has what the JSON of an answer stands for
    truncated: Truncation | None = None
    fault: EdgespecError | None = None  # why it cannot be run
    needs: RowTokens | None = None  # once it is known that it fits

    @property
    def most_tokens(self) -> int:
        """Return the most tokens that its answers may have together."""
        return 0 if self.needs is None else self.needs.new


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """The tokens of one row, at most."""

    new: int  # of all answers
    prompt: int  # of the last turn, with the answers before it
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededTokens:
    """The rows of a run, and the tokens that their texts need."""

    num_rows: int  # that are waiting
    context_tokens: int  # of the longest text
    prompt_tokens: int  # of the longest prompt
    mean_tokens: float  # of a text with its answers, at most


def make_requests(pair: ModelPair, rows: list[PromptRow], encode: EncodeTurn, run: RunSettings) -> list[Request]:
    """Make a request of each row, with its settings over the run's; one that cannot be run has its fault.

    Raises EdgespecError that names a row whose tokens or grammar the pair does not know.
    """
    from edgespec.pair.adapters import chosen_use
    from edgespec.text.request import grammar_for, named_sampling

    requests: list[Request] = []
    kept = KeptPictures()
    followed = set[tuple[Grammar, bool]]()  # those that were tried
    for row in rows:
        if row.sees and row.fault is None:
            picture_reader(pair.target, pair.tokenizer.name_or_path)
        own = row.settings
        row, prompt, fault = _encoded(row, encode)
        ids = ids_of(prompt)
        grammar = own.text_grammar() if own.names_grammar else run.grammar
        parses = run.parses and grammar is not None and grammar.form == "json_schema"
        has_template = pair.tokenizer.chat_template and not run.raw and row.kind != "completion"
        toolset = row_tools(pair, own) if has_template else Toolset()
        with _naming(row, grammar):
            if not toolset.seen:
                what = f"tool_choice {shown(own.tool_choice)} needs tools, and a chat template that reads them."
                require(own.tool_choice in NO_CALLS, what, "Give both, or leave it out.")
            if has_template and grammar is not None:
                toolset = before_answers(pair, toolset, ids)
            grammar = tool_grammar(pair, toolset, ids, grammar) if has_template else grammar
            sampling = with_token_ids(named_sampling(run.sampling, own.sampling()), pair)
            thought_budget = toolset.budget(pair, ids, own.reasoning_budget) if has_template and fault is None else None
            token_options = _token_options(own, sampling, pair)
            adapters = None if own.adapter is None else chosen_use(pair.target.adapters, own.adapter)
            if grammar is not None and (grammar, sampling.ignore_eos) not in followed:
                grammar_for(grammar, sampling, pair)
                followed.add((grammar, sampling.ignore_eos))
        request = Request(
            row=row,
            ids=ids,
            pictures=kept.kept(prompt),
            sampling=sampling,
            max_new_tokens=run.max_new_tokens if own.max_new_tokens is None else own.max_new_tokens,
            seed=run.seed if own.seed is None else own.seed,
            stop=run.stop if own.stop is None else own.stop,
            skip_special_tokens=not toolset.has_parts
            and (run.skip_special_tokens if own.skip_special_tokens is None else own.skip_special_tokens),
            grammar=grammar,
            toolset=toolset,
            logprobs=run.logprobs if own.logprobs is None else own.logprobs,
            prompt_logprobs=run.prompt_logprobs if own.prompt_logprobs is None else own.prompt_logprobs,
            token_options=token_options,
            adapters=adapters,
            thought_budget=thought_budget,
            parses=parses,
            fault=fault,
        )
        requests.append(request)
    return requests


def _token_options(own: RowSettings, sampling: SamplingSettings, pair: ModelPair) -> dict[str, Any]:
    """Return the options of `Engine.request` for a row's own tokens; raises EdgespecError for ids that the pair lacks.

    Tokens that end the row's text stay, as in vLLM, where the model's own are ignored.
    """
    suppressed = known_ids("suppress_tokens", own.suppress_tokens or (), pair)
    options: dict[str, Any] = {} if own.min_new_tokens is None else {"min_new_tokens": own.min_new_tokens}
    if own.stop_token_ids is not None:
        options |= options_of_ends(own.stop_token_ids, pair, ignore_eos=sampling.ignore_eos)
    if suppressed:
        before = options.get("suppress_tokens") or pair.default_options().get("suppress_tokens", ())
        options["suppress_tokens"] = sorted({*suppressed, *before})
    return options


class KeptPictures:
    """Says of which prompts pixels are kept until their texts begin: of so many that they have room."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def kept(self, prompt: Encoded) -> PicturePrompt | None:
        """Return a prompt that has pictures, unless there is no more room."""
        if not isinstance(prompt, PicturePrompt) or self._num_bytes + prompt.input_bytes > MOST_PIXEL_BYTES:
            return None
        self._num_bytes += prompt.input_bytes
        return prompt


def _encoded(row: PromptRow, encode: EncodeTurn) -> tuple[PromptRow, Encoded, EdgespecError | None]:
    """Return a row that knows its pictures, its prompt, and why it cannot be run."""
    if row.fault is not None:
        return row, [], row.fault
    try:
        prompt = encode(row, ())
    except EdgespecError as error:
        if error.code not in OF_ONE_ROW:
            raise
        return row if error.code == "E_CONTEXT" else replace(row, fault=error), [], error
    if isinstance(prompt, PicturePrompt):
        row = with_digests(row, [picture.sha256 for picture in prompt.pictures])
    return row, prompt, None


@contextmanager
def _naming(row: PromptRow, grammar: Grammar | None) -> Iterator[None]:
    """Within this block an error names the row, where the row itself asks for such things, or the run's grammar."""
    try:
        yield
    except EdgespecError as error:
        own = row.settings
        if not (own.names_grammar or own.names_tokens or own.names_tools or own.adapter):
            if error.code != "E_GRAMMAR" or grammar is None:
                raise
            raise EdgespecError(error.code, f"`{grammar.form}`: {error.what}", error.fix) from error
        raise EdgespecError(error.code, f"{row.where}: {spelled(error.what, ROW_SPELLINGS)}", error.fix) from error


def turn_encoder(pair: ModelPair, run: RunSettings, *, max_tokens: int | None = None) -> EncodeTurn:
    """Return a function that encodes a row up to its next answer, and refuses far more than `max_tokens`."""
    pair = replace(pair, tokenizer=telling(pair.tokenizer, run.day))
    return lambda row, answers: encode_turn(pair, row, answers, raw=run.raw, system=run.system, max_tokens=max_tokens)


def row_tokens(request: Request, encode: EncodeTurn, max_context: int | None) -> RowTokens:
    """Return the tokens of a row's texts; raises EdgespecError where they do not fit the context."""
    row, questions = request.row, question_tokens(request, encode)
    try:
        scores_only = request.max_new_tokens == 0 and request.prompt_logprobs is not None
        limit, _ = new_token_limit(max_context, questions, 1 if scores_only else request.max_new_tokens)
    except EdgespecError as error:
        turns = f"with all {row.num_turns} turns, " if row.follow_ups else ""
        raise EdgespecError(error.code, turns + error.what, error.fix) from error
    earlier = limit * len(row.follow_ups)
    prompt = questions + earlier + earlier // SLACK_SHARE
    context = prompt + limit
    if max_context is not None:
        prompt, context = min(prompt, max_context - 1), min(context, max_context)
    new = min(limit * row.num_turns, context - len(request.ids))
    return RowTokens(new=new, prompt=prompt, context=context)


def question_tokens(request: Request, encode: EncodeTurn) -> int:
    """Return the number of tokens of all that a row asks."""
    row = request.row
    return len(ids_of(encode(row, (ANSWER,) * len(row.follow_ups)))) if row.follow_ups else len(request.ids)


def needed_tokens(requests: list[Request]) -> NeededTokens:
    """Return the tokens that the rows of a run need, of those that fit the context."""
    rows = [request.needs for request in requests if request.needs is not None]
    return NeededTokens(
        num_rows=len(rows),
        context_tokens=max(row.context for row in rows),
        prompt_tokens=max(row.prompt for row in rows),
        mean_tokens=sum(row.context for row in rows) / len(rows),
    )
