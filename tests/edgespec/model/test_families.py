"""Tree logits equal path logits, and the cache rolls back, for every family that we name.

The reference is the same transformers model run on each root-to-node path without a cache.
"""

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    JambaConfig,
    MambaConfig,
    MiniMaxConfig,
    PretrainedConfig,
    PreTrainedModel,
    RwkvConfig,
    Zamba2Config,
)

from edgespec.errors import EdgespecError
from edgespec.model.causal_model import CausalModel, check_can_roll_back
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree
from tests.conftest import EAGER_ONLY, FAMILIES, VOCAB, WINDOW, make_model

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
    rows = []
    for node in range(tree.num_nodes):
        ids = text + [int(tree.tokens[n]) for n in path_of(tree, node)]
        rows.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
    return torch.stack(rows)


@pytest.mark.parametrize("chunk_rows", [512, 7])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_logits_are_path_logits_over_rounds_of_commits(family: str, attention: str, chunk_rows: int) -> None:
    if attention == "sdpa" and family in EAGER_ONLY:
        pytest.skip("transformers refuses sdpa for soft-capped scores")
    config = FAMILIES[family]()
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


def test_an_abandoned_pass_leaves_no_trace() -> None:
    """Rows of a pass that was never committed, in all layers or in some, are forgotten by the next one."""
    model = make_model(FAMILIES["llama"]())
    plain = copy.deepcopy(model)
    target = Target(CausalModel(model, device=CPU))
    generator = torch.Generator().manual_seed(1)
    text = list(range(20))
    target.prefill(torch.tensor(text))
    tree = random_tree(3, generator, nodes=9)
    target.look(tree)
    target.cache.layers[1].length += 5
    torch.testing.assert_close(target.logits(target.look(tree)), path_logits(plain, text, tree), rtol=1e-4, atol=2e-5)


def test_a_missing_window_would_be_noticed() -> None:
    """The windows in these tests matter: without them the logits differ."""
    windowed, plain = FAMILIES["mistral-window"](), FAMILIES["mistral-window"]()
    plain.sliding_window = None
    ids = torch.arange(WINDOW + 9)[None]
    difference = make_model(windowed)(input_ids=ids).logits[0, -1] - make_model(plain)(input_ids=ids).logits[0, -1]
    assert difference.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (JambaConfig(), "Mamba 1 layers"),
        (MambaConfig(), "Mamba 1 layers"),
        (MiniMaxConfig(), "recurrent layers of a kind of its own"),
        (RwkvConfig(), "recurrent layers of a kind of its own"),
        (Zamba2Config(), "layers that share one block of attention"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_states_that_cannot_be_followed_through_a_tree_are_refused_by_name(
    config: PretrainedConfig, layers: str
) -> None:
    with pytest.raises(EdgespecError, match=f"'{config.model_type}' has {layers}"):
        check_can_roll_back(config)
