"""The composition root and the Python API: pair, plan, models, and text in and out."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch
from tokenizers.decoders import DecodeStream

from edgespec.causal_model import CausalModel
from edgespec.config import MemoryLimits, SamplingSettings, parse_quant
from edgespec.context import new_token_limit
from edgespec.decode import Session, StepResult
from edgespec.device import resolve_device, resolve_dtype
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.errors import EdgespecError
from edgespec.grow.policies import open_policy
from edgespec.loops import continue_text
from edgespec.memory import cache_rows
from edgespec.pair import ModelPair, open_pair
from edgespec.plan import plan_pair
from edgespec.planned import acceptance_of, settle
from edgespec.results import GenerationResult, TextChunk
from edgespec.self_check import check_tree_reading
from edgespec.target import Target, offload_errors
from edgespec.tree_settings import TreeSettings
from edgespec.weights import Announce
from offload.placement import Placement, all_resident
from offload.skeleton import Skeleton
from offload.streamed_model import StreamedModel
from profiles.schema import Profile

Progress = Callable[[str, int, int], None]  # phase, done, total: bytes when loading, layers when quantising


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
        follow the last steps; `edgespec.planned.settle` finds it and says what `tree` it asks for.
        `prompt_tokens` is the longest prompt to plan for, as long as the context where it is not
        known. `on_plan` sees the engine before weights are read, `on_quantize` what is about to be
        written to the cache. `self_check` tries whether the family reads token trees rightly.
        """
        self.pair = pair
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, pair.target.config, self.device)
        self.max_context = min(context_tokens, pair.max_context or context_tokens)
        self.quant, self.draft_quant = parse_quant(quant), parse_quant(draft_quant, flag="--draft-quant")
        tree = tree or TreeSettings()
        self.tree = tree if pair.draft is not None else tree.plain()
        self.profile = profile
        self.policy = open_policy(self.tree)
        if profile is not None and self.tree.acceptance is None:
            self.policy = self.policy.with_acceptance(acceptance_of(profile))
        self._models: dict[str, StreamedModel] = {}
        self._causal: dict[str, CausalModel] = {}
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
            weights = {"target": plan.target} | ({"draft": plan.draft} if plan.draft else {})
            if self_check:
                for model in weights.values():
                    check_tree_reading(model.planned.model.config, device=self.device)
            # Quantising takes memory of its own: all of it comes before anything is loaded.
            skeletons = {
                phase: model.loadable(
                    self.device,
                    announce=on_quantize,
                    progress=functools.partial(progress, f"quantising {phase}") if progress else None,
                )
                for phase, model in weights.items()
            }
            try:
                for phase, skeleton in skeletons.items():
                    placement = self.placement if phase == "target" else all_resident(len(skeleton.records))
                    self._load(phase, skeleton, placement, progress)
            except BaseException:
                self.close()
                raise

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | None = None,
        *,
        draft: str | Path | None = None,
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
        """Load a target folder and a draft folder; without a target, the built-in pair.

        Without `tree` the settings are those of the pair's profile, where `edgespec profile` made one
        ("auto"), of a profile's file, or the defaults ("none").
        """
        pair = open_pair(Path(target) if target else None, Path(draft) if draft else None)
        settled = settle(
            pair,
            source=profile if tree is None else "none",
            given={},
            temperature=pair.default_sampling().temperature,
            limits=limits or MemoryLimits(),
            device=resolve_device(device),
            dtype=dtype,
            quant=parse_quant(quant),
            draft_quant=parse_quant(draft_quant, flag="--draft-quant"),
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
        prompt: str | list[int],
        *,
        max_new_tokens: int = 512,
        sampling: SamplingSettings | None = None,
        seed: int | None = None,
        on_chunk: Callable[[TextChunk], None] | None = None,
    ) -> GenerationResult:
        """Continue a prompt (text, or token ids); -1 new tokens means to the end of the context."""
        sampling = sampling or self.pair.default_sampling()
        seed = secrets.randbits(32) if seed is None else seed
        ids = self.encode(prompt)
        limit, limited_by = new_token_limit(self.max_context, len(ids), max_new_tokens)
        started = time.perf_counter()
        steps: list[StepResult] = []
        for chunk in self.stream(ids, max_new_tokens=limit, sampling=sampling, seed=seed):
            steps.append(chunk.step)
            if on_chunk:
                on_chunk(chunk)
        token_ids = tuple(token for step in steps for token in step.tokens)
        return GenerationResult(
            text=str(self.pair.tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            token_ids=token_ids,
            finish_reason=limited_by if steps[-1].finish == "length" else "stop",
            prompt_tokens=len(ids),
            seed=seed,
            sampling=sampling,
            steps=tuple(steps),
            total_s=time.perf_counter() - started,
        )

    def stream(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int = 512,
        sampling: SamplingSettings | None = None,
        seed: int | None = None,
    ) -> Iterator[TextChunk]:
        """The same, step by step. Closing the iterator stops between two passes."""
        sampling = sampling or self.pair.default_sampling()
        ids = self.encode(prompt)
        limit, _ = new_token_limit(self.max_context, len(ids), max_new_tokens)
        generator = torch.Generator(self.device).manual_seed(secrets.randbits(32) if seed is None else seed)
        session = Session(target=Target(self.target_model), drafter=self._drafter(sampling))
        decoder = DecodeStream(skip_special_tokens=True)
        backend = self.pair.tokenizer.backend_tokenizer
        for step in self._steps(session, ids, limit, sampling, generator):
            pieces = [decoder.step(backend, token) or "" for token in step.tokens]
            yield TextChunk(text="".join(pieces), step=step)

    @property
    def target_model(self) -> CausalModel:
        """The target, streamed as planned."""
        if not self._causal:
            raise RuntimeError("the engine is closed")
        return self._causal["target"]

    @property
    def draft_model(self) -> CausalModel | None:
        """The draft; None where decoding is plain."""
        return self._causal.get("draft")

    def encode(self, prompt: str | list[int]) -> list[int]:
        """A prompt's token ids, with the tokenizer's own special tokens; raises EdgespecError when there are none."""
        ids: list[int] = self.pair.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise EdgespecError("E_PROMPT_EMPTY", "the prompt has no tokens.", "Give at least one character.")
        return ids

    def close(self) -> None:
        """End the readers and let the models go."""
        for causal in self._causal.values():
            causal.close()
        for model in self._models.values():
            model.close()
        self._models, self._causal = {}, {}

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, phase: str, skeleton: Skeleton, placement: Placement, progress: Progress | None) -> None:
        streamed = StreamedModel(
            skeleton,
            placement,
            device=self.device,
            progress=functools.partial(progress, f"loading {phase}") if progress else None,
        )
        self._models[phase] = streamed
        self._causal[phase] = CausalModel(streamed.model, device=self.device)

    def _steps(
        self, session: Session, ids: list[int], limit: int, sampling: SamplingSettings, generator: torch.Generator
    ) -> Iterator[StepResult]:
        return continue_text(
            session,
            torch.tensor(ids, device=self.device),
            policy=self.policy,
            profile=self.profile,
            sampling=sampling,
            generator=generator,
            max_new_tokens=limit,
            stop_tokens=self.pair.stop_tokens,
            capacities=cache_rows(len(ids) + limit, self.tree),
        )

    def _drafter(self, sampling: SamplingSettings) -> LanguageModelDrafter | None:
        draft_model = self.draft_model
        if draft_model is None:
            return None
        return LanguageModelDrafter(
            draft_model,
            vocab=self.target_model.vocab,
            sampling=self.tree.draft_sampling(sampling),
            tree_rows=self.tree.num_drafted,
        )
