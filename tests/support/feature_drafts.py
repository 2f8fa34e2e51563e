"""Random drafts that read a target's hidden states, of every form, and random targets for them, without files."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Gemma4TextConfig, LlamaConfig, PreTrainedModel

from edgespec.draft.assistant_network import own_parts as assistant_parts
from edgespec.draft.dflash import read_dflash
from edgespec.draft.dflash_network import own_parts
from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.gemma_assistant import read_assistant
from edgespec.draft.head_network import HeadFacts
from edgespec.draft.mtp import MTP_PARTS, mtp_config
from edgespec.train.eagle3_head import new_eagle3
from edgespec.train.head_model import new_draft, new_head
from offload.text_part import model_from_config
from tests.support.dflash_config import OWN, config_of

PUBLISHED = ("eagle3", "mtp", *OWN, "assistant")
CANDIDATES = 16  # of a place of a DFlash2 drafter; of a smaller vocabulary, all tokens but one


def new_target(form: str, sizes: Mapping[str, Any]) -> PreTrainedModel:
    """A target of these sizes for a form of draft: a Gemma 4 of one layer more for its assistants, else a Llama."""
    if form != "assistant":
        return model_from_config(LlamaConfig(**sizes), dtype=torch.float32)
    return model_from_config(Gemma4TextConfig(**_gemma(sizes)), dtype=torch.float32)


def new_drafts(target: PreTrainedModel, form: str, *, seed: int) -> PreTrainedModel:
    """A draft with fresh weights that reads the target's hidden states.

    An EAGLE-3 head lacks one of the tokens, and so do a DFlash2 drafter's candidates where these are few.
    """
    vocab, num_layers = int(target.config.vocab_size), int(target.config.num_hidden_layers)
    if form == "eagle3":
        known = torch.tensor([token for token in range(vocab) if token != 1])
        return new_eagle3(target, (0, 0, 1), known, named="t", seed=seed).model
    if form == "mtp":
        return new_draft(target, mtp_config(target.config), MTP_PARTS, named="t", seed=seed)
    if form == "assistant":
        fields = target.config.to_dict() | {"num_hidden_layers": 2, "layer_types": target.config.layer_types[-2:]}
        own = {"backbone_hidden_size": fields["hidden_size"], "text_config": fields}
        of_assistant, layers = read_assistant(own, named="t")
        return new_draft(target, layers, assistant_parts(of_assistant, target.config), named="t", seed=seed)
    kind = next((kind for kind in OWN if kind == form), None)
    if kind is not None:
        inner = {"selector_top_k": min(CANDIDATES, vocab - 1)} if kind == "dflash2" else {}
        config = config_of(target.config, (0, 1), kind, **inner)
        facts, layers = read_dflash(config, {}, DraftKind(name=kind), named="t")
        return new_draft(target, layers, own_parts(facts, facts.layers(num_layers)), named="t", seed=seed)
    groups = {"router_groups": 2, "top_groups": 1} if form == "routed" else {}
    return new_head(target, HeadFacts(target="t", target_fingerprint="f", method="eagle", **groups), seed=seed)


def _gemma(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The same sizes of a Gemma 4, which has layers of both kinds."""
    heads, count = sizes["num_attention_heads"], 1 + sizes["num_hidden_layers"]
    head_dim = sizes["hidden_size"] // heads
    kinds = [("full_attention", "sliding_attention")[(count - layer) % 2 == 0] for layer in range(count)]
    return {
        **sizes, "num_hidden_layers": count, "head_dim": head_dim, "global_head_dim": head_dim,
        "num_key_value_heads": heads // 2, "num_global_key_value_heads": heads // 2, "layer_types": kinds,
        "hidden_size_per_layer_input": 0, "sliding_window": 4,
    }  # fmt: skip
