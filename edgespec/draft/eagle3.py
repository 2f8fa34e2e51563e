"""What an EAGLE-3 head's folder states: its config in either container, and what its tensors' names and shapes show.

The plain container (SafeAILab, SpecForge, NVIDIA) is a flat Llama config; that of `speculators` states the layer's
config as a part, and only what differs from the defaults of its model type. Whatever stands in a config is read, or
known not to matter, or named in a note. Legend: h the head's width, h_t the target's, n the number of states, L the
target's layers, V its tokens, Vd those that the head knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from edgespec.draft.axes_rotation import check_axes, with_known_rotation
from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.published import HARMLESS_TENSORS, PublishedDraft, notes_of_unknown, stated_verifier
from edgespec.errors import EdgespecError
from offload.checkpoint import TensorEntry

FAMILIES = ("llama", "qwen3")  # of a head's layer
OWN_LAYERS = "edgespec_taps"  # the user's own: numbers of layers that the stream has passed, as they are
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
OWN_KEYS = {
    "draft_vocab_size", "target_hidden_size", "eagle_config", "fc_norm", "norm_output", "norm_before_fc",
    "norm_before_residual", "num_aux_hidden_states", AUX_IDS, OWN_LAYERS, "speculators_config",
    "speculators_model_type", "transformer_layer_config", "bias",
}  # fmt: skip
EAGLE_CONFIG_KEYS = {
    AUX_IDS,
    "use_aux_hidden_state",
    "norm_before_fc",
    "norm_before_residual",
    "fc_norm",
    "norm_output",
}
HARMLESS_KEYS = {
    "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "speculators_version", "use_cache",
    "initializer_range", "_name_or_path", "attention_dropout", "pretraining_tp", "model_type", "modelopt_version",
    "embed_requires_grad", "has_no_defaults_at_init", "max_window_layers", "name_or_path",
}  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DEFAULT_AUX_LAYERS = 3
MAX_PADDING = 1024  # tokens of a table that stand for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Facts:
    """A head's own facts, without those of its target."""

    named: str  # the folder, in errors
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    stated_layers: tuple[int, ...] | None  # as the config has them; None: the default ones
    has_exact_layers: bool = False  # the user's own: they are taken as they are
    num_aux_layers: int = (
        DEFAULT_AUX_LAYERS  # 0: the feature is the target's last hidden state, and `fc` is not applied
    )
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_fc_bias: bool = False
    has_o_bias: bool = False
    owns_embedding: bool = False
    owns_head: bool = False
    has_map: bool = False
    map_dtype: torch.dtype = torch.int64
    verifier: str | None = None  # the target's name, as the head's makers wrote it
    notes: tuple[str, ...] = ()

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return how many of the target's layers the stream has passed for each of its states; raises EdgespecError.

        Lists that begin with 1 number the layers whose output is meant, all others count those that were passed: both
        conventions are in use, and no container says which it follows.
        """
        if self.num_aux_layers == 0:
            return ()
        stated = self.stated_layers
        if stated is None:
            stated = (2, num_layers // 2, num_layers - 3)
        elif stated[0] == 1 and not self.has_exact_layers:
            stated = tuple(layer + 1 for layer in stated)
        if not all(0 <= layer <= num_layers for layer in stated):
            what = f"'{self.named}' reads hidden states at {list(stated)}, and the target has {num_layers} layers."
            raise EdgespecError("E_HEAD_TARGET", what, "Name the target that the head was made for.")
        return stated

    def check_fits(self, target: PretrainedConfig) -> None:
        """Raise EdgespecError where a target of this text config cannot be the head's."""
        pairs = [
            ("hidden states of {} numbers", self.target_hidden_size, int(target.hidden_size), 0),
            ("a vocabulary of {} tokens", self.vocab_size, int(target.vocab_size), MAX_PADDING),
        ]
        for words, ours, theirs, slack in pairs:
            if abs(ours - theirs) > slack:
                what = f"'{self.named}' is made for {words.format(ours)}, and the target has {theirs}."
                raise EdgespecError("E_HEAD_TARGET", what, "Name the target that the head was made for.")
        if not self.owns_head and self.vocab_size != target.vocab_size:
            what = f"'{self.named}' borrows a head of {self.vocab_size} tokens, and the target has {target.vocab_size}."
            raise EdgespecError("E_HEAD_TARGET", what, "Name the target that the head was made for.")
        self.layers(int(target.num_hidden_layers))


def eagle3_head(named: str) -> PublishedDraft:
    """Return a head, as errors name it."""
    return PublishedDraft("EAGLE-3 head", named)


def read_eagle3(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], kind: DraftKind, *, named: str
) -> tuple[Eagle3Facts, PretrainedConfig]:
    """Return a head's facts and its layer's config, from its config.json and its tensors' headers.

    Where there are no tensors, they are those that a published head of the kind has. Raises EdgespecError for what is
    not understood, or contradicts itself.
    """
    head, is_plain = eagle3_head(named), kind.container == "plain"
    inner = config.get("eagle_config") if is_plain else {}
    inner = inner if isinstance(inner, Mapping) else {}
    stated = {**config, **inner}  # NVIDIA's flags stand in the part
    layer = _layer_config(config if is_plain else config.get("transformer_layer_config"), named)
    if not is_plain and not isinstance(config.get("norm_before_residual"), bool):
        raise head.wrong("does not say norm_before_residual, which readers take to be true or false, and guess")
    if config.get("quantization_config") is not None:
        raise head.wrong("has packed weights, and a head is read as it was trained")
    flags = {name: head.flag(stated, name) for name in FLAGS}
    target_hidden_size = head.count(config, "target_hidden_size", default=layer.hidden_size)
    vocab_size = int(layer.vocab_size)
    draft_vocab_size = head.count(config, "draft_vocab_size", default=vocab_size)
    aux_layers = stated.get(OWN_LAYERS, stated.get(AUX_IDS)) or None
    if aux_layers is not None and not (
        isinstance(aux_layers, list) and all(type(layer) is int for layer in aux_layers)
    ):
        raise head.wrong(f"names its layers as {aux_layers!r}, which is no list of whole numbers")
    num_aux_layers = (
        len(aux_layers) if aux_layers else head.count(config, "num_aux_hidden_states", default=DEFAULT_AUX_LAYERS)
    )
    if not head.flag(stated, "use_aux_hidden_state", default=True):
        num_aux_layers = 0
    elif aux_layers is None and num_aux_layers != DEFAULT_AUX_LAYERS:
        raise head.wrong(f"reads {num_aux_layers} hidden states and does not say which")
    if num_aux_layers == 0 and target_hidden_size != layer.hidden_size:
        what = f"reads the last hidden state, of {target_hidden_size} numbers, as if it had {layer.hidden_size}"
        raise head.wrong(what)
    facts = Eagle3Facts(
        named=named,
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        stated_layers=tuple(aux_layers) if aux_layers else None,
        has_exact_layers=OWN_LAYERS in stated,
        num_aux_layers=num_aux_layers,
        **flags,
        has_fc_bias="fc.bias" in tensors,
        has_o_bias=any(name.endswith("0.self_attn.o_proj.bias") for name in tensors)
        or "midlayer.self_attn.o_proj.bias" in tensors,
        owns_embedding="embed_tokens.weight" in tensors or target_hidden_size != layer.hidden_size,
        owns_head="lm_head.weight" in tensors or draft_vocab_size != vocab_size,
        has_map="d2t" in tensors or (not tensors and draft_vocab_size != vocab_size),
        map_dtype=tensors["d2t"].dtype if "d2t" in tensors else torch.int64,
        verifier=stated_verifier(config),
        notes=notes_of_unknown(
            config,
            inner,
            known=OWN_KEYS | HARMLESS_KEYS | {*layer.to_dict(), "rope_theta", "rope_scaling", "quantization_config"},
            known_inner=EAGLE_CONFIG_KEYS,
        ),
    )
    return facts, layer


def _layer_config(fields: object, named: str) -> PretrainedConfig:
    """Return the config of the head's own layers; raises EdgespecError."""
    if not isinstance(fields, Mapping):
        raise eagle3_head(named).wrong("has no transformer_layer_config")
    family = fields.get("model_type", "llama")
    if family not in FAMILIES:
        raise eagle3_head(named).wrong(
            f"has a layer of the model type {family!r}, and {' and '.join(FAMILIES)} are read"
        )
    known = set(CONFIG_MAPPING[family]().to_dict()) | {"rope_theta", "rope_scaling", "head_dim"}
    known -= {"architectures", "model_type", "dtype", "transformers_version", "quantization_config"}
    try:
        config: PretrainedConfig = AutoConfig.for_model(
            family, **{name: value for name, value in with_known_rotation(fields).items() if name in known}
        )
    except Exception as error:  # transformers raises many kinds for a field that is wrong
        raise eagle3_head(named).wrong(f"has a config that transformers cannot use ({error})") from error
    if config.hidden_act != "silu":
        raise eagle3_head(named).wrong(f"has the activation {config.hidden_act!r}, and silu is read")
    windows = fields.get("sliding_window") if fields.get("use_sliding_window", family == "llama") else None
    if windows is not None or set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise eagle3_head(named).wrong("has a layer that sees a window of the text, which is not read")
    check_axes(config, eagle3_head(named))
    config.tie_word_embeddings = False
    return config


def check_tensors(facts: Eagle3Facts, layer: PretrainedConfig, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise EdgespecError where config and tensors contradict each other, or a part is missing."""
    named, width, from_width = facts.named, int(layer.hidden_size), facts.target_hidden_size
    expected = {
        "embed_tokens.weight": (facts.vocab_size, width) if facts.owns_embedding else None,
        "lm_head.weight": (facts.draft_vocab_size, width) if facts.owns_head else None,
        "fc.weight": (width, facts.num_aux_layers * from_width) if facts.num_aux_layers else None,
        "d2t": (facts.draft_vocab_size,) if facts.owns_head and facts.draft_vocab_size != facts.vocab_size else None,
    }
    eagle3_head(named).check_shapes(expected, tensors)
    if facts.has_map and (not facts.owns_head or facts.map_dtype not in {torch.int64, torch.int32}):
        raise eagle3_head(named).wrong("has a map 'd2t' that is of no head, or holds no whole numbers")


def parameter_name(stored: str, facts: Eagle3Facts, *, num_layers: int) -> str | None:
    """Return the parameter that a tensor of the folder is; None for one that is not read, and need not be.

    Raises EdgespecError for one that is not known.
    """
    name = stored.removeprefix("model.")
    if HARMLESS_TENSORS.fullmatch(name) or (name.startswith("fc.") and not facts.num_aux_layers):
        return None
    found = re.fullmatch(r"(midlayer|additional_layers\.(\d+)|layers\.(\d+))\.(.+)", name)
    if found is not None:
        layer = int(found[2]) + 1 if found[2] else int(found[3] or 0)
        if layer < num_layers:
            return f"model.layers.{layer}.{found[4]}"
    elif name in {"lm_head.weight", "d2t"}:
        return {"lm_head.weight": "lm_head.linear.weight", "d2t": "lm_head.d2t"}[name]
    elif name == "embed_tokens.weight":
        return f"model.{name}"
    elif name == "norm.weight":
        return f"model.{name}" if facts.norm_output else f"lm_head.{name}"
    elif re.fullmatch(r"fc\.(weight|bias)|input_norm\.weight|fc_norm\.\d+\.weight", name):
        return f"fuse.{name}"
    raise eagle3_head(facts.named).unknown_tensor(stored)
