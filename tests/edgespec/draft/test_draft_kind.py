"""Drafts are recognised by config and tensors' names, and what cannot be read is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec import EdgespecError
from edgespec.draft.draft_kind import kind_of

EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
DFLASH = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}


@pytest.mark.parametrize(
    ("config", "tensors", "kind", "container"),
    [
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, [], "eagle3", "speculators"),
        ({"speculators_model_type": "dflash"}, [], "dflash", "speculators"),
        ({"speculators_model_type": "dspark"}, [], "dspark", "speculators"),
        ({"speculators_model_type": "mtp"}, [], "mtp", "speculators"),
        (EAGLE3, [], "eagle3", "plain"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, [], "eagle3", "plain"),
        ({"architectures": ["LlamaForCausalLM"]}, ["midlayer.hidden_norm.weight"], "eagle3", "plain"),
        (DFLASH, [], "dflash", "plain"),
        (DFLASH | {"dflash_config": {"projector_type": "dspark"}}, [], "dspark", "plain"),
        (DFLASH | {"dflash_config": {"selector_rank": 256}}, [], "dflash2", "plain"),
        ({"architectures": ["DFlash2DraftModel"]}, [], "dflash2", "plain"),
        ({"speculators_model_type": "dflash2"}, [], "dflash2", "speculators"),
        (DFLASH | {"draft_vocab_size": 9}, ["markov_head.markov_w1.weight"], "dspark", "plain"),
        ({"model_type": "llama", "edgespec_head": {}}, ["fuse.linear.weight"], "head", "plain"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, ["lm_head.weight"], "model", "plain"),
        ({"model_type": "gemma4_assistant"}, [], "assistant", "plain"),
        ({"model_type": "gemma4_unified_assistant"}, [], "assistant", "plain"),
        ({}, [], "model", "plain"),
    ],
)
def test_kinds_are_recognised(config: dict[str, Any], tensors: list[str], kind: str, container: str) -> None:
    found = kind_of(config, tensors, named="d")
    assert (found.name, found.container) == (kind, container)


@pytest.mark.parametrize(
    ("config", "tensors", "named"),
    [
        ({"speculators_model_type": "peagle"}, [], "P-EAGLE"),
        (EAGLE3 | {"parallel_drafting": True}, [], "P-EAGLE"),
        (EAGLE3, ["mask_hidden"], "P-EAGLE"),
        (EAGLE3 | {"kv_lora_rank": 512}, [], "MLA"),
        (EAGLE3, ["midlayer.self_attn.kv_a_proj_with_mqa.weight"], "MLA"),
        ({"speculators_model_type": "eagle"}, [], "first or second version"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, [], "first or second version"),
        ({"medusa_num_heads": 4}, [], "Medusa"),
        ({"hydra_num_layers": 4}, [], "Hydra"),
        ({"model_type": "mlp_speculator"}, [], "MLP"),
        (DFLASH | {"dflash_config": {"projector_type": "domino"}}, [], "Domino"),
        ({"speculators_model_type": "other"}, [], "'other'"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_would_do(
    config: dict[str, Any], tensors: list[str], named: str
) -> None:
    with pytest.raises(EdgespecError, match=named) as error:
        kind_of(config, tensors, named="d")
    assert "EAGLE-3" in error.value.fix
