"""What the table of architectures says of one, and the names and settings that many share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.checkpoint import TensorEntry
from offload.gguf.header import GgufHeader, GgufTensor

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

KEY_HEADS = "attention.head_count_kv"
SETTINGS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", KEY_HEADS: "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
}  # fmt: skip
HEAD_DIM = {"attention.key_length": "head_dim"}
WINDOW = {"attention.sliding_window": "sliding_window"}
BASE_OF_WINDOWS = {"rope.freq_base_swa": "rope_local_base_freq"}
LAST_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
SOFT_CAPS = {**LAST_CAP, "attn_logit_softcapping": "attn_logit_softcapping"}
MIXTURE = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip


# What has no field of its own: it takes settings from those that are left, and changes the fields of config.json.
Rule = Callable[[GgufHeader, dict[str, Any], dict[str, Any]], None]
# What a tensor is: the names' start of its layer, the tensor, and the fields of config.json -> its entries.
Part = Callable[[str, GgufTensor, Mapping[str, Any]], Iterator[TensorEntry]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture."""

    model_type: str  # transformers' name
    names: Mapping[str, str] = field(default_factory=dict)  # beside or above those of `IN_LAYER`
    layers: str = "model.layers"  # the names' start of all layers
    outside: Mapping[str, str] = field(default_factory=dict)  # beside `OUTSIDE`; {} numbers matrices of one tensor
    bare: frozenset[str] = frozenset()  # names of parameters that are no "weight" of a module
    parts: Mapping[str, Part] = field(default_factory=dict)  # of tensors that are no parameter as they lie
    lacks: frozenset[str] = frozenset()  # of the names of `IN_LAYER`
    biases: frozenset[str] = frozenset({"attn_q", "attn_k", "attn_v", "attn_output"})  # of the names of `IN_LAYER`
    settings: Mapping[str, str] = field(default_factory=dict)  # beside those of `SETTINGS`: key -> field of config.json
    needs: frozenset[str] = frozenset()  # settings without which there is no such file, beside those of `SETTINGS`
    means: frozenset[str] = frozenset()  # settings that say something here with a value that says nothing elsewhere
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that a file does not state, or need not
    first: tuple[Rule, ...] = ()  # in this order, before anything else is read
    rules: tuple[Rule, ...] = ()  # in this order, when everything else is read
    rotates_neighbours: bool = False  # the rows of a head's two halves are stored in turn
    norms_plus_one: bool = False  # norms are stored with one added
    rotates_in_part: bool = False  # `rope.dimension_count` may be less than a head
    scalings: tuple[str, ...] = ()  # of rotations, which are read
    query_scale_layers: int = 0  # the number of layers of the one size that scales queries by hidden size over heads
