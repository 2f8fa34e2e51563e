"""Tree logits equal path logits, and the cache rolls back, for every family that we name.

The reference is the same transformers model run on each root-to-node path without a cache.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    DiffLlamaConfig,
    Gemma3nTextConfig,
    MiniMaxConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3VLConfig,
    RwkvConfig,
    Zamba2Config,
    ZambaConfig,
    xLSTMConfig,
)

from edgespec.model.causal_model import CausalModel
from edgespec.model.supported import no_tree_reason
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree
from tests.conftest import EAGER_ONLY, FAMILIES, GROUPED, LATENT, MIXED, SMALL, VOCAB, WINDOW, make_model

CPU = torch.device("cpu")


def random_tree(root: int, generator: torch.Generator, *, nodes: int) -> TokenTree:
    parents = [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, nodes)]
    tokens = torch.randint(VOCAB - 1, (nodes,), generator=generator)
    tokens[0] = root
    return TokenTree(
        tokens=tokens,
        parents=torch.tensor(parents),
        ranks=torch.zeros(nodes, dtype=torch.long),
        draw="sampled",
        draft_rows=torch.full((nodes,), -1),
    )


def path_of(tree: TokenTree, node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while tree.parents[path[-1]] >= 0:
        path.append(int(tree.parents[path[-1]]))
    return path[::-1]


def path_logits(model: PreTrainedModel, text: list[int], tree: TokenTree) -> Tensor:
    """What the model says behind the text and each node's path: [nodes, vocab]. Paths of one length are one batch."""
    paths = [text + tree.tokens[path_of(tree, node)].tolist() for node in range(tree.num_nodes)]
    found: dict[int, Tensor] = {}
    for length in {len(path) for path in paths}:
        nodes = [node for node, path in enumerate(paths) if len(path) == length]
        ids = torch.tensor([paths[node] for node in nodes])
        found |= dict(zip(nodes, model(input_ids=ids, use_cache=False).logits[:, -1], strict=True))
    return torch.stack([found[node] for node in range(tree.num_nodes)])


# Of which each has something that no other family has
UNUSUAL: dict[str, Callable[[], PretrainedConfig]] = {
    # hidden states that come several times over, and a number for each layer where others have one for all
    "gemma3n": lambda: Gemma3nTextConfig(
        **{**GROUPED, "num_hidden_layers": 4, "intermediate_size": [64] * 4}, head_dim=8, sliding_window=WINDOW,
        layer_types=MIXED[:2] * 2, num_kv_shared_layers=2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=8,
    ),
    # attention that is asked for twice a layer
    "diffllama": lambda: DiffLlamaConfig(**GROUPED),
    # positions that images would have three numbers of
    "qwen3-vl": lambda: Qwen3VLConfig(
        text_config={**GROUPED, "head_dim": 8, "rope_parameters": {"mrope_section": [2, 1, 1], "rope_theta": 1e4}},
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8,
                       "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    ),
}  # fmt: skip
if not hasattr(Gemma3nTextConfig, "kv_sharing_modes"):  # the oldest transformers that we take
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


@pytest.mark.parametrize("chunk_rows", [512, 7])
@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, kind) for family in FAMILIES for kind in ("sdpa", "eager")), *((family, "sdpa") for family in UNUSUAL)],
)
def test_tree_logits_are_path_logits_over_rounds_of_commits(family: str, attention: str, chunk_rows: int) -> None:
    if attention == "sdpa" and family in EAGER_ONLY:
        pytest.skip("transformers refuses sdpa for soft-capped scores")
    config = {**FAMILIES, **UNUSUAL}[family]()
    config._attn_implementation = attention
    model = make_model(config)
    plain = copy.deepcopy(model)
    target = Target(CausalModel(model, device=CPU, chunk_rows=chunk_rows))
    generator = torch.Generator().manual_seed(4)
    text = torch.randint(VOCAB - 1, (WINDOW + 9,), generator=generator).tolist()
    prefilled = target.prefill(torch.tensor(text))
    torch.testing.assert_close(prefilled, plain(input_ids=torch.tensor([text])).logits[0, -1], rtol=1e-4, atol=2e-5)
    root = 5
    for _ in range(4):
        tree = random_tree(root, generator, nodes=17)
        torch.testing.assert_close(
            target.logits(target.look(tree)), path_logits(plain, text, tree), rtol=1e-4, atol=2e-5
        )
        path = path_of(tree, int(torch.randint(17, (1,), generator=generator)))
        target.commit(tuple(path[1:]))
        text += [int(tree.tokens[node]) for node in path]
        root = int(torch.randint(VOCAB - 1, (1,), generator=generator))


@pytest.mark.parametrize("family", ["llama", *({"gemma4-shared"} & FAMILIES.keys()), "llama4", *UNUSUAL])
def test_a_pass_that_is_cut_and_made_again_leaves_no_trace(family: str) -> None:
    """Rows of a pass that was never committed, in all layers or in some, are forgotten by the next one."""
    model = make_model({**FAMILIES, **UNUSUAL}[family]())
    plain = copy.deepcopy(model)
    causal = CausalModel(model, device=CPU, chunk_rows=5)
    target = Target(causal)
    generator = torch.Generator().manual_seed(1)
    text = list(range(20))
    target.prefill(torch.tensor(text))
    tree = random_tree(3, generator, nodes=9)
    target.look(random_tree(3, generator, nodes=9))

    def cut(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    causal.watch = cut
    with pytest.raises(KeyboardInterrupt):
        target.look(random_tree(3, generator, nodes=9))
    causal.watch = None
    torch.testing.assert_close(target.logits(target.look(tree)), path_logits(plain, text, tree), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MiniMaxConfig(), "takes no cache but its own"),
        (RwkvConfig(), "has recurrent layers of a kind of its own"),
        (xLSTMConfig(), "has recurrent layers of a kind of its own"),
        (ZambaConfig(), "has layers that share one block of attention"),
        (Zamba2Config(), "has layers that share one block of attention"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_states_that_cannot_be_followed_through_a_tree_have_their_reason(config: PretrainedConfig, reason: str) -> None:
    assert str(no_tree_reason(config)).startswith(reason)
