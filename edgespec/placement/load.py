"""A placed pair is brought into memory: its families are tried, its weights quantised, loaded, and let go again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.draft.own_parts import aux_states_of, is_copy, lend, reads_features
from edgespec.errors import EdgespecError
from edgespec.machine.claim import claim_device
from edgespec.machine.device import keeps_row_bits
from edgespec.model.causal_model import CausalModel, chunk_rows_on
from edgespec.model.layer_kinds import chosen_experts
from edgespec.model.mechanisms.waiting_keys import NUM_PLACES, KeyStream
from edgespec.model.native.trial import try_weights
from edgespec.model.own_pass_model import OwnPassModel
from edgespec.model.pass_rows import FewRows
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.self_check import check_tree_reading
from edgespec.model.sight import Sight
from edgespec.model.sight_check import check_seeing
from edgespec.model.tree_support import TreeSupport
from edgespec.pair.tree_support import tree_support
from edgespec.placement.cache_memory import row_sizes, waiting_windows
from edgespec.placement.copied_layers import shared_layers
from edgespec.placement.memory import CUDA_CONTEXT_BYTES, layer_rows
from edgespec.placement.native import reads_natively
from edgespec.placement.place import PlacedWeights
from edgespec.placement.run_config import RunConfig
from edgespec.placement.tower_memory import keeps_tower
from edgespec.placement.weights import Announce
from offload.adapters.forward import LoadedAdapters
from offload.device import Device
from offload.experts.expert_source import ExpertCounts
from offload.experts.expert_use import ExpertUse
from offload.placement import KEYS_ON_THE_WAY, Placement, all_resident
from offload.shared_layers import with_shared_layers
from offload.streamed_model import StreamedModel

EXPERT_ROWS = 32  # that a prompt's tokens choose an expert for, from which unpacking it is faster

Progress = Callable[[str, int, int], None]  # phase, done, total: bytes when loading, layers when packing


class LoadedModels:
    """The models by their roles, `target` and `draft`, until `close`."""

    def __init__(
        self,
        streamed: Mapping[str, StreamedModel],
        *,
        device: torch.device,
        lent: frozenset[str] = frozenset(),
        cuda_graphs: bool = False,
        support: TreeSupport,
        unshared: frozenset[int] = frozenset(),
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """A draft that reads the target's hidden states borrows parameters of it (`lent`), perhaps none.

        The states are then kept. With `cuda_graphs` the draft's passes have few
        shapes. Ids that are `unshared` it never proposes. `support` is the target's. `release` gives the device back.
        """
        self._streamed = dict(streamed)
        self._release = release
        draft = streamed["draft"].model if "draft" in streamed else None
        if lent:
            lend(streamed["target"].model, streamed["draft"].model, lent)
        self.sight: Sight | None = None  # of a target that follows trees
        self._causal: dict[str, CausalModel] = {
            role: CausalModel(
                model.model,
                device=device,
                chunk_rows=chunk_rows_on(device),
                keeps_hidden=role == "target" and draft is not None and (aux_states_of(draft) or reads_features(draft)),
                cuda_graphs=cuda_graphs and role == "draft",
                keeps_row_bits=role == "target" and keeps_row_bits(model.model.dtype, device),
                never_drawn=unshared if role == "draft" else (),
            )
            for role, model in streamed.items()
            if role != "target" or not support.has_own_passes
        }
        target = streamed["target"]
        if "target" in self._causal and target.copying is not None:
            self._causal["target"].waiting = key_stream(target.model, target.placement, target.copying)
        for role, causal in self._causal.items():
            causal.few_rows = _few_rows(streamed[role], causal.config)
            if not streamed[role].reorders:
                causal.use_native_passes()
                if not hasattr(causal.model, "block"):
                    try_weights(causal, takes_features=reads_features(causal.model))
        if support.has_own_passes:
            self._causal["target"] = OwnPassModel(
                target.model, device=device, reads_on=support.reads_on, share_layers=target.shared_layers
            )

    @property
    def target(self) -> CausalModel:
        """The target, streamed as planned."""
        if not self._causal:
            raise closed_engine()
        return self._causal["target"]

    @property
    def draft(self) -> CausalModel | None:
        """The draft; None where there is none."""
        return self._causal.get("draft")

    @property
    def placement(self) -> Placement:
        """Where the target's weights live: on disk where the system locked less memory than was planned."""
        return self._streamed["target"].placement

    @property
    def expert_counts(self) -> ExpertCounts:
        """The experts that the target's rows have requested since it was loaded."""
        return self._streamed["target"].expert_counts

    @property
    def expert_use(self) -> ExpertUse | None:
        """The share of the target's passes that requested each expert; None where they are parts of their layers."""
        return self._streamed["target"].expert_use

    @property
    def models(self) -> tuple[CausalModel, ...]:
        """The target, and the draft where there is one."""
        return tuple(self._causal.values())

    def close(self) -> None:
        """End the readers and let the models go."""
        if self.sight is not None:
            self.sight.rest()
        for causal in self._causal.values():
            causal.close()
        _close(self._streamed)
        self._causal, self.sight = {}, None
        self._release()
        self._release = lambda: None


def key_stream(model: PreTrainedModel, placement: Placement, device: Device) -> KeyStream | None:
    """Return what brings the keys and values that wait in RAM; None where none do."""
    layers = placement.waiting_keys
    if not layers:
        return None
    sizes = row_sizes(model.config.get_text_config(decoder=True), model.dtype)
    return KeyStream(
        device,
        layers,
        row_bytes=max(sum(sizes[layer]) for layer in layers),
        slot_bytes=placement.device_bytes[KEYS_ON_THE_WAY] // NUM_PLACES,
        windows=waiting_windows(model),
    )


def open_sight(target: CausalModel, placed: PlacedWeights, *, self_check: bool) -> Sight:
    """Return what a target sees with: its tower stays between pictures where the plan leaves room for all of it."""
    skeleton, placement = placed.target.skeleton, placed.placement
    is_resident = keeps_tower(skeleton, placement.device_budget_bytes - placement.planned_bytes)
    return Sight(target, skeleton.tower, is_resident=is_resident, check=check_seeing if self_check else _trusted)


def _trusted(_config: PretrainedConfig, _prompt: PicturePrompt) -> None:
    """Try nothing."""


def closed_engine() -> EdgespecError:
    """Return the error of an engine that was closed."""
    return EdgespecError("E_ENGINE", "the engine is closed.", "Open another one.")


def load_models(
    placed: PlacedWeights,
    *,
    run_config: RunConfig,
    unshared: frozenset[int],
    self_check: bool,
    on_quantize: Announce | None,
    progress: Progress | None,
) -> LoadedModels:
    """Load the weights to their places; raises OffloadError, and EdgespecError for a family that fails.

    Of a CUDA device no more than the run's limit is taken from now on, its context included, and no more than the
    plan's where the driver would spill. Ids that are `unshared` the draft never proposes.
    """
    weights = {"target": placed.target} | ({"draft": placed.draft} if placed.draft else {})
    device, limit_bytes = run_config.device, run_config.limits.max_gpu_bytes
    support = tree_support(placed.target.model)
    release = claim_device(
        device,
        limit_bytes=None if limit_bytes is None else limit_bytes - CUDA_CONTEXT_BYTES,
        planned_bytes=placed.placement.device_budget_bytes - CUDA_CONTEXT_BYTES,
    )
    streamed: dict[str, StreamedModel] = {}
    try:
        if self_check:
            for model in weights.values():
                if model is not placed.target or not support.has_own_passes:
                    check_tree_reading(model.skeleton.model.config, device=device)
        # Quantising takes memory of its own: all of it comes before anything is loaded.
        skeletons = {
            role: model.loadable(device, announce=on_quantize, progress=_phase(progress, f"packing {role}"))
            for role, model in weights.items()
        }
        adapters: LoadedAdapters | None = None
        lent = skeletons["draft"].lent if "draft" in skeletons else frozenset()
        shared = shared_layers(placed.target, placed.draft, placed.placement)
        for role, skeleton in skeletons.items():
            if role == "draft" and shared:
                skeleton = with_shared_layers(skeleton, streamed["target"].layers, shared)
            of_draft = all_resident(len(skeleton.layers), is_unpacked=placed.placement.has_unpacked_draft)
            placement = placed.placement if role == "target" else of_draft
            has_own_passes = support.has_own_passes and role == "target"
            is_exact = run_config.exact and role == "target"
            is_native = not has_own_passes and not is_exact and reads_natively(skeleton, placement, device=device)
            streamed[role] = StreamedModel(
                skeleton,
                placement,
                device=device,
                reorders=not is_native,
                lends=bool(lent) and role == "target",
                progress=_phase(progress, f"loading {role}"),
            )
            if weights[role].adapters:
                if adapters is None or not is_copy(weights[role].model.parts):
                    adapters = LoadedAdapters(weights[role].adapters, dtype=skeleton.model.dtype, device=device)
                streamed[role].attach(adapters)
        loaded = LoadedModels(
            streamed,
            device=device,
            lent=lent,
            # A recorded pass has the adapters that it was recorded with.
            cuda_graphs=run_config.records_passes and not (placed.draft and placed.draft.adapters),
            support=support,
            unshared=unshared,
            release=release,
        )
        _use_adapters(loaded, placed)
        if not support.has_own_passes:
            budget_bytes = placed.placement.device_budget_bytes
            loaded.sight = open_sight(loaded.target, placed, self_check=self_check)
            loaded.sight.looks_ahead = streamed["target"].work_meanwhile(loaded.sight.go_on)
            loaded.target.layer_rows = layer_rows(skeletons["target"], run_config.dtype, budget_bytes)
            if run_config.exact:
                loaded.target.read_exactly()
        return loaded
    except BaseException:
        _close(streamed)
        release()
        raise


def _few_rows(model: StreamedModel, config: PretrainedConfig) -> FewRows | None:
    """Return which rows of a model are few; None where its weights find that out."""
    num_experts, share = chosen_experts(config)
    prompt_tokens = 0 if num_experts is None else math.ceil(EXPERT_ROWS / share)
    return FewRows(span_rows=model.few_rows, prompt_tokens=prompt_tokens) if model.few_rows else None


def _use_adapters(loaded: LoadedModels, placed: PlacedWeights) -> None:
    """Let texts that choose no adapters have those that the models were given for them."""
    loaded.target.default_adapters = placed.target.model.default_adapters
    if loaded.draft is not None and placed.draft is not None:
        loaded.draft.default_adapters = placed.draft.model.default_adapters
        loaded.draft.follows_adapters = is_copy(placed.draft.model.parts)


def _phase(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return functools.partial(progress, name) if progress else None


def _close(streamed: dict[str, StreamedModel]) -> None:
    for model in streamed.values():
        model.close()
    streamed.clear()
