"""A target with recurrent layers, beside plain forwards of the same transformers model over the text that it holds."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.model.text_cache import TextCache
from edgespec.tree.token_tree import TokenTree
from tests.support.families import RECURRENT, VOCAB, make_model

CPU = torch.device("cpu")
LEVEL_KINDS = ["jamba", "zaya"]  # read level by level: Mamba 1, and convolutions before attention
KINDS = ["lfm2", "qwen3-next", "mamba2", "falcon-h1", *LEVEL_KINDS]  # short convolution, delta rule, Mamba 2, and both


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


class CutError(Exception):
    """Ends a pass from within."""


class Reader:
    """A target, and plain forwards over the text that it holds."""

    def __init__(self, model: PreTrainedModel, causal: CausalModel, seed: int) -> None:
        self.plain, self.causal = model, causal
        self.target = Target(causal)
        self.generator = torch.Generator().manual_seed(seed)
        self.text: list[int] = []

    @classmethod
    def of(cls, model: PreTrainedModel, seed: int = 4, **options: Any) -> "Reader":
        return cls(model, CausalModel(copy.deepcopy(model), device=CPU, **options), seed)

    def tokens(self, count: int) -> list[int]:
        return torch.randint(VOCAB - 1, (count,), generator=self.generator).tolist()

    def read_prompt(self, count: int) -> None:
        self.text = self.tokens(count)
        assert_same(self.target.prefill(torch.tensor(self.text)), self.plain_logits())

    def plain_logits(self) -> Tensor:
        return self.plain(input_ids=torch.tensor([self.text]), use_cache=False).logits[0, -1]

    def tree(self, nodes: int = 17) -> TokenTree:
        return random_tree(self.tokens(1)[0], self.generator, nodes=nodes)

    def check(self, tree: TokenTree, hidden: Tensor) -> None:
        assert_same(self.target.logits(hidden), path_logits(self.plain, self.text, tree))

    def commit(self, tree: TokenTree, node: int) -> None:
        """Accept the path to `node`."""
        path = path_of(tree, node)
        self.target.commit(tuple(path[1:]))
        self.text += [int(tree.tokens[node]) for node in path]

    def look(self, node: int | None, *, nodes: int = 17) -> None:
        """Read a tree, check it, and accept the path to a node: the deepest, unless told."""
        tree = self.tree(nodes)
        self.check(tree, self.target.look(tree))
        deepest = max(range(tree.num_nodes), key=lambda node: len(path_of(tree, node)))
        self.commit(tree, deepest if node is None else node)

    def cut(self, make: Callable[[], object], share: float) -> None:
        """Begin a pass, and end it after this share of its layers."""

        def watch(done: float) -> None:
            if done >= share:
                raise CutError

        self.causal.watch = watch
        with pytest.raises(CutError):
            make()
        self.causal.watch = None


def look_together(readers: Sequence[Reader], *, nodes: int) -> list[TokenTree]:
    """Read a tree of each text in one pass, check them, and return them."""
    trees = [reader.tree(nodes) for reader in readers]
    rows = [reader.target.tree_rows(tree) for reader, tree in zip(readers, trees, strict=True)]
    for reader, tree, hidden in zip(readers, trees, readers[0].causal.read(rows), strict=True):
        reader.check(tree, hidden)
    return trees


def check_cut_copy_and_file(reader: Reader, count: int) -> None:
    """Check a text after a cut pass, and its copies: of its first rows, out of a file, and without its last."""
    reader.read_prompt(count)
    reader.cut(lambda: reader.target.look(reader.tree()), 0.6)
    reader.look(3)
    reader.target.look(reader.tree())  # whole, and not accepted
    of = reader.target.cache
    tensors = of.tensors()
    filled = TextCache(len(of.layers))
    states = [name[len("state.") : -len(".starts")] for name in tensors if name.endswith(".starts")]
    filled.fill(tensors.get, list(of.ids), states)
    rewound = of.copy(len(of.ids))
    rewound.truncate(len(of.ids) - 6)
    for cache in (of.copy(count - 4), filled, rewound):
        other = Reader(reader.plain, reader.causal, 7)
        other.target.cache, other.text = cache, list(cache.ids)
        other.look(None)
        other.look(None)
    assert of.text_bytes == sum(part.nbytes for part in tensors.values())
    reader.look(None)  # its copies have left it alone


def assert_same(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < 5e-5, error


def readers(family: str, count: int = 1, *, chunk_rows: int = 512) -> list[Reader]:
    model = make_model(RECURRENT[family]())
    causal = CausalModel(copy.deepcopy(model), device=CPU, chunk_rows=chunk_rows)
    return [Reader(model, causal, seed) for seed in range(count)]
