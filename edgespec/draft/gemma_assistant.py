"""What a Gemma 4 assistant's folder states: its config.json, and the names and shapes of its tensors.

An assistant's layers have no keys and values: its rows attend those that its target keeps of the text, in the last
layer of each kind that keeps any. Legend: h its width, h_t the target's, V the target's tokens, C centroids.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from edgespec.draft.draft_kind import NAMES
from edgespec.draft.published import HARMLESS_TENSORS, PublishedDraft, notes_of_unknown
from edgespec.errors import EdgespecError
from edgespec.model.layer_kinds import kinds_of
from edgespec.model.mechanisms.known import key_shape
from edgespec.model.mechanisms.windows import key_sources
from offload.checkpoint import TensorEntry

TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")  # of targets, and of an assistant's layers
KINDS = ("sliding_attention", "full_attention")
# Of an assistant, and of its layers where these say them to transformers alone
OWN_KEYS = {
    "text_config", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k",
    "block_size", "model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
    "global_head_dim", "num_global_key_value_heads",
}  # fmt: skip
ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp", "attention_bias")
NAMED = {
    "pre_projection.weight": "fuse.eh_proj.weight", "post_projection.weight": "fuse.post_projection.weight",
    "model.embed_tokens.weight": "lm_head.weight", "lm_head.weight": "lm_head.weight",
    "masked_embedding.centroids.weight": "lm_head.centroids.weight",
    "masked_embedding.token_ordering": "lm_head.token_ordering",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """The groups of tokens of which a head computes the likeliest alone."""

    num_centroids: int
    num_computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantFacts:
    """An assistant's own facts, without those of its target."""

    named: str  # the folder, in errors
    target_hidden_size: int
    vocab_size: int
    head_dims: Mapping[str, int]  # of each kind of its layers
    rotations: Mapping[str, Mapping[str, Any]]  # of each kind, as its config has them
    num_heads: int
    ordering: Ordering | None
    notes: tuple[str, ...] = ()
    verifier: str | None = None  # no folder names its target

    @property
    def assistant(self) -> PublishedDraft:
        """The assistant, as errors name it."""
        return PublishedDraft(NAMES["assistant"].removeprefix("a "), self.named)

    def check_fits(self, target: PretrainedConfig) -> None:
        """Raise EdgespecError where a target of this text config cannot be the assistant's."""
        if target.model_type not in TEXT_TYPES:
            raise self._of_another("attends the keys of a Gemma 4", f"the type '{target.model_type}'")
        if self.target_hidden_size != target.hidden_size:
            what = f"reads hidden states of {self.target_hidden_size} numbers"
            raise self._of_another(what, f"hidden states of {target.hidden_size}")
        if self.vocab_size != target.vocab_size:
            raise self._of_another(f"has a vocabulary of {self.vocab_size} tokens", f"one of {target.vocab_size}")
        lent = lent_by(target)
        for kind, head_dim in self.head_dims.items():
            if kind not in lent:
                raise self._of_another(f"has {kind} layers", f"none that keeps keys, but {', '.join(sorted(lent))}")
            keys = key_shape(target, lent[kind])
            if keys.key_width != head_dim:
                raise self._of_another(f"has {kind} heads of {head_dim} numbers", f"such of {keys.key_width}")
            if self.num_heads % keys.heads:
                raise self._of_another(f"has {self.num_heads} heads", f"{keys.heads} heads of {kind} keys")
            own, theirs = _rotation(self.rotations[kind]), _rotation(target.rope_parameters[kind])
            for name in sorted({*own, *theirs}):
                if not _are_one(own.get(name), theirs.get(name)):
                    what = f"rotates {kind} heads by {name} = {own.get(name)}"
                    raise self._of_another(what, f"keys that were rotated by {theirs.get(name)}")

    def _of_another(self, what: str, found: str) -> EdgespecError:
        fix = "Name the target that the assistant was made for."
        return EdgespecError("E_HEAD_TARGET", f"'{self.named}' {what}, and the target has {found}.", fix)


def _rotation(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a rotation, with those that are left out."""
    usual = {"rope_type": "default", "partial_rotary_factor": 1.0, "factor": 1.0}
    return usual | {name: value for name, value in stated.items() if value is not None}


def _are_one(one: Any, other: Any) -> bool:
    is_rounded = isinstance(one, int | float) and isinstance(other, int | float)  # a GGUF file has float32
    return math.isclose(one, other, rel_tol=1e-6) if is_rounded else one == other


def lent_by(target: PretrainedConfig) -> dict[str, int]:
    """Return the layer of a target whose keys and values are lent, by its kind: the last that keeps its own."""
    sources = key_sources(target)
    return {kind: layer for layer, kind in enumerate(kinds_of(target)) if sources[layer] == layer}


def read_assistant(config: Mapping[str, Any], *, named: str) -> tuple[AssistantFacts, PretrainedConfig]:
    """Return an assistant's facts and its layers' config, from its config.json.

    Raises EdgespecError for what is not understood, or contradicts itself.
    """
    assistant = PublishedDraft(NAMES["assistant"].removeprefix("a "), named)
    fields = config.get("text_config", config)  # a GGUF file's are the layers' own
    if not isinstance(fields, Mapping):
        raise assistant.wrong("has a text_config that is none")
    if config.get("quantization_config") is not None:
        raise assistant.wrong("has packed weights, and an assistant is read as it was trained")
    layer = _layers_config(fields, assistant)
    vocab_size, known = int(layer.vocab_size), OWN_KEYS | {*type(layer)().to_dict()}
    facts = AssistantFacts(
        named=named,
        target_hidden_size=assistant.count(config, "backbone_hidden_size"),
        vocab_size=vocab_size,
        head_dims={kind: int(of.head_dim) for kind, of in zip(kinds_of(layer), layer.per_layer_config, strict=True)},
        rotations={kind: layer.rope_parameters[kind] for kind in {*kinds_of(layer)}},
        num_heads=int(layer.num_attention_heads),
        ordering=_ordering(config, assistant, vocab_size=vocab_size),
        notes=notes_of_unknown(
            config, fields if "text_config" in config else {}, known=known, known_inner=known,
        ),
    )  # fmt: skip
    return facts, layer


def _ordering(config: Mapping[str, Any], assistant: PublishedDraft, *, vocab_size: int) -> Ordering | None:
    if not assistant.flag(config, "use_ordered_embeddings"):
        return None
    count = assistant.count(config, "num_centroids", default=2048)
    computed = assistant.count(config, "centroid_intermediate_top_k", default=32)
    if vocab_size % count or computed > count:
        what = f"states num_centroids = {count} of {vocab_size} tokens, and centroid_intermediate_top_k = {computed}"
        raise assistant.wrong(f"{what}, which are no equal groups")
    return Ordering(num_centroids=count, num_computed=computed)


def _layers_config(fields: Mapping[str, Any], assistant: PublishedDraft) -> PretrainedConfig:
    """Return the config of an assistant's layers, all of which read others' keys; raises EdgespecError."""
    model_type = fields.get("model_type", TEXT_TYPES[0])
    if model_type not in TEXT_TYPES:
        raise assistant.wrong(f"has layers of the model type {model_type!r}, and {' and '.join(TEXT_TYPES)} are read")
    found = next((name for name in ABSENT if fields.get(name)), None)
    if found is not None:
        raise assistant.wrong(f"states {found} = {fields[found]!r}, which no assistant has")
    own = {"hidden_size_per_layer_input": 0, "tie_word_embeddings": False, "final_logit_softcapping": None}
    given = {name: value for name, value in fields.items() if name not in {"model_type", "backbone_hidden_size", *own}}
    try:
        layer: Any = AutoConfig.for_model(model_type, **given, **own)
        count, shared, kinds = layer.num_hidden_layers, layer.num_kv_shared_layers, layer.layer_types
        is_known = len(kinds) == count and {*kinds} <= {*KINDS} and shared in {0, None, count}
        layer.num_kv_shared_layers = count
    except Exception as error:  # transformers raises many kinds for a field that is wrong
        raise assistant.wrong(f"has a config that transformers cannot use ({error})") from error
    if not is_known or layer.hidden_activation != "gelu_pytorch_tanh":
        stated = f"{count} layers {kinds} with num_kv_shared_layers = {shared}, activation {layer.hidden_activation!r}"
        raise assistant.wrong(f"has {stated}, which are not read")
    return layer  # type: ignore[no-any-return]


def check_tensors(facts: AssistantFacts, layer: PretrainedConfig, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise EdgespecError where config and tensors contradict each other, or a part beside the layers is missing."""
    width, size = int(layer.hidden_size), facts.target_hidden_size
    head = next((name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in tensors), None)
    expected: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (width, 2 * size),
        "post_projection.weight": (size, width),
        head or "model.embed_tokens.weight": (facts.vocab_size, width),
    }
    if facts.ordering is not None:
        expected["masked_embedding.centroids.weight"] = (facts.ordering.num_centroids, width)
        expected["masked_embedding.token_ordering"] = (facts.vocab_size,)
    facts.assistant.check_shapes(expected, tensors)


def parameter_name(stored: str, facts: AssistantFacts) -> str | None:
    """Return the parameter that a tensor of the folder is; None for one that is not read, and need not be.

    Raises EdgespecError for one that is not known.
    """
    if HARMLESS_TENSORS.fullmatch(stored):
        return None
    if stored in NAMED:
        return NAMED[stored]
    if re.fullmatch(r"model\.layers\.\d+\..+|model\.norm\.weight", stored):
        return stored
    raise facts.assistant.unknown_tensor(stored)
