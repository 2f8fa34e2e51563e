"""Texts of given tokens, read plainly and by trees that have them among their paths: do rows have the same bits?

A tree's other nodes, and what is accepted of its path, are random. What follows is a turn that goes on from the kept
rows, read plainly again.
"""

import random
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.tree.token_tree import TokenTree
from offload.layouts.onednn import has_onednn, hook_linear_layers

PROMPT_TOKENS, TURN_TOKENS = 45, 9
TEXTS = 3  # that share passes
SHAPES: dict[str, tuple[range, bool, int]] = {  # sizes of trees, whether they are chains, and texts in a pass
    "trees": (range(2, 40), False, 1), "chains": (range(2, 12), True, 1), "company": (range(1, 24), False, TEXTS),
}  # fmt: skip


def tree_with(
    path: list[int], nodes: int, token: Callable[[], int], draw: random.Random
) -> tuple[TokenTree, list[int]]:
    """Return a tree of random nodes that has these tokens on a path from its root on, and the path's nodes."""
    parents, tokens, on_path = [-1], [path[0]], [0]
    while len(parents) < nodes or len(on_path) < len(path):
        is_next = len(on_path) < len(path) and (len(parents) >= nodes or draw.random() < len(path) / nodes)
        parents.append(on_path[-1] if is_next else draw.randrange(len(parents)))
        tokens.append(path[len(on_path)] if is_next else token())
        if is_next:
            on_path.append(len(parents) - 1)
    count = len(parents)
    tree = TokenTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        ranks=torch.zeros(count, dtype=torch.long),
        draw="sampled",
        draft_rows=torch.full((count,), -1),
    )
    return tree, on_path


class GivenText:
    """A text of given tokens, and the last hidden states of its rows in one way of reading them."""

    def __init__(self, causal: CausalModel, ids: list[int], seed: int) -> None:
        self.target, self.ids, self.draw = Target(causal), ids, random.Random(seed)
        self.hidden: list[Tensor] = []  # [h] each, of all rows that were decoded
        self.target.prefill(torch.tensor(ids[:PROMPT_TOKENS]))

    @property
    def num_left(self) -> int:
        return len(self.ids) - len(self.target.cache.ids)

    def tree(self, sizes: range, *, is_chain: bool) -> tuple[TokenTree, list[int]]:
        """Return a tree that has some of the tokens to come."""
        nodes = min(self.draw.choice(sizes), self.num_left) if is_chain else self.draw.choice(sizes)
        depth = nodes if is_chain else min(self.draw.randint(1, 9), self.num_left)
        start = len(self.target.cache.ids)
        return tree_with(self.ids[start : start + depth], nodes, lambda: self.draw.choice(self.ids), self.draw)

    def take(self, on_path: list[int], hidden: Tensor) -> None:
        """Accept some of the path."""
        accepted = on_path[: self.draw.randint(1, len(on_path))]
        self.hidden += hidden[accepted]
        self.target.commit(tuple(accepted[1:]))

    def take_turn(self, tokens: list[int]) -> None:
        """Read a turn behind the text that was decoded, and decode as many tokens again by single rows."""
        self.ids = [*self.ids, *tokens, *tokens]
        self.target.begin(self.ids[: -len(tokens)])
        count = self.target.num_unread
        (hidden,) = self.target.read([self.target.text_rows(count)])
        self.target.took_in(count)
        self.hidden += hidden
        decode([self], range(1, 2), is_chain=True)


def let_states_last(model: PreTrainedModel) -> None:
    """Change a random model so that its states last for some dozen tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.normal_().sub_(2)


def decode(texts: list[GivenText], sizes: range, *, is_chain: bool) -> None:
    """Decode all tokens, in passes that the texts share."""
    while under_way := [text for text in texts if text.num_left]:
        trees = [text.tree(sizes, is_chain=is_chain) for text in under_way]
        parts = [text.target.tree_rows(tree) for text, (tree, _) in zip(under_way, trees, strict=True)]
        for text, (_, on_path), hidden in zip(under_way, trees, under_way[0].target.read(parts), strict=True):
            text.take(on_path, hidden)


@torch.no_grad()
def compared(
    model: PreTrainedModel, *, vocab: int, tokens: int, natively: bool = False
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """Return, by the shape of trees, the number of rows that have the bits of plain decoding, and of all rows."""
    with ExitStack() as undo:
        if has_onednn(torch.bfloat16):
            hook_linear_layers(model, torch.bfloat16, undo)
        causal = CausalModel(model, device=torch.device("cpu"), keeps_row_bits=True)
        if natively:
            causal.use_native_passes()
            assert causal.is_native
        return _compared(causal, vocab=vocab, tokens=tokens)


def num_with_other_bits(model: PreTrainedModel, *, vocab: int, tokens: int) -> int:
    return sum(rows - same for same, rows in compared(model, vocab=vocab, tokens=tokens).values())


def _compared(causal: CausalModel, *, vocab: int, tokens: int) -> dict[str, tuple[int, int]]:
    draw = random.Random(1)
    texts_ids = [[draw.randrange(vocab) for _ in range(PROMPT_TOKENS + tokens)] for _ in range(TEXTS)]
    turn = [draw.randrange(vocab) for _ in range(TURN_TOKENS)]

    def read(sizes: range, is_chain: bool, at_once: int) -> list[Tensor]:
        texts = [GivenText(causal, ids, number) for number, ids in enumerate(texts_ids)]
        for first in range(0, TEXTS, at_once):
            decode(texts[first : first + at_once], sizes, is_chain=is_chain)
        for text in texts:
            text.take_turn(turn)
        return [hidden for text in texts for hidden in text.hidden]

    plain, found = read(range(1, 2), True, 1), {}
    for name, shape in SHAPES.items():
        pairs = list(zip(read(*shape), plain, strict=True))
        found[name] = sum(torch.equal(one, other) for one, other in pairs), len(pairs)
    return found
