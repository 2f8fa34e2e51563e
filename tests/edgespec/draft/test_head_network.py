"""A head's one layer is like the target's, and never a recurrent one."""

import pytest
from transformers import AutoConfig

from edgespec.draft.head_network import head_config
from edgespec.errors import EdgespecError
from tests.support.families import RECURRENT


@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "olmo-hybrid", "granite-hybrid"])
def test_a_head_of_a_target_with_both_kinds_has_attention(family: str) -> None:
    assert head_config(RECURRENT[family]()).layer_types == ["full_attention"]


@pytest.mark.parametrize("family", ["mamba2", "falcon-h1", "bamba"])
def test_a_head_that_would_be_recurrent_is_refused(family: str) -> None:
    with pytest.raises(EdgespecError, match="would be a recurrent layer"):
        head_config(RECURRENT[family]())


def test_a_head_of_a_family_that_sees_and_has_no_model_of_words_is_refused() -> None:
    assert head_config(AutoConfig.for_model("gemma3")).num_hidden_layers == 1
    with pytest.raises(EdgespecError, match=r"one of 'qwen3_vl_text', of which .* EAGLE-3"):
        head_config(AutoConfig.for_model("qwen3_vl"))
