"""A published draft that states axes rotates as the families that have them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from edgespec.draft.axes_rotation import rotate_by_axes, with_known_rotation
from edgespec.draft.dflash import read_dflash
from edgespec.draft.draft_kind import DraftKind
from edgespec.draft.eagle3 import read_eagle3
from edgespec.errors import EdgespecError
from tests.edgespec.draft import dflash_drafter, eagle3_head

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 64}
SECTIONS = [2, 3, 3]


@pytest.mark.parametrize("in_turns", [False, True])
def test_columns_rotate_by_the_axes_of_the_family(in_turns: bool) -> None:
    rope = {"type": "mrope", "mrope_section": SECTIONS, "mrope_interleaved": in_turns, "rope_theta": 100.0}
    config = LlamaConfig(**SIZES, **with_known_rotation({"rope_parameters": rope}))
    decoder = SimpleNamespace(config=config, rotary_emb=LlamaRotaryEmbedding(config))
    rotate_by_axes(decoder)
    stated = {"rope_type": "default", "mrope_section": SECTIONS, "rope_theta": 100.0}
    if in_turns:
        theirs: Any = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**SIZES, rope_parameters=stated))
    else:
        theirs = Qwen2_5_VLRotaryEmbedding(Qwen2_5_VLTextConfig(**SIZES, rope_parameters=stated))
    rows, positions = torch.zeros(1, 9, 64), torch.randint(0, 64, (3, 1, 9), generator=torch.Generator().manual_seed(1))
    for found, expected in zip(decoder.rotary_emb(rows, positions), theirs(rows, positions), strict=True):
        assert torch.equal(found, expected)
    words = torch.arange(9)[None]
    for found, expected in zip(decoder.rotary_emb(rows, words), theirs(rows, words.expand(3, 1, -1)), strict=True):
        assert torch.equal(found, expected), "rows of words have one position on all axes"


@pytest.mark.parametrize("sections", [[2, 2, 3], "2, 2, 2", [7, -1, 0]])
def test_sections_that_are_not_a_heads_columns_are_refused(sections: object) -> None:
    rope = {"rope_scaling": {"rope_type": "default", "mrope_section": sections}}
    expected = r"states mrope_section = .*, and the half of its heads' numbers is 6\."
    with pytest.raises(EdgespecError, match=expected):
        read_eagle3({**eagle3_head.config_of(eagle3_head.Head()), **rope}, {}, DraftKind(name="eagle3"), named="t")
    with pytest.raises(EdgespecError, match=expected):
        read_dflash(
            {**dflash_drafter.config_of(dflash_drafter.Drafter()), **rope}, {}, DraftKind(name="dflash"), named="t"
        )
