"""The composition root and the Python API: pair, plan, models, and text in and out."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Unpack

from torch import Tensor

from edgespec.config import MemoryLimits, parse_quant
from edgespec.decode.lossless import Verdict, compare
from edgespec.errors import EdgespecError
from edgespec.grow.policies import Policy, open_policy
from edgespec.model.causal_model import CausalModel
from edgespec.model.device import resolve_device, resolve_dtype
from edgespec.model.target import offload_errors
from edgespec.pair.find import find_pair
from edgespec.pair.pair import ModelPair, open_pair
from edgespec.placement.load import LoadedModels, Progress, load_models
from edgespec.placement.plan import check_tree_fits, plan_for, plan_pair
from edgespec.placement.weights import Announce
from edgespec.profiled import acceptance_of, settle
from edgespec.text.cancel import Running
from edgespec.text.chat_template import Prompt, prompt_ids
from edgespec.text.conversation import Conversation
from edgespec.text.request import Config, TextRequest, Wishes, text_request
from edgespec.text.results import GenerationResult, Streamer, TextChunk, put_ids
from edgespec.text.run import OnPrefill, TextModels, finished, run_text
from edgespec.tree.settings import TreeSettings
from offload.placement import Placement
from profiles.schema import Profile


class Engine:
    """A loaded pair. One text at a time; not for several threads. Close it, or use `with`."""

    def __init__(
        self,
        pair: ModelPair,
        *,
        tree: TreeSettings | None = None,
        profile: Profile | None = None,
        limits: MemoryLimits | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quant: str | None = None,
        draft_quant: str | None = None,
        context_tokens: int = 2048,
        prompt_tokens: int | None = None,
        self_check: bool = True,
        on_plan: Callable[[Engine], None] | None = None,
        on_quantize: Announce | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Plan memory for texts of up to `context_tokens` and load; raises EdgespecError.

        `profile` is what was measured of this pair: its acceptance is used, and adaptive trees by its plan
        follow the last steps; `edgespec.profiled.settle` finds it and says what `tree` it asks for.
        `prompt_tokens` is the longest prompt to plan for, as long as the context where it is not
        known. `on_plan` sees the engine before weights are read, `on_quantize` what is about to be
        written to the cache. `self_check` tries whether the family reads token trees rightly.
        """
        self.pair = pair
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, pair.target.config, self.device)
        self.max_context = min(context_tokens, pair.max_context or context_tokens)
        self.quant, self.draft_quant = parse_quant(quant), parse_quant(draft_quant, setting="draft_quant")
        tree = tree or TreeSettings()
        self.tree = self._planned_tree = tree if pair.draft is not None else tree.plain()
        self.profile = profile
        self.policy = _policy(self.tree, profile)
        self._running = Running()
        self._loaded = LoadedModels({}, device=self.device)
        with offload_errors():
            plan = plan_pair(
                pair.target,
                pair.draft if self.tree.policy != "none" else None,
                tree=self.tree,
                limits=limits or MemoryLimits(),
                device=self.device,
                dtype=self.dtype,
                quant=self.quant,
                draft_quant=self.draft_quant,
                context_tokens=self.max_context,
                prompt_tokens=prompt_tokens or self.max_context,
            )
            self.placement = plan.placement
            if on_plan:
                on_plan(self)
            self._loaded = load_models(
                plan, device=self.device, self_check=self_check, on_quantize=on_quantize, progress=progress
            )

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        *,
        draft: str | Path | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        local_files_only: bool = True,
        tree: TreeSettings | None = None,
        profile: str = "auto",
        limits: MemoryLimits | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quant: str | None = None,
        draft_quant: str | None = None,
        context_tokens: int = 2048,
        prompt_tokens: int | None = None,
        self_check: bool = True,
        progress: Progress | None = None,
    ) -> Engine:
        """Load a target and a draft; without a target, the built-in pair.

        Both are folders, or names of the user's configuration or of the local Hugging Face cache; what the cache
        lacks is downloaded only with `local_files_only=False`. Without `tree` the settings are those of the
        pair's profile, where `edgespec profile` made one ("auto"), of a profile's file, or the defaults ("none").
        """
        online = not local_files_only
        pair = open_pair(*find_pair(target, draft, revision, draft_revision, online=online))
        settled = settle(
            pair,
            source=profile if tree is None else "none",
            given={},
            temperature=pair.default_sampling().temperature,
            limits=limits or MemoryLimits(),
            device=resolve_device(device),
            dtype=dtype,
            quant=parse_quant(quant),
            draft_quant=parse_quant(draft_quant, setting="draft_quant"),
            context_tokens=context_tokens,
            prompt_tokens=prompt_tokens,
        )
        return cls(
            pair,
            tree=tree or settled.tree,
            profile=settled.profile,
            limits=limits,
            device=device,
            dtype=dtype,
            quant=quant,
            draft_quant=draft_quant,
            context_tokens=context_tokens,
            prompt_tokens=prompt_tokens,
            self_check=self_check,
            progress=progress,
        )

    def generate(
        self,
        prompt: Prompt,
        config: Config | None = None,
        *,
        reuse: bool = False,
        on_prefill: OnPrefill | None = None,
        on_chunk: Callable[[TextChunk], None] | None = None,
        **wishes: Unpack[Wishes],
    ) -> GenerationResult:
        """Continue a prompt: a text, token ids, or messages.

        `config` is a transformers GenerationConfig or a dict of its names; single wishes count above it. With
        `reuse` the rows that the last text has in common with this prompt are not computed again.
        """
        request = self.request(prompt, config, **wishes)
        started = time.perf_counter()
        chunks: list[TextChunk] = []
        for chunk in self.run(request, reuse=reuse, on_prefill=on_prefill):
            chunks.append(chunk)
            if on_chunk:
                on_chunk(chunk)
        return finished(request, chunks, self.pair, total_s=time.perf_counter() - started)

    def stream(
        self, prompt: Prompt, config: Config | None = None, *, reuse: bool = False, **wishes: Unpack[Wishes]
    ) -> Iterator[TextChunk]:
        """The same, step by step. Closing the iterator stops between two passes, and so does `cancel`."""
        yield from self.run(self.request(prompt, config, **wishes), reuse=reuse)

    def generate_ids(
        self, input_ids: Tensor, config: Config | None = None, *, streamer: Streamer | None = None,
        **wishes: Unpack[Wishes],
    ) -> Tensor:  # fmt: skip
        """Ids [1, n] and what follows them [1, n + new], as transformers has it; a streamer gets every burst."""
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise EdgespecError("E_SETTING", f"ids of shape {tuple(input_ids.shape)} are not one text.", "Use [1, n].")
        return put_ids(input_ids, self.stream(input_ids[0].tolist(), config, **wishes), streamer)

    def request(self, prompt: Prompt, config: Config | None = None, **wishes: Unpack[Wishes]) -> TextRequest:
        """What `generate` is asked for, checked: raises EdgespecError where the context has no room for it."""
        return text_request(
            self.encode(prompt),
            tokenizer=self.pair.tokenizer,
            max_context=self.max_context,
            default_sampling=self.pair.default_sampling(),
            config=config,
            wishes=wishes,
        )

    def run(
        self, request: TextRequest, *, reuse: bool = False, on_prefill: OnPrefill | None = None
    ) -> Generator[TextChunk, None, None]:
        """Decode what was asked for; `on_prefill` is told how many of the prompt's tokens are read, and of how many."""
        models = TextModels(
            target=self.target_model,
            draft=self.draft_model if self.tree.policy != "none" else None,
            policy=self.policy,
            profile=self.profile,
            max_context=self.max_context,
            use_tree=self.use_tree,
        )
        return run_text(models, request, self.pair, self._running, reuse=reuse, on_prefill=on_prefill)

    def chat(self, *, system: str | None = None, raw: bool = False, **wishes: Unpack[Wishes]) -> Conversation:
        """A conversation, empty but for the system's message; `raw` leaves the chat template out."""
        return Conversation(self, system=system, raw=raw, **wishes)

    def cancel(self, *, abandon: bool = False) -> None:
        """End the text under way after its pass, or with `abandon` between two layers. From anywhere."""
        self._running.cancel(abandon=abandon)

    def use_tree(self, tree: TreeSettings) -> Policy:
        """Other trees from the next text on, within the memory plan; raises EdgespecError for larger ones."""
        if self.draft_model is None and tree.policy != "none":
            raise EdgespecError("E_SETTING", "there is no draft to grow trees with.", "Start with `draft=DRAFT`.")
        check_tree_fits(tree, self._planned_tree)
        self.policy = _policy(tree, self.profile)
        self.tree = tree
        return self.policy

    def verify_lossless(self, prompts: Sequence[Prompt], *, max_new_tokens: int = 64) -> list[Verdict]:
        """Each prompt greedily, through the trees and plainly: where the texts part, and by what gap of logits."""
        own = self.tree

        def decode(ids: list[int], tree: TreeSettings) -> tuple[int, ...]:
            self.use_tree(tree)
            return self.generate(ids, max_new_tokens=max_new_tokens, temperature=0.0).token_ids

        texts = [self.encode(prompt) for prompt in prompts]
        try:
            return [compare(self.target_model, ids, partial(decode, ids), own, dtype=self.dtype) for ids in texts]
        finally:
            self.use_tree(own)

    plan_for = staticmethod(plan_for)

    @property
    def plan(self) -> Placement:
        """Where the weights live, and what memory is spent on; printed, it is a table."""
        return self.placement

    @property
    def target_model(self) -> CausalModel:
        """The target, streamed as planned."""
        return self._loaded.target

    @property
    def draft_model(self) -> CausalModel | None:
        """The draft; None where decoding is plain."""
        return self._loaded.draft

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids, with the tokenizer's own special tokens; raises EdgespecError when there are none.

        Messages, as {"role": ..., "content": ...}, go through the chat template.
        """
        ids = prompt_ids(self.pair.tokenizer, prompt)
        if not ids:
            raise EdgespecError("E_PROMPT_EMPTY", "the prompt has no tokens.", "Give at least one character.")
        return ids

    def forget(self) -> None:
        """Keep nothing of the last text: the next one that reuses its rows finds none."""
        for model in self._loaded.models:
            model.reset(0)

    def close(self) -> None:
        """End the readers and let the models go."""
        self._loaded.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _policy(tree: TreeSettings, profile: Profile | None) -> Policy:
    """The trees' policy, on the pair's own acceptance where that was measured and no other is named."""
    policy = open_policy(tree)
    return policy if profile is None or tree.acceptance is not None else policy.with_acceptance(acceptance_of(profile))
