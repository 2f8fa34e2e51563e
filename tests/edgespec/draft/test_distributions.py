"""q of a wide layer is made chunk by chunk: the same trees, in the memory that is planned for them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from edgespec.config import MemoryLimits, SamplingSettings
from edgespec.draft.language_model import LanguageModelDrafter, expand_batched
from edgespec.grow.batched import Expansion, grow_batched
from edgespec.grow.policies import make_grow, open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.causal_model import CausalModel
from edgespec.placement.cache_memory import cache_rows
from edgespec.placement.memory import PassShape, draft_probs_rows, pass_bytes
from edgespec.placement.run_config import RunConfig
from edgespec.sampling.noise import TextNoise
from edgespec.tree.settings import TreeSettings
from edgespec.tree.token_tree import TokenTree
from tests.support.families import SMALL, make_model

CPU = torch.device("cpu")
SAMPLING = SamplingSettings(temperature=0.9, top_p=0.9)
TREES = [
    TreeSettings(policy="adaptive", size=60, depth=4),
    TreeSettings(policy="opt-tree", size=60, depth=4),
    TreeSettings(policy="c2t", size=60, depth=4, confidence=0.1),
    TreeSettings(policy="sequoia", size=60, depth=4, draw="coupled"),
    TreeSettings(policy="mcsd", branching=(8, 2, 2), draw="coupled"),
    TreeSettings(policy="sequoia", size=60, depth=4),  # sampled: its q is kept, whole
]


def drafter_of(vocab: int, tree: TreeSettings) -> LanguageModelDrafter:
    model = CausalModel(make_model(LlamaConfig(**{**SMALL, "vocab_size": vocab})), device=CPU)
    drafter = LanguageModelDrafter(model, vocab=vocab, sampling=tree.draft_sampling(SAMPLING))
    drafter.begin([1, 2, 3, 4])
    return drafter


def expand(expansions: list[Expansion]) -> Any:
    return expand_batched(expansions)


def grow(drafter: LanguageModelDrafter, vocab: int, tree: TreeSettings) -> TokenTree:
    noise = TextNoise(seed=3, key=1, vocab=vocab, device=CPU)
    draws = TextDraws(sampling=SAMPLING, device=CPU, generator=torch.Generator().manual_seed(0), noise=noise)
    growing = make_grow(open_policy(tree), drafter, draws)
    (found,) = grow_batched([(growing(5, tree.num_layers), drafter)], expand)
    assert isinstance(found, TokenTree)
    return found


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.policy} {tree.children}")
def test_trees_are_the_same_whether_q_is_made_at_once_or_in_chunks(
    tree: TreeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = 300
    at_once = grow(drafter_of(vocab, tree), vocab, tree)
    monkeypatch.setattr("edgespec.model.row_chunks.CHUNK_BYTES", 3 * vocab * 4)
    in_chunks = grow(drafter_of(vocab, tree), vocab, tree)
    assert at_once.num_nodes > 20
    for name in ("tokens", "parents", "ranks", "draft_rows"):
        assert torch.equal(getattr(at_once, name), getattr(in_chunks, name)), name
    if tree.children == "sampled":
        torch.testing.assert_close(at_once.draft_probs, in_chunks.draft_probs)


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that are made within it, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._seen:
                    self._seen.add(id(storage))
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, id(storage), storage.nbytes())
        return found

    def _freed(self, identity: int, num_bytes: int) -> None:
        self._seen.remove(identity)
        self.now -= num_bytes


@pytest.mark.parametrize("tree", [TreeSettings(size=250), TreeSettings(policy="opt-tree", size=250, depth=3)])
def test_a_wide_layer_takes_the_memory_that_is_planned(tree: TreeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = 16_000
    monkeypatch.setattr("edgespec.model.row_chunks.CHUNK_BYTES", 8 * vocab * 4)
    drafter = drafter_of(vocab, tree)

    def peak() -> int:
        drafter.rewind()
        with Allocated() as allocated:
            assert grow(drafter, vocab, tree).num_nodes > 100
        return allocated.peak

    run_config = RunConfig(device=CPU, dtype=torch.float32, limits=MemoryLimits(), context_tokens=64, prompt_tokens=4)
    _, draft_rows = cache_rows(run_config.context_tokens, tree)
    shape = PassShape(
        prompt_rows=4, tree_rows=tree.num_nodes + 1, keys=draft_rows,
        probs_rows=draft_probs_rows(vocab, tree, run_config),
    )  # fmt: skip
    planned = pass_bytes(drafter.model.config, shape, dtype=torch.float32)
    assert 16 * vocab * 4 < peak() < planned
    monkeypatch.setattr("edgespec.draft.distributions.WHOLE_CHUNKS", 1000)
    assert peak() > planned, "q of a whole layer is seen"
