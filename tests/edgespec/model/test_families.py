"""Tree logits equal path logits, and the cache rolls back, for every family that we name.

The reference is the same transformers model run on each root-to-node path without a cache.
"""

from collections.abc import Callable

import pytest
import transformers
from transformers import PretrainedConfig

from edgespec.model.supported import no_tree_reason
from tests.edgespec.model.reader import Reader
from tests.support.families import EAGER_ONLY, FAMILIES, GROUPED, LATENT, MIXED, SMALL, VOCAB, WINDOW, make_model

# Of which each has something that no other family has
UNUSUAL: dict[str, Callable[[], PretrainedConfig]] = {
    # hidden states that come several times over, and a number for each layer where others have one for all
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **{**GROUPED, "num_hidden_layers": 4, "intermediate_size": [64] * 4}, head_dim=8, sliding_window=WINDOW,
        layer_types=MIXED[:2] * 2, num_kv_shared_layers=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=8,
    ),
    # attention that is asked for twice a layer
    "diffllama": lambda: transformers.DiffLlamaConfig(**GROUPED),
    # positions that images would have three numbers of
    "qwen3-vl": lambda: transformers.Qwen3VLConfig(
        text_config={**GROUPED, "head_dim": 8, "rope_parameters": {"mrope_section": [2, 1, 1], "rope_theta": 1e4}},
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8,
                       "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    ),
}  # fmt: skip
if not hasattr(transformers.Gemma3nTextConfig, "kv_sharing_modes"):  # the oldest transformers that we take
    del UNUSUAL["gemma3n"]
    del UNUSUAL["qwen3-vl"]  # whose own forward fails there
if hasattr(transformers, "Dots3NoteTextConfig"):  # not in the oldest transformers that we take
    # latents of two sizes, and a window in some layers
    UNUSUAL["dots3"] = lambda: transformers.Dots3NoteTextConfig(
        **SMALL,
        **LATENT,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        shared_experts_intermediate_size=16,
        use_dsa=False,
        layer_types=MIXED,
        sliding_window=WINDOW,
        head_dim=16,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=24,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=8,
    )


@pytest.mark.parametrize(
    ("family", "attention", "chunk_rows"),
    [
        (family, attention, chunk_rows)
        for family in (*FAMILIES, *UNUSUAL)
        for attention, chunk_rows in (("sdpa", 7), ("eager", 512))
        if family not in (EAGER_ONLY if attention == "sdpa" else UNUSUAL)
    ],
)
def test_tree_logits_are_path_logits_over_rounds_of_commits(family: str, attention: str, chunk_rows: int) -> None:
    config = {**FAMILIES, **UNUSUAL}[family]()
    config._attn_implementation = attention
    reader = Reader.of(make_model(config), 4, chunk_rows=chunk_rows)
    reader.read_prompt(WINDOW + 9)
    for node in (7, 0, 16, None):
        reader.look(node)


@pytest.mark.parametrize("family", ["llama", *({"gemma4-shared"} & FAMILIES.keys()), "llama4", *UNUSUAL])
def test_a_pass_that_is_cut_and_made_again_leaves_no_trace(family: str) -> None:
    """Rows of a pass that was never committed, in all layers or in some, are forgotten by the next one."""
    reader = Reader.of(make_model({**FAMILIES, **UNUSUAL}[family]()), 1, chunk_rows=5)
    reader.read_prompt(20)
    tree = reader.tree(9)
    reader.target.look(reader.tree(9))
    reader.cut(lambda: reader.target.look(reader.tree(9)), 0.51)
    reader.check(tree, reader.target.look(tree))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MiniMaxConfig(), "takes no cache but its own"),
        (transformers.RwkvConfig(), "has recurrent layers of a kind of its own"),
        (transformers.xLSTMConfig(), "has recurrent layers of a kind of its own"),
        (transformers.ZambaConfig(), "has layers that share one block of attention"),
        (transformers.Zamba2Config(), "has layers that share one block of attention"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_states_that_cannot_be_followed_through_a_tree_have_their_reason(config: PretrainedConfig, reason: str) -> None:
    assert str(no_tree_reason(config)).startswith(reason)
