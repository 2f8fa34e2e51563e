"""EAGLE-3 heads of both containers: their outputs are the page's, and texts are plain decoding's."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.config import DraftSampling
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.model.target import Target
from edgespec.pair.pair import open_pair
from edgespec.tree.token_tree import TokenTree
from tests.conftest import FAMILIES, GROUPED, RECURRENT, make_model, save_folder
from tests.edgespec.draft.eagle3_head import ALL_FLAGS, Head, config_of, reference, states_of, tensors_of, write_head

SAMPLING = DraftSampling(temperature=0.8)
LAYERS = 8
PLAIN = LlamaConfig(**{**GROUPED, "num_hidden_layers": LAYERS})

FORMS: dict[str, Head] = {
    "plain": Head(),
    "plain, ids of H": Head(taps=(2, 7, 8), read=(2, 7, 8)),
    "plain, ids of outputs": Head(taps=(1, 3, 7), read=(2, 4, 8)),
    "plain, embedding's output": Head(taps=(0, 5), read=(0, 5)),
    "plain, no aux": Head(use_aux=False, read=(LAYERS + 1,)),
    "plain, all flags": Head(flags=frozenset(ALL_FLAGS)),
    "plain, norm_before_residual": Head(flags=frozenset({"norm_before_residual"})),
    "plain, norm_output": Head(flags=frozenset({"norm_output"})),
    "plain, norm_before_fc": Head(flags=frozenset({"norm_before_fc"})),
    "plain, whole vocabulary, no head": Head(draft_vocab=257, owns_head=False),
    "plain, whole vocabulary, own head": Head(draft_vocab=257),
    "plain, three layers": Head(num_layers=3),
    "plain, biases": Head(has_bias=True),
    "plain, narrow": Head(width=24, owns_embedding=True),
    "speculators": Head(container="speculators", taps=(2, 4, 5)),
    "speculators, own embedding": Head(container="speculators", owns_embedding=True, taps=(1, 3, 4)),
    "speculators, qwen3, fc_norm": Head(container="speculators", family="qwen3", flags=frozenset({"fc_norm"})),
    "speculators, two layers": Head(container="speculators", num_layers=2, flags=frozenset({"norm_before_residual"})),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("eagle3") / "target", make_model(PLAIN))


def open_engine(target: Path, draft: Path | None, **options: Any) -> Engine:
    settings = {"context_tokens": 160, "self_check": False, "dtype": "float32", **options}
    return Engine.from_pair(open_pair(target, draft), **settings)


def compare(engine: Engine, plain: PreTrainedModel, head: Head, tensors: dict[str, Tensor], *, rounds: int = 3) -> None:
    """Grow random trees from a text, commit a path of each, and compare each node with the page's forward."""
    target_model, draft_model = engine.target_model, engine.draft_model
    assert draft_model is not None
    looked = Target(target_model)
    drafter: LanguageModelDrafter = open_drafter(draft_model, looked, sampling=SAMPLING)
    text, root = list(range(30, 50)), 7
    looked.prefill(torch.tensor(text))
    drafter.begin(text)
    embed, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert isinstance(embed, Tensor)
    generator = torch.Generator().manual_seed(0)
    for number in range(rounds):
        states = states_of(plain, text)
        paths, parents = [[root]], [-1]
        drafter.expand(torch.tensor([root]), torch.tensor([-1]))
        for width in (3, 4, 2):
            above = torch.randint(len(paths), (width,), generator=generator)
            tokens = torch.randint(100, (width,), generator=generator)
            drafter.expand(tokens, above)
            for token, parent in zip(tokens.tolist(), above.tolist(), strict=True):
                paths.append([*paths[parent], token])
                parents.append(parent)
        found = drafter.hidden(torch.arange(len(paths)))
        logits = draft_model.logits(found)
        for row, path in enumerate(paths):
            expected, expected_logits = reference(head, tensors, states, embed, output, text, path)
            torch.testing.assert_close(found[row], expected[-1], rtol=2e-4, atol=2e-5)
            torch.testing.assert_close(logits[row], expected_logits[-1], rtol=2e-4, atol=1e-4)
        tree = TokenTree(
            tokens=torch.tensor([path[-1] for path in paths]),
            parents=torch.tensor(parents),
            ranks=torch.zeros(len(paths), dtype=torch.long),
            draw="chosen",
            draft_rows=torch.arange(len(paths)),
        )
        looked.look(tree)
        best = max(range(len(paths)), key=lambda row: len(paths[row]))
        path = [row for row in range(1, len(paths)) if paths[row] == paths[best][: len(paths[row])]]
        path = path[: len(paths[best]) - 1]
        looked.commit(tuple(path))
        drafter.commit(root, path, paths[best][1:])
        text += paths[best]
        root = number


@pytest.mark.parametrize("name", FORMS)
def test_outputs_in_a_tree_are_the_pages(name: str, target_folder: Path, tmp_path: Path) -> None:
    head = FORMS[name]
    folder = write_head(tmp_path / "head", head)
    with open_engine(target_folder, folder) as engine:
        compare(engine, make_model(PLAIN), head, tensors_of(head))


def test_torchs_own_file_is_read(target_folder: Path, tmp_path: Path) -> None:
    head = Head(owns_embedding=True)
    folder = write_head(tmp_path / "head", head, is_torch_file=True)
    with open_engine(target_folder, folder) as engine:
        compare(engine, make_model(PLAIN), head, tensors_of(head), rounds=1)
