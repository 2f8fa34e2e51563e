"""An EAGLE-3 head that can be trained, and its folder in the published container that other engines read, too.

The head is one Llama layer of its target's width. Its config is written first and read by the reader of such folders,
so that what is trained is what will be read. It knows the most frequent tokens of its training texts. Legend: V the
target's tokens, Vd those that the head knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.eagle3 import AUX_IDS, read_eagle3
from edgespec.draft.eagle3_network import own_parts
from edgespec.draft.own_parts import OwnParts
from edgespec.train.head_model import new_draft, own_tensors, write_draft

LEAST_LAYERS = 7  # of a target in which the layers of published heads are three, in their order
LONGER_ROTATIONS = {"linear", "dynamic", "yarn", "longrope", "llama3"}  # of a Llama layer, as engines read them
MOST_TOKENS = 32_000  # that a head knows by default, as published heads do
STORED = {
    "model.layers.0.": "midlayer.", "lm_head.linear.": "lm_head.", "lm_head.norm.": "norm.", "fuse.": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Eagle3Head:
    """A head that is trained, and what its folder will state."""

    model: PreTrainedModel
    config: dict[str, Any]  # of its config.json
    known: Tensor  # [Vd], the target's tokens that it knows, in their order
    parts: OwnParts

    def save(self, folder: Path) -> None:
        """Write the head's folder; raises EdgespecError where it cannot be written."""
        tensors = {stored_name(name): tensor for name, tensor in own_tensors(self.model, self.parts.modules).items()}
        if self.known.shape[0] < self.config["vocab_size"]:
            tensors["d2t"] = self.known - torch.arange(self.known.shape[0])
            tensors["t2d"] = torch.zeros(self.config["vocab_size"], dtype=torch.bool).index_fill_(0, self.known, True)
        write_draft(folder, self.config, tensors)


def default_aux_layers(target: PretrainedConfig) -> tuple[int, ...]:
    """Return the numbers of layers behind which a head reads hidden states: those of published heads, where they fit.

    None begins with 1, which readers take for another way to count.
    """
    count = int(target.get_text_config(decoder=True).num_hidden_layers)
    return (2, count // 2, count - 3) if count >= LEAST_LAYERS else (0, count // 2, count)


def most_frequent(counts: Tensor, number: int) -> Tensor:
    """Return the tokens that were counted [V] most often, in their order: as many as `number`."""
    return counts.argsort(descending=True, stable=True)[:number].sort().values


def new_eagle3(
    target: PreTrainedModel, aux_layers: Sequence[int], known: Tensor, *, named: str, seed: int
) -> Eagle3Head:
    """Make a head with fresh weights in float32; it begins with the target's rows of its tokens as its own head."""
    config = eagle3_config(target.config, aux_layers, num_known=known.shape[0])
    facts, layer = read_eagle3(config, {}, DraftKind(name="eagle3"), named=named)
    parts = own_parts(facts, facts.layers(int(target.config.get_text_config(decoder=True).num_hidden_layers)))
    model = new_draft(target, layer, parts, named=named, seed=seed)
    if facts.owns_head:
        head: Any = model.lm_head
        head.d2t = (known - torch.arange(known.shape[0])).to(model.device)
        with torch.no_grad():
            head.linear.weight.copy_(target.get_output_embeddings().weight[known])
    return Eagle3Head(model=model, config=config, known=known, parts=parts)


def eagle3_config(target: PretrainedConfig, aux_layers: Sequence[int], *, num_known: int) -> dict[str, Any]:
    """Return the config.json of a head of this target, with a layer as wide as the target's own."""
    text = target.get_text_config(decoder=True)
    width, heads = int(text.hidden_size), int(text.num_attention_heads)
    rope = getattr(text, "rope_parameters", None) or {}
    has_own_rope = isinstance(rope.get("rope_theta"), float | int)  # families with several kinds have one a kind
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": int(text.vocab_size),
        "draft_vocab_size": num_known,
        "hidden_size": width,
        "intermediate_size": int(getattr(text, "intermediate_size", None) or 4 * width),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(text, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(text, "head_dim", None) or width // heads),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": float(rope["rope_theta"]) if has_own_rope else 10_000.0,
        **({"rope_scaling": scaling} if (scaling := rope_scaling(rope)) else {}),
        "max_position_embeddings": int(getattr(text, "max_position_embeddings", None) or 4096),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {AUX_IDS: list(aux_layers), "use_aux_hidden_state": True},
    }


def rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a head's config states of its target's longer rotation; None where that is the plain one.

    A head rotates whole vectors, with positions of text alone: factors of a part of them are not its own.
    """
    kind = rope.get("rope_type", rope.get("type"))
    is_partial = float(rope.get("partial_rotary_factor") or 1) < 1
    if kind not in LONGER_ROTATIONS or (is_partial and kind == "longrope"):
        return None
    others = {"rope_theta", "partial_rotary_factor", "type"}
    stated = {name: value for name, value in rope.items() if name not in others and not name.startswith("mrope")}
    return {**stated, "rope_type": kind}


def stored_name(parameter: str) -> str:
    """Return the name of a head's parameter in its folder."""
    for start, stored in STORED.items():
        if parameter.startswith(start):
            return stored + parameter.removeprefix(start)
    return parameter
