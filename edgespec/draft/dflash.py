"""What a DFlash drafter's folder states: its config in either container, and the names and shapes of its tensors.

A drafter guesses a block of the next tokens at once. A DSpark drafter is one whose guesses also depend on the token
before them, by a small head (`markov.py`), and a DFlash2 drafter by another (`selector.py`). Whatever stands in a
config is read, or known not to matter, or named in a note. Legend: h the drafter's width, h_t the target's, n the
number of states, L the target's layers, V its tokens, Vd those that the drafter knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, Qwen3Config

from edgespec.draft.axes_rotation import check_axes, with_known_rotation
from edgespec.draft.draft_kind import NAMES, DraftKind, Name
from edgespec.draft.markov import MARKOV_TENSORS, MarkovFacts, read_markov
from edgespec.draft.published import HARMLESS_TENSORS, PublishedDraft, notes_of_unknown, stated_verifier
from edgespec.draft.selector import SELECTOR_KEYS, SELECTOR_TENSORS, SelectorFacts, read_selector
from edgespec.errors import EdgespecError
from offload.checkpoint import TensorEntry

OWN_KEYS = {
    "block_size", "dflash_config", "num_target_layers", "mask_token_id", "aux_hidden_state_layer_ids", "is_causal",
    "sample_from_anchor", "sliding_window_non_causal", "draft_vocab_size", "speculators_config", "target_hidden_size",
    "speculators_model_type", "transformer_layer_config", "target_layer_ids", "rope_theta", "rope_scaling",
}  # fmt: skip
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
INNER_KEYS = {
    *SCALES,
    "mask_token_id", "target_layer_ids", "causal", "use_swa", "swa_window_size", "attention_sink_bias",
    "projector_type", "block_size", *SELECTOR_KEYS,
}  # fmt: skip
MARKOV_KEYS = {
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "dspark_backbone_conv_enabled",
}  # fmt: skip
CONFIDENCE_TENSORS = re.compile(r"(?:model\.)?confidence_head\..+")
UNUSED_HEAD = "has a head that guesses how far a block is accepted, which is not used: texts tell that while they run"
HARMLESS_KEYS = {"auto_map", "torch_dtype", "speculators_version", "name_or_path", "embed_requires_grad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashFacts:
    """A drafter's own facts, without those of its target."""

    named: str  # the folder, in errors
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token: int
    first_slot: int  # whose logits are the next token's: 0 where drafts are sampled from the anchor itself
    causal_layers: tuple[bool, ...]  # of each layer, whether a place of the block sees no later one
    stated_layers: tuple[int, ...] | None  # numbers of layers that the stream has passed; None: the default ones
    num_target_layers: int | None = None
    owns_embedding: bool = False
    owns_head: bool = False
    has_map: bool = False
    map_dtype: torch.dtype = torch.int64
    norm_output: bool = True  # the family's own norm stands before the head
    markov: MarkovFacts | None = None  # of a DSpark drafter
    selector: SelectorFacts | None = None  # of a DFlash2 drafter
    embedding_scale: float | None = None
    logit_scale: float | None = None
    logit_cap: float | None = None
    verifier: str | None = None  # the target's name, as the drafter's makers wrote it
    notes: tuple[str, ...] = ()

    @property
    def num_slots(self) -> int:
        """The number of tokens that a block guesses."""
        return self.block_size - self.first_slot

    @property
    def drafter(self) -> PublishedDraft:
        """The drafter, as errors name it."""
        kind: Name = "dspark" if self.markov is not None else "dflash2" if self.selector is not None else "dflash"
        return block_drafter(self.named, kind)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return how many of the target's layers the stream has passed for each of its states; raises EdgespecError."""
        num_draft_layers, aux_layers = len(self.causal_layers), self.stated_layers
        if aux_layers is None and num_draft_layers == 1:
            raise self.drafter.wrong("does not say which hidden states it reads, and one layer has no default")
        if aux_layers is None:
            step = (num_layers - 4) / (num_draft_layers - 1)
            aux_layers = tuple(round(1 + index * step) + 1 for index in range(num_draft_layers))
        if not all(0 <= layer <= num_layers for layer in aux_layers):
            raise _of_another(
                self.named, f"reads hidden states after {list(aux_layers)} layers", f"{num_layers} layers"
            )
        return aux_layers

    def check_fits(self, target: PretrainedConfig) -> None:
        """Raise EdgespecError where a target of this text config cannot be the drafter's."""
        sizes, tokens = int(target.hidden_size), int(target.vocab_size)
        if self.target_hidden_size != sizes:
            what = f"reads hidden states of {self.target_hidden_size} numbers"
            raise _of_another(self.named, what, f"hidden states of {sizes}")
        if self.vocab_size != tokens:
            raise _of_another(self.named, f"has a vocabulary of {self.vocab_size} tokens", f"one of {tokens}")
        if self.num_target_layers not in {None, target.num_hidden_layers}:
            what = f"reads a target of {self.num_target_layers} layers"
            raise _of_another(self.named, what, f"{target.num_hidden_layers} layers")
        self.layers(int(target.num_hidden_layers))


def block_drafter(named: str, kind: Name) -> PublishedDraft:
    """Return a drafter, as errors name it."""
    return PublishedDraft(NAMES[kind].removeprefix("a "), named)


def read_dflash(
    config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], kind: DraftKind, *, named: str
) -> tuple[DFlashFacts, PretrainedConfig]:
    """Return a drafter's facts and its layers' config, from its config.json and its tensors' headers.

    Where there are no tensors, they are those that a published drafter has. Raises EdgespecError for what is not
    understood, or contradicts itself.
    """
    is_dspark, is_plain = kind.name == "dspark", kind.container == "plain"
    drafter = block_drafter(named, kind.name)
    inner = config.get("dflash_config") or {} if is_plain else {}
    fields = config if is_plain else config.get("transformer_layer_config")
    if not isinstance(inner, Mapping) or not isinstance(fields, Mapping):
        raise drafter.wrong("has a dflash_config or a transformer_layer_config that is none")
    if config.get("quantization_config") is not None:
        raise drafter.wrong("has packed weights, and a drafter is read as it was trained")
    if inner.get("projector_type") not in {None, kind.name} or inner.get("attention_sink_bias"):
        raise drafter.wrong("has a projector_type or an attention_sink_bias, which is not read")
    stated = {**config, **inner}
    layer = _layers_config(fields, inner, drafter)
    embedding_scale, logit_scale, logit_cap = (drafter.fraction(stated, name) for name in SCALES)
    has_selector = kind.name == "dflash2"
    block_size = drafter.count(stated, "block_size")
    key = "target_layer_ids" if is_plain else "aux_hidden_state_layer_ids"
    ids = stated.get(key) or None
    if ids is not None and not (isinstance(ids, list) and all(type(layer) is int for layer in ids)):
        raise drafter.wrong(f"names its hidden states as {ids!r}, which is no list of whole numbers")
    if ids is None and not is_plain:
        raise drafter.wrong(f"does not say {key}")
    vocab_size = int(layer.vocab_size)
    draft_vocab_size = drafter.count(config, "draft_vocab_size", default=vocab_size)
    num_aux_layers = len(ids) if ids else int(layer.num_hidden_layers)
    fc = tensors.get("fc.weight")
    width = fc.shape[1] // num_aux_layers if fc is not None and len(fc.shape) > 1 else None
    target_hidden_size = drafter.count(config, "target_hidden_size", default=width or int(layer.hidden_size))
    mask_token = stated.get("mask_token_id")
    if type(mask_token) is not int or not 0 <= mask_token < vocab_size:
        raise drafter.wrong(f"states mask_token_id = {mask_token!r}, which is no token of its {vocab_size}")
    facts = DFlashFacts(
        named=named,
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        block_size=block_size,
        mask_token=mask_token,
        first_slot=0 if drafter.flag(config, "sample_from_anchor", default=is_dspark) else 1,
        causal_layers=_causal_layers(config, inner, layer, drafter, sees_later=has_selector),
        stated_layers=tuple(layer + 1 if is_plain else layer for layer in ids) if ids else None,
        num_target_layers=config.get("num_target_layers"),
        owns_embedding="embed_tokens.weight" in tensors,
        owns_head="lm_head.weight" in tensors or draft_vocab_size != vocab_size,
        has_map="d2t" in tensors or (not tensors and draft_vocab_size != vocab_size),
        map_dtype=tensors["d2t"].dtype if "d2t" in tensors else torch.int64,
        markov=read_markov(stated, drafter) if is_dspark else None,
        selector=read_selector(stated, drafter, hidden_size=int(layer.hidden_size)) if has_selector else None,
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_cap=logit_cap,
        verifier=stated_verifier(config),
        notes=(
            *notes_of_unknown(
                config,
                inner,
                known=OWN_KEYS | HARMLESS_KEYS | MARKOV_KEYS | SELECTOR_KEYS | {*SCALES} | set(layer.to_dict()),
                known_inner=INNER_KEYS | MARKOV_KEYS,
            ),
            *([UNUSED_HEAD] if any(CONFIDENCE_TENSORS.fullmatch(name) for name in tensors) else []),
        ),
    )
    if facts.num_slots < 1:
        raise drafter.wrong(f"has blocks of {block_size} tokens, of which none is guessed")
    if layer.sliding_window is not None and layer.sliding_window < block_size:
        raise drafter.wrong(f"has a window of {layer.sliding_window} tokens, smaller than its block of {block_size}")
    return facts, layer


def _layers_config(fields: Mapping[str, Any], inner: Mapping[str, Any], drafter: PublishedDraft) -> PretrainedConfig:
    """Return the config of the drafter's layers; raises EdgespecError."""
    if fields.get("model_type", "qwen3") != "qwen3":
        raise drafter.wrong(f"has layers of the model type {fields['model_type']!r}, and qwen3 is read")
    known = (set(Qwen3Config().to_dict()) | {"rope_theta", "rope_scaling"}) - {
        "architectures", "model_type", "transformers_version", "dtype", "layer_types", "sliding_window",
        "use_sliding_window",
    }  # fmt: skip
    kinds = fields.get("layer_types")
    try:
        config: PretrainedConfig = AutoConfig.for_model(
            "qwen3", **{name: value for name, value in with_known_rotation(fields).items() if name in known}
        )
        kinds = ["full_attention"] * config.num_hidden_layers if kinds is None else list(kinds)
    except Exception as error:  # transformers raises many kinds for a field that is wrong
        raise drafter.wrong(f"has a config that transformers cannot use ({error})") from error
    is_known = set(kinds) <= {"full_attention", "sliding_attention"} and len(kinds) == config.num_hidden_layers
    if config.hidden_act != "silu" or not is_known:
        raise drafter.wrong(f"has the activation {config.hidden_act!r} or layers {kinds}, which are not read")
    slides = "sliding_attention" in kinds
    if inner.get("use_swa", slides) is not slides:
        raise drafter.wrong(f"states use_swa = {inner['use_swa']!r}, and its layer_types say otherwise")
    windows = {inner.get("swa_window_size"), fields.get("sliding_window")} - {None} if slides else {None}
    (window, *others) = windows or {None}
    if others or (slides and (type(window) is not int or window < 1)):
        raise drafter.wrong(f"states the windows {sorted(map(str, windows))} for its sliding layers, and needs one")
    check_axes(config, drafter)
    config.layer_types, config.sliding_window, config.use_sliding_window = kinds, window, slides
    config.tie_word_embeddings = False
    return config


def _causal_layers(
    config: Mapping[str, Any],
    inner: Mapping[str, Any],
    layer: PretrainedConfig,
    drafter: PublishedDraft,
    *,
    sees_later: bool,
) -> tuple[bool, ...]:
    """Return which layers are causal within the block: those that are named so, or else those with a window.

    Of a kind that `sees_later` places, those with a window do so too where nothing is said.
    """
    for stated, name in ((config, "is_causal"), (inner, "causal")):
        if stated.get(name) is not None:
            return (drafter.flag(stated, name, default=False),) * int(layer.num_hidden_layers)
    is_causal = not drafter.flag(config, "sliding_window_non_causal", default=sees_later)
    return tuple(is_causal and kind == "sliding_attention" for kind in layer.layer_types)


def check_tensors(
    facts: DFlashFacts, layer: PretrainedConfig, tensors: Mapping[str, TensorEntry], num_states: int
) -> None:
    """Raise EdgespecError where config and tensors contradict each other, or a part beside the layers is missing."""
    drafter, width = facts.drafter, int(layer.hidden_size)
    expected = {
        "fc.weight": (width, num_states * facts.target_hidden_size),
        "hidden_norm.weight": (width,),
        "embed_tokens.weight": (facts.vocab_size, width) if facts.owns_embedding else None,
        "lm_head.weight": (facts.draft_vocab_size, width) if facts.owns_head else None,
        "d2t": (facts.draft_vocab_size,) if facts.owns_head and facts.draft_vocab_size != facts.vocab_size else None,
    }
    drafter.check_shapes(expected, tensors)
    if not (facts.owns_embedding and facts.owns_head) and width != facts.target_hidden_size:
        what = f"is {width} numbers wide, and borrows an embedding or a head of {facts.target_hidden_size}"
        raise drafter.wrong(what)
    if facts.has_map and (not facts.owns_head or facts.map_dtype not in {torch.int64, torch.int32}):
        raise drafter.wrong("has a map 'd2t' that is of no head, or holds no whole numbers")


def parameter_name(stored: str, facts: DFlashFacts) -> str | None:
    """Return the parameter that a tensor of the folder is; None for one that is not read, and need not be.

    Raises EdgespecError for one that is not known.
    """
    name = stored.removeprefix("model.")
    if HARMLESS_TENSORS.fullmatch(name):
        return None
    if re.fullmatch(r"layers\.\d+\..+|norm\.weight|embed_tokens\.weight", name):
        return f"model.{name}"
    if name in {"fc.weight", "hidden_norm.weight"}:
        return f"fuse.{name}"
    if facts.markov is not None and (found := MARKOV_TENSORS.fullmatch(name)):
        return f"markov.{found[1]}"
    if facts.markov is not None and CONFIDENCE_TENSORS.fullmatch(stored):
        return None
    if facts.selector is not None and (found := SELECTOR_TENSORS.fullmatch(name)):
        return f"selector.{found[1]}.weight"
    if name in {"lm_head.weight", "d2t"}:
        return {"lm_head.weight": "lm_head.linear.weight", "d2t": "lm_head.d2t"}[name]
    raise facts.drafter.unknown_tensor(stored)


def _of_another(named: str, what: str, found: str) -> EdgespecError:
    fix = "Name the target that the drafter was made for."
    return EdgespecError("E_HEAD_TARGET", f"'{named}' {what}, and the target has {found}.", fix)
