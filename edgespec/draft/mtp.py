"""A multi-token-prediction layer, which a target's own checkpoint holds behind its decoder layers, as a draft.

It is one decoder layer of the target's family. Its input is made of a token's embedding and of the feature before it,
the target's last hidden state after the final norm; its own output after its own norm is recycled. One stored layer
drafts every depth, as vLLM, SGLang and llama.cpp have it (DeepSeek-V3, section 2.2, has as many as it trains depths).
Two layouts are in use: a layer numbered behind the last one (DeepSeek, GLM, all in GGUF), and a part `mtp` (Qwen).
Legend: L the target's layers, h its hidden size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, PretrainedConfig, PreTrainedModel

from edgespec.draft.own_parts import OwnParts
from edgespec.draft.published import PublishedDraft
from edgespec.model.layer_kinds import kinds_of
from edgespec.model.narrow_copy import keep_layers

INDEXED = {"deepseek_v32", "glm_moe_dsa"}  # families whose layer is DeepSeek-V3's: what it sees no index chooses
NUMBERED = {"deepseek_v3", "glm4_moe", "glm4_moe_lite", *INDEXED}  # families whose layer is numbered L
NAMED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}  # those that have it as a part of its own
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of a config that states how many there are
OWN = {
    "enorm": "fuse.enorm", "hnorm": "fuse.hnorm", "eh_proj": "fuse.eh_proj", "shared_head.norm": "model.norm",
    "pre_fc_norm_embedding": "fuse.enorm", "pre_fc_norm_hidden": "fuse.hnorm", "fc": "fuse.eh_proj",
    "norm": "model.norm",
}  # fmt: skip
UNKNOWN = "blk."  # begins the name of a tensor of a GGUF file that its family has not
COPIES = ("embed_tokens", "shared_head.head", "lm_head")  # of the target's own
UNREAD = (*(f"{copied}." for copied in COPIES), "self_attn.indexer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """The names of a layer's tensors in the target's checkpoint."""

    pattern: re.Pattern[str]  # whose group is the name within the layer
    is_named: bool

    def parameter(self, stored: str, *, layer: PublishedDraft) -> str | None:
        """Return the parameter that a stored tensor of the layer is; None for one that is not read.

        Raises EdgespecError, which names the `layer`, for one that no such layer has.
        """
        found = self.pattern.fullmatch(stored)
        if found is None or stored.startswith(UNKNOWN):
            raise layer.unknown_tensor(stored)
        name = found[1]
        if name.startswith(UNREAD):
            return None
        for own, parameter in OWN.items():
            if name.startswith(f"{own}."):
                return parameter + name.removeprefix(own)
        if not self.is_named:
            return f"model.layers.0.{name}"
        if name.startswith("layers.0."):
            return f"model.{name}"
        raise layer.unknown_tensor(stored)

    def of_layer(self, stored: Iterable[str]) -> list[str]:
        """Return the tensors that are the layer's."""
        return [name for name in stored if self.pattern.fullmatch(name)]


def mtp_names(text: PretrainedConfig, *, is_gguf: bool) -> MtpNames | None:
    """Return how a target of this text config names such a layer; None for a family whose layer is not known."""
    if text.model_type in (NUMBERED | NAMED if is_gguf else NUMBERED):
        pattern = rf"(?:(?:model\.)?(?:language_model\.)?layers|blk)\.{text.num_hidden_layers}\.(.+)"
        return MtpNames(pattern=re.compile(pattern), is_named=False)
    return MtpNames(pattern=re.compile(r"mtp\.(.+)"), is_named=True) if text.model_type in NAMED else None


def mtp_config(text: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of the layer alone: with full attention, and with experts where the last layer has them.

    How weights are packed is as in the target.
    """
    if text.model_type in INDEXED:
        return _dense_config(text)
    config: Any = copy.deepcopy(text)
    kinds = kinds_of(config)
    last_full = max((layer for layer, kind in enumerate(kinds) if kind == "full_attention"), default=len(kinds) - 1)
    keep_layers(config, [last_full])
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    for name in COUNT_KEYS:
        if getattr(config, name, None):
            setattr(config, name, 0)
    return config  # type: ignore[no-any-return]


def _dense_config(text: PretrainedConfig) -> PretrainedConfig:
    """Return DeepSeek-V3's configuration of one layer with experts, of the same sizes."""
    known = DeepseekV3Config().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    fields = {name: value for name, value in text.to_dict().items() if name in known}
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    return DeepseekV3Config(**{**fields, **one})


class MtpFuse(nn.Module):
    """Makes the layer's input [..., h] of a token's embedding [..., h] and the feature [..., h] before it."""

    def __init__(self, norm: Any, config: PretrainedConfig) -> None:
        super().__init__()
        size = int(config.hidden_size)
        self.enorm, self.hnorm = (norm(size, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.has_feature_first = False

    def forward(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """Return the layer's input, from the embedding first and the feature second."""
        halves = [self.enorm(embedded), self.hnorm(previous.to(embedded.dtype))]
        found: Tensor = self.eh_proj(torch.cat(halves[::-1] if self.has_feature_first else halves, -1))
        return found


def attach_mtp_parts(model: PreTrainedModel) -> None:
    """Give a one-layer model what makes it a multi-token-prediction layer, on the meta device."""
    config, first = model.config, model.model.layers[0]
    with torch.device("meta"):
        model.fuse = MtpFuse(type(first.input_layernorm), config).to(model.dtype)
    model.hides_first_row = True  # type: ignore[assignment]
    model.requires_grad_(False)


MTP_PARTS = OwnParts(attach=attach_mtp_parts, modules=("fuse", "model.norm"))
WITHOUT_NORM = OwnParts(attach=attach_mtp_parts, modules=("fuse",))  # whose last norm is the target's
