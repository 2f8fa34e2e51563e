"""What cannot be read is refused by its name and its true reason, from the configuration alone."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, PretrainedConfig

from edgespec.errors import EdgespecError
from edgespec.model.supported import check_supported, no_tree_reason, understanding
from edgespec.model.tree_support import support_of
from tests.support.families import FAMILIES
from tests.support.tiny_configs import tiny_config

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "udop": ({}, "an encoder with a decoder"),
    "bert": ({}, "in both directions: is_decoder is false"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "in both directions"),
    "blip": ({}, "no words without an image"),
    "gemma4_unified_assistant": ({}, "no model by itself"),
    "idefics": ({}, "no words without an image"),
    "pi0": ({}, "no words"),
    "prophetnet": ({}, "other logits where more tokens follow"),
    "reformer": ({}, "random numbers"),
    "xlm": ({}, "none of the tokens that it writes"),
}
PLAINLY = {
    "rwkv": "recurrent layers of a kind of its own",
    "minimax": "takes no cache but its own",
    "zamba": "share one block of attention",
    "recurrent_gemma": "keeps a state in its modules",
    "hrm_text": "in turn, several times",
    "bloom": "adds biases that go by places in the cache",
    "blt": "bytes in patches of unequal length",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_no_decoder_is_refused_with_the_reason(model_type: str) -> None:
    fields, reason = REFUSED[model_type]
    with pytest.raises(EdgespecError, match=reason) as caught:
        check_supported(CONFIG_MAPPING[model_type](**fields))
    assert caught.value.code == "E_UNSUPPORTED_ARCHITECTURE"
    assert f"'{model_type}'" in caught.value.what


def test_only_hashes_are_held_against_reformer() -> None:
    """Its local layers have none, and with a seed no random numbers; it is tried like any other family."""
    config = tiny_config("reformer")
    config.hash_seed = 0
    with pytest.raises(EdgespecError, match="sorts keys by hashes"):
        check_supported(config)
    config.attn_layers, config.hash_seed = ["local"] * len(config.attn_layers), None
    check_supported(config)
    support = support_of(config, device=torch.device("cpu"))
    assert (support.name, support.reads_on) == ("plainly", False)


@pytest.mark.parametrize("model_type", PLAINLY)
def test_what_cannot_follow_a_tree_is_not_refused_and_has_its_reason(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    check_supported(config)
    assert PLAINLY[model_type] in str(no_tree_reason(config))


def test_only_a_state_is_said_to_be_beyond_rolling_back() -> None:
    for model_type in ("unlimited_ocr", "bloom"):
        assert "rolled back" not in str(no_tree_reason(CONFIG_MAPPING[model_type]()))


def test_keys_that_an_unknown_family_compresses_are_not_read() -> None:
    config: PretrainedConfig = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "compressed_sparse_attention"]
    assert "read keys into which several rows were compressed" in str(no_tree_reason(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_read_is_not_refused(family: str) -> None:
    check_supported(FAMILIES[family]())
    assert no_tree_reason(FAMILIES[family]()) is None


def test_an_attribute_that_a_family_lacks_is_named_with_the_family() -> None:
    config: PretrainedConfig = LlamaConfig()
    with pytest.raises(EdgespecError, match=r"'llama' is not understood .*'num_feet'"), understanding(config):
        config.num_feet  # noqa: B018
