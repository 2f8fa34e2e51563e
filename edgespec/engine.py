"""The composition root and the Python API: pair, plan, models, and text in and out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from edgespec.chat.conversation import Conversation
from edgespec.chat.given_template import with_template
from edgespec.chat.picture_prompt import Encoded, ids_of, read_prompt
from edgespec.chat.prompt_ids import are_messages
from edgespec.chat.tools import Toolset
from edgespec.config import SamplingSettings
from edgespec.decode.lossless import Verdict
from edgespec.errors import EdgespecError, offload_errors
from edgespec.estimate.choice import DraftTrees, with_best_draft
from edgespec.grow.policies import OpenPolicy
from edgespec.hub.adapter_names import on_its_base
from edgespec.machine.device import core_share
from edgespec.model.causal_model import CausalModel
from edgespec.pair.adapters import AdapterSpec
from edgespec.pair.find import find_pair
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.kept_speed import growth_place
from edgespec.placement.load import Progress, load_models
from edgespec.placement.pair_setup import PairSetup, set_up, set_up_by_profile
from edgespec.placement.plan import placement_for
from edgespec.placement.run_config import RunConfigOptions, resolve_run_config
from edgespec.placement.weights import Announce
from edgespec.prefix_cache.in_memory import PrefixCache
from edgespec.text.generate_many import check_lossless, finish_many
from edgespec.text.handle import OnPrefill, TextHandle
from edgespec.text.request import Config, TextOptions, TextRequest, text_request
from edgespec.text.results import GenerationResult, Streamer, TextChunk, put_ids
from edgespec.text.scheduler import Scheduler
from edgespec.text.token_ids import Prompt
from edgespec.text.trees import Trees
from edgespec.tree.settings import TreeOptions, TreeSettings
from edgespec.tuning.draft_check import check_draft
from edgespec.tuning.draft_memory import keep_learned, let_age
from edgespec.tuning.threads import make_tuner
from offload.experts.expert_source import ExpertCounts
from offload.experts.expert_use import ExpertUse
from profiles.schema import Profile


class Engine:
    """A loaded pair, whose texts share each pass; any thread may start one. Close it, or use `with`."""

    def __init__(
        self,
        setup: PairSetup,
        *,
        self_check: bool = True,
        draft_check: bool = True,
        on_quantize: Announce | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load a pair as it is set up; raises EdgespecError.

        `on_quantize` is called before weights are quantised. `self_check` tries trees, `draft_check` a published draft.
        """
        # Not the setup itself: it knows the weights, and a closed engine must not keep them.
        self.pair, self.run_config = setup.pair, setup.run_config
        self.planned, self.profile = setup.placement, setup.profile
        self.device = self.run_config.device  # where trees grow and logits come out
        self.max_context = self.run_config.context_tokens  # tokens of the longest text that memory is planned for
        # As drafts are compared by it: later on own threads wait, too. Without a draft nothing asks for it
        self._core_share = 1.0 if setup.pair.draft is None else core_share(self.device)
        self.trees = Trees(setup)
        threads = make_tuner(self.run_config.threads, self.device)
        with offload_errors():
            self._loaded = load_models(
                setup.weights, run_config=self.run_config, unshared=setup.pair.unshared,
                self_check=self_check, on_quantize=on_quantize, progress=progress,
            )  # fmt: skip
        self.draft_check = check_draft(self.pair, self._loaded) if draft_check else None
        self.trees.try_draft(self._loaded)
        self._texts = Scheduler(self.pair, self.trees, self._loaded, num_texts=self.run_config.num_texts,
                                max_tokens=self.run_config.all_tokens, threads=threads)  # fmt: skip
        self.hear_passes = self._texts.hear_passes
        self.placement = self._loaded.placement  # as planned, but for layers for which no memory could be locked

    @classmethod
    def from_pair(
        cls, pair: ModelPair, *, tree: TreeSettings | None = None, profile: Profile | None = None,
        self_check: bool = True, draft_check: bool = True, progress: Progress | None = None,
        **options: Unpack[RunConfigOptions],
    ) -> Engine:  # fmt: skip
        """Load an open pair with these trees, or with trees that tune themselves.

        `profile` is what was measured of this pair: its acceptance is used. Raises EdgespecError.
        """
        temperature = pair.default_sampling().temperature
        pair = with_best_draft(pair.tried(self_check), DraftTrees.held_to(tree), temperature=temperature, **options)
        run_config = resolve_run_config(pair.target, pair.max_context, draft=pair.draft, **options)
        setup = set_up(pair, run_config, tree, profile=profile)
        return cls(setup, self_check=self_check, draft_check=draft_check, progress=progress)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | None = None, *, draft: str | Path | Sequence[str | Path] | None = None,
        revision: str | None = None, draft_revision: str | None = None, tokenizer: str | Path | None = None,
        local_files_only: bool = True,
        chat_template: str | Path | None = None, template_args: Mapping[str, Any] | None = None,
        adapters: Sequence[AdapterSpec] = (), draft_adapters: Sequence[AdapterSpec] = (),
        tree: TreeSettings | None = None, profile: str = "auto", self_check: bool = True, draft_check: bool = True,
        progress: Progress | None = None, **options: Unpack[RunConfigOptions],
    ) -> Engine:  # fmt: skip
        """Load a target and a draft; without a target, the built-in pair, without a draft the target's own layer.

        Both are folders, GGUF files, or names of the configuration or a local cache; what Hugging Face's lacks is
        downloaded only with `local_files_only=False`. Of several drafts, or of those at hand (`draft="auto"`), the one
        that pays most by the sums of estimates drafts. `tokenizer` is a folder that has the target's tokens, and counts
        above the target's own. `chat_template` (a model's name, a file or a text) and `template_args` are for messages.
        `adapters` are folders or GGUF files of LoRA adapters, FOLDER:SCALE, of which texts may choose by their names.
        A target that is such a folder stands for the model that it was trained on, with it.
        Without `tree` they tune themselves, from the pair's profile ("auto") or anew ("none"); its file holds them.
        """
        checks: Any = {"self_check": self_check, "draft_check": draft_check}
        found, drafts = find_pair(target, draft, revision, draft_revision, online=not local_files_only)
        base, own = on_its_base(found)
        pair = open_pair(base, drafts, None if tokenizer is None else Path(tokenizer))
        pair = pair.with_adapters([*own, *adapters], draft_adapters)
        pair = with_template(pair, chat_template, template_args or {}).tried(self_check)
        if tree is not None:
            return cls.from_pair(pair, tree=tree, progress=progress, **checks, **options)
        temperature = pair.default_sampling().temperature
        trees = DraftTrees.held_to(None, profile=profile)
        pair = with_best_draft(pair, trees, temperature=temperature, **options)
        run_config = resolve_run_config(pair.target, pair.max_context, draft=pair.draft, **options)
        setup = set_up_by_profile(pair, run_config, TreeOptions(profile=profile), temperature=temperature)
        return cls(setup, progress=progress, **checks)

    def generate(
        self, prompt: Prompt, config: Config | None = None, *, reuse: bool = False,
        on_prefill: OnPrefill | None = None, on_chunk: Callable[[TextChunk], None] | None = None,
        **options: Unpack[TextOptions],
    ) -> GenerationResult:  # fmt: skip
        """Continue a prompt: a text, token ids (a list, a tensor, or a tokenizer's encoding), messages, which may have
        pictures, or what a model's processor made of both (`PicturePrompt`).

        `config` is a transformers GenerationConfig or a dict of its names; single options count above it. With
        `reuse` the rows that the last text has in common with this prompt are not computed again.
        """
        handle = self.submit(self.request(prompt, config, **options), reuse=reuse, on_prefill=on_prefill)
        for chunk in handle:
            if on_chunk:
                on_chunk(chunk)
        return handle.whole()

    def stream(
        self, prompt: Prompt, config: Config | None = None, *, reuse: bool = False, **options: Unpack[TextOptions]
    ) -> Iterator[TextChunk]:
        """Continue a prompt as `generate` does, step by step.

        Closing the iterator stops between two passes, and so does `cancel`.
        """
        yield from self.run(self.request(prompt, config, **options), reuse=reuse)

    def generate_ids(
        self, input_ids: Prompt, config: Config | None = None, *, streamer: Streamer | None = None,
        **options: Unpack[TextOptions],
    ) -> Tensor:  # fmt: skip
        """Return the ids of a prompt and of its continuation, [1, n + new], as transformers does.

        A streamer gets every burst.
        """
        return put_ids(input_ids, lambda ids: self.run(self.request(ids, config, **options)), streamer)

    def request(self, prompt: Prompt, config: Config | None = None, **options: Unpack[TextOptions]) -> TextRequest:
        """Return the checked arguments of `generate`; raises EdgespecError where they do not fit the context.

        A grammar holds for the answer to messages, behind what is thought, and for all of another prompt's text.
        """
        is_chat = are_messages(prompt) and self.pair.tokenizer.chat_template
        make = Toolset().request if is_chat else text_request
        return make(self._read(prompt), pair=self.pair, max_context=self.max_context, config=config, options=options)

    def submit(
        self, request: TextRequest, *, reuse: bool = False, keeps: bool = True, on_prefill: OnPrefill | None = None
    ) -> TextHandle:
        """Add a text, and return its handle; it begins when a thread waits for any of the engine's texts.

        `on_prefill` gets the numbers of read and of all tokens of the prompt. With `reuse`, rows that were kept of the
        prompt's beginning are not computed again. With `keeps` the text's own rows are kept at its end.
        """
        return self._texts.submit(request, reuse=reuse, keeps=keeps, on_prefill=on_prefill)

    def run(
        self, request: TextRequest, *, reuse: bool = False, on_prefill: OnPrefill | None = None
    ) -> Generator[TextChunk, None, None]:
        """Decode a request step by step; closing the iterator ends the text."""
        return iter(self.submit(request, reuse=reuse, on_prefill=on_prefill))

    def generate_many(self, requests: Iterable[TextRequest]) -> Iterator[tuple[int, GenerationResult | Exception]]:
        """Decode many texts together, and yield each one's number and result in the order in which they end.

        `parallel` of them run at a time, and requests are taken from an iterator as texts end. A text that fails has
        its error for a result. Closing the iterator ends the others; after `cancel` no more are taken.
        """
        return finish_many(self._texts, requests)

    def advance(self) -> int:
        """Make a step of all texts, or wait for another thread's, and return the number of running texts."""
        return self._texts.advance()

    def chat(self, *, system: str | None = None, raw: bool = False, **options: Unpack[TextOptions]) -> Conversation:
        """Return a conversation, empty but for the system's message; `raw` leaves the chat template out."""
        return Conversation(self.pair, self._texts, max_context=self.max_context, system=system, raw=raw, **options)

    def cancel(self, *, abandon: bool = False) -> None:
        """End all texts after their pass, or with `abandon` between two layers; any thread may call this."""
        self._texts.cancel(abandon=abandon)

    def use_tree(self, tree: TreeSettings | None) -> None:
        """Use other trees from the next text on, and keep them; None is for the engine's own again.

        Raises EdgespecError for trees that are larger than memory was planned for.
        """
        if tree is not None and tree.needs_draft and self.draft_model is None:
            raise EdgespecError("E_SETTING", "there is no draft to grow trees with.", "Start with `draft=DRAFT`.")
        self.trees.use(tree)

    @property
    def tree(self) -> TreeSettings:
        """The trees that grow; where they tune themselves, those of a text that depends on its trees."""
        return self.trees.settings

    @property
    def pinned_tree(self) -> TreeSettings | None:
        """The trees of `use_tree`; None where the engine's own trees grow."""
        return self.trees.pinned

    @property
    def largest_tree(self) -> TreeSettings:
        """The largest trees that may grow."""
        return self.trees.largest_tree

    @property
    def policy(self) -> OpenPolicy:
        """The trees' policy, with the contents of its files."""
        return self.trees.policy

    @property
    def is_tuned(self) -> bool:
        """Whether trees change as they pay, in texts that do not depend on them (`tunes`)."""
        return self.trees.tuner is not None

    def tunes(self, sampling: SamplingSettings) -> bool:
        """Return whether the trees of texts that are sampled so change as they pay."""
        return self.trees.tuner_for(sampling) is not None

    def trees_in_use(self, sampling: SamplingSettings) -> str | None:
        """Return in words the present trees of such texts, and why; None if they are not tuned, or nothing is known."""
        tuner = self.trees.tuner_for(sampling)
        return None if tuner is None else tuner.choice(sampling).in_words()

    def verify_lossless(self, prompts: Sequence[Prompt], **options: Unpack[TextOptions]) -> list[Verdict]:
        """Decode prompts with these options, through the trees and plainly, and return how the texts differ.

        They have 64 tokens and seed 0, unless the options say otherwise. Trees that are not coupled give other draws
        than plain decoding: of those, greedy texts are compared instead.
        """
        defaults: TextOptions = {"max_new_tokens": 64, "seed": 0, **options}
        requests = [self.request(prompt, **defaults) for prompt in prompts]
        return check_lossless(self._texts, self.trees, self.target_model, requests, dtype=self.run_config.dtype)

    placement_for = staticmethod(placement_for)

    @property
    def expert_counts(self) -> ExpertCounts:
        """The counts of experts that rows used since the target was loaded, and of those that were read."""
        return self._loaded.expert_counts

    @property
    def expert_use(self) -> ExpertUse | None:
        """The share of passes that used each of the target's experts; None where they move with their layers."""
        return self._loaded.expert_use

    @property
    def near_tie_margin(self) -> float:
        """The distance of two logits below which an `exact` engine reads a text again, as it was measured so far."""
        return self.trees.near_ties.margin

    @property
    def num_texts(self) -> int:
        """The most texts that may run at a time: fewer than planned after memory has run out."""
        return self._texts.num_texts

    @property
    def target_model(self) -> CausalModel:
        """The target, streamed as planned."""
        return self._loaded.target

    @property
    def draft_model(self) -> CausalModel | None:
        """The draft; None where decoding is plain."""
        return self._loaded.draft

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; messages go through the chat template. Raises EdgespecError without ids."""
        return ids_of(self._read(prompt))

    def _read(self, prompt: Prompt) -> Encoded:
        """Return a prompt as the model reads it; files of pictures are looked for from the current folder on."""
        values = self.pair.template_args
        return read_prompt(self.pair, prompt, values=values, max_tokens=self.max_context, folder=Path())

    @property
    def prefix_cache(self) -> PrefixCache:
        """The rows that are kept of texts that have ended, and the files that texts may begin on."""
        return self._texts.prefix_cache

    def forget(self) -> None:
        """Drop all rows that were kept of earlier texts."""
        self.prefix_cache.forget()

    def close(self) -> None:
        """End all texts with an error, stop the readers, and free the models."""
        if self._texts.close():
            self._keep_learned()
            self.forget()
            self._loaded.close()

    def _keep_learned(self) -> None:
        """Keep what the trees have shown of the draft, for runs to come, and let what is known of others age."""
        for passed_over in self.pair.passed_over:
            let_age(self.pair.target, passed_over)
        if self.pair.draft is not None and self._loaded.draft is not None:
            keep_learned(
                self.pair.target, self.pair.draft, self.trees.worths.values(),
                None if self.trees.tuner is None else self.trees.tuner.costs.growth,
                place=growth_place(self.run_config), share=self._core_share,
            )  # fmt: skip

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
