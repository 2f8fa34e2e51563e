"""What a loaded model sees with: its family's whole model, in whose place of a decoder the loaded one stands.

The tower's weights are read when a picture comes that is not known yet. What the tower said of a prompt's pictures is
kept by their digests, so that a further question about them runs no tower.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from edgespec.errors import offload_errors
from edgespec.model.attention import NAME
from edgespec.model.causal_model import CausalModel
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seeing import refused, see
from edgespec.model.seen_prompt import SeenPrompt
from offload.skeleton import build_on_meta
from offload.text_part import decoder_layers
from offload.tower import Tower, TowerRecord

KEPT_FIELDS = ("pooler_output", "deepstack_features")  # of what a tower says: the rest is of its own layers
MOST_KEPT_BYTES = 32 << 20  # of what towers said

Digests = tuple[str, ...]


class Sight:
    """The eyes of one loaded model."""

    def __init__(
        self,
        causal: CausalModel,
        record: TowerRecord | None,
        *,
        is_resident: bool,
        check: Callable[[PretrainedConfig, PicturePrompt], None],
    ) -> None:
        """See for a model, whose tower is at `record`; None where its folder has none.

        `check` tries the family before the first picture, and raises EdgespecError where it is read wrongly.
        """
        self._causal, self._record, self._is_resident, self._check = causal, record, is_resident, check
        self._tower: Tower | None = None
        self._kept: OrderedDict[Digests, Any] = OrderedDict()  # what the tower said, by pictures, the latest last
        self.num_runs = 0  # of the tower

    @property
    def is_awake(self) -> bool:
        """Whether weights of the tower are in memory."""
        return self._tower is not None and self._tower.is_present

    @property
    def kept_bytes(self) -> int:
        """The bytes of what is kept of earlier pictures."""
        return sum(_bytes_of(said) for said in self._kept.values())

    @property
    def tower_read_bytes(self) -> int:
        """The bytes of the tower's weights that were read so far."""
        return 0 if self._tower is None else self._tower.num_read_bytes

    def see(self, prompt: PicturePrompt) -> SeenPrompt:
        """Return what the decoder gets of a prompt with pictures; raises EdgespecError where they are not read."""
        with offload_errors():
            model, tower = self._opened(prompt)
            digests = tuple(digest for _, _, digest in prompt.image_rows)
            is_known = digests in self._kept
            outer: Any = model.base_model
            run = outer.get_image_features

            def features(*arguments: Any, **named: Any) -> Any:
                if not is_known:
                    self.num_runs += 1
                    self._keep(digests, run(*arguments, **named))
                return self._kept[digests]

            vars(outer)["get_image_features"] = features
            try:
                with nullcontext() if is_known else tower.loaded():
                    return see(model, prompt)
            finally:
                del vars(outer)["get_image_features"]

    def rest(self) -> None:
        """Let the tower's weights go: nothing waits that has pictures."""
        if self._tower is not None:
            self._tower.drop()

    def forget(self) -> None:
        """Forget what was seen."""
        self._kept.clear()

    def _opened(self, prompt: PicturePrompt) -> tuple[PreTrainedModel, Tower]:
        """Return the family's whole model, and its tower; they are made when the first picture comes."""
        if self._tower is None:
            if self._record is None:
                raise refused(self._causal.model.config, "its files have no tower for images that could be read")
            self._check(self._causal.model.config, prompt)
            self._model = whole_model(self._causal.model, self._causal.device)
            self._tower = Tower(self._model, self._record, self._causal.device, is_resident=self._is_resident)
        return self._model, self._tower

    def _keep(self, digests: Digests, said: Any) -> None:
        self._kept[digests] = _without_layers(said)
        while len(self._kept) > 1 and self.kept_bytes > MOST_KEPT_BYTES:
            self._kept.popitem(last=False)


def whole_model(loaded: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a family's model without weights but for the decoder, which is the loaded one, and the table of words."""
    config: PretrainedConfig = copy.deepcopy(loaded.config)
    model = build_on_meta(config, "its config.json", dtype=loaded.dtype)
    outer: Any = model.base_model
    outer.__class__ = _on_device(type(outer), device)
    path = decoder_layers(loaded)[0].rpartition(".")[0]
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, loaded.get_submodule(path))
    model.set_input_embeddings(loaded.get_input_embeddings())
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
    # Attention is ours, and makes its own masks: a family's would have rows x rows numbers.
    model.config.get_text_config(decoder=True)._attn_implementation = NAME
    return model


def _on_device(family: type[PreTrainedModel], device: torch.device) -> type[PreTrainedModel]:
    """Return a family's class that is on a device also while none of its weights are in memory."""
    names = {"__module__": family.__module__, "__qualname__": family.__qualname__}  # by which transformers knows it
    return type(family.__name__, (family,), {**names, "device": property(lambda _self: device)})


def _without_layers(said: Any) -> Any:
    """Return what a tower said, without what its own layers did."""
    if not isinstance(said, ModelOutput):
        return said
    found = type(said)()
    for name, value in _kept_of(said).items():
        setattr(found, name, value)  # some families have these beside the fields of their type
    return found


def _kept_of(said: ModelOutput) -> dict[str, Any]:
    return {name: value for name in KEPT_FIELDS if (value := getattr(said, name, None)) is not None}


def _bytes_of(said: Any) -> int:
    if isinstance(said, Tensor):
        return said.nbytes
    parts = _kept_of(said).values() if isinstance(said, ModelOutput) else said if isinstance(said, list | tuple) else ()
    return sum(_bytes_of(part) for part in parts)
