"""The table of architectures: llama.cpp's names and settings, and what its converter did to the weights.

Source: `conversion/` and `src/models/` of llama.cpp.
"""

from offload.gguf.family import (
    BASE_OF_WINDOWS,
    EXPERTS,
    GEMMA,
    HEAD_DIM,
    HEAD_NORMS,
    LAST_CAP,
    MIXTURE,
    SOFT_CAPS,
    WINDOW,
    Family,
)
from offload.gguf.gemma import GEMMAS_BY_LAYER
from offload.gguf.hybrids import HYBRIDS
from offload.gguf.mixtures import MIXTURES
from offload.gguf.rules import (
    a_window_beyond_all,
    a_window_of_none,
    bias_of_output,
    granite_rotates,
    granite_scales,
    head_norms,
    ministral3,
    olmo3,
    soft_caps,
    windows,
)

AFTERWARDS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
NORMS_BEFORE = frozenset({"attn_norm", "ffn_norm"})
INPUTS = frozenset({"attn_q", "attn_k", "attn_v"})
NO_BIASES: frozenset[str] = frozenset()
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
COHERE = {**HEAD_DIM, **LAYER_NORM, "logit_scale": "logit_scale"}

DENSE = {
    "llama": Family(
        model_type="llama", settings=HEAD_DIM, rotates_neighbours=True, scalings=("linear", "llama3", "yarn")
    ),
    "mistral3": Family(
        model_type="llama",
        settings={**HEAD_DIM, "attention.temperature_scale": "llama_4_scaling_beta"},
        rotates_neighbours=True,
        scalings=("linear", "llama3", "yarn"),
        rules=(ministral3,),
    ),
    "smollm3": Family(model_type="smollm3", settings=HEAD_DIM, rotates_neighbours=True, scalings=("linear", "yarn")),
    "granite": Family(
        model_type="granite",
        settings={
            **HEAD_DIM,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        rotates_neighbours=True,
        scalings=("linear", "llama3", "yarn"),
        means=frozenset({"rope.scaling.finetuned"}),  # whether attention rotates
        first=(granite_rotates,),
        rules=(granite_scales,),
    ),
    "qwen2": Family(model_type="qwen2", biases=INPUTS, scalings=("linear", "yarn")),
    "qwen3": Family(model_type="qwen3", names=HEAD_NORMS, settings=HEAD_DIM, scalings=("linear", "yarn")),
    "qwen3moe": Family(
        model_type="qwen3_moe",
        names={**HEAD_NORMS, **EXPERTS, "ffn_gate_inp": "mlp.gate"},
        settings={**HEAD_DIM, **MIXTURE},
        needs=frozenset(MIXTURE),
        fixed={"norm_topk_prob": True},
        scalings=("linear", "yarn"),
    ),
    "seed_oss": Family(
        model_type="seed_oss",
        names={"post_attention_norm": "post_attention_layernorm"},
        lacks=frozenset({"ffn_norm"}),
        settings=HEAD_DIM,
        scalings=("linear", "yarn"),
        rules=(bias_of_output,),
    ),
    "gemma": Family(model_type="gemma", biases=NO_BIASES, settings=HEAD_DIM, norms_plus_one=True, scalings=("linear",)),
    "gemma2": Family(
        model_type="gemma2",
        names=GEMMA,
        settings={**HEAD_DIM, **WINDOW, **SOFT_CAPS},
        fixed={"sliding_window": 4096},
        rules=(windows(every=2), soft_caps),
        norms_plus_one=True,
        query_scale_layers=46,
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        names={**HEAD_NORMS, **GEMMA},
        settings={**HEAD_DIM, **WINDOW, **LAST_CAP, **BASE_OF_WINDOWS},
        rules=(windows(every=6), a_window_beyond_all, soft_caps),
        norms_plus_one=True,
        scalings=("linear",),
        query_scale_layers=62,
    ),
    "phi3": Family(
        model_type="phi3",
        names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        lacks=frozenset({"ffn_gate"}) | INPUTS,
        biases=NO_BIASES,
        settings=WINDOW,
        rotates_in_part=True,
        scalings=("longrope",),
        rules=(a_window_of_none,),
    ),
    "glm4": Family(
        model_type="glm4",
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        lacks=frozenset({"ffn_gate"}),
        biases=INPUTS,
        settings=HEAD_DIM,
        fixed={"partial_rotary_factor": 1.0},
        rotates_in_part=True,
        scalings=("linear", "yarn"),
    ),
    "olmo2": Family(
        model_type="olmo2",
        names={**HEAD_NORMS, **AFTERWARDS},
        lacks=NORMS_BEFORE,
        settings={**HEAD_DIM, **WINDOW, **BASE_OF_WINDOWS},
        scalings=("linear", "yarn"),
        rules=(windows(every=4), olmo3),
    ),
    "exaone4": Family(
        model_type="exaone4",
        names={**HEAD_NORMS, **AFTERWARDS},
        lacks=NORMS_BEFORE,
        biases=NO_BIASES,
        settings={**HEAD_DIM, **WINDOW},
        scalings=("linear", "llama3", "yarn"),
        rules=(windows(every=4),),
    ),
    "command-r": Family(
        model_type="cohere",
        names=HEAD_NORMS,
        lacks=frozenset({"ffn_norm"}),
        settings=COHERE,
        fixed={"logit_scale": 1.0},
        scalings=("linear",),
        rules=(head_norms,),
    ),
    "cohere2": Family(
        model_type="cohere2",
        lacks=frozenset({"ffn_norm"}),
        settings={**COHERE, **WINDOW},
        needs=frozenset(WINDOW),
        scalings=("linear",),
        rules=(windows(every=4),),
    ),
    "ernie4_5": Family(model_type="ernie4_5", biases=NO_BIASES, settings=HEAD_DIM, scalings=("linear", "yarn")),
    "hunyuan-dense": Family(
        model_type="hunyuan_v1_dense",
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        settings=HEAD_DIM,
        scalings=("linear", "alpha"),
    ),
}

FAMILIES = {**DENSE, **GEMMAS_BY_LAYER, **MIXTURES, **HYBRIDS}
