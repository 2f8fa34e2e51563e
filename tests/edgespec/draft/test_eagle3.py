"""EAGLE-3 heads of both containers: their outputs are the page's, and texts are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from edgespec import Engine
from tests.edgespec.draft.contract import TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.eagle3_head import (
    ALL_FLAGS,
    TARGET,
    Head,
    in_doubles,
    reference,
    states_of,
    tensors_of,
    write_head,
)
from tests.support.families import FAMILIES, RECURRENT, make_model, save_folder

LAYERS = 8

FORMS: dict[str, Head] = {
    "plain": Head(),
    "plain, ids of H": Head(layers=(2, 7, 8), read=(2, 7, 8)),
    "plain, ids of outputs": Head(layers=(1, 3, 7), read=(2, 4, 8)),
    "plain, embedding's output": Head(layers=(0, 5), read=(0, 5)),
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
    "speculators": Head(container="speculators", layers=(2, 4, 5)),
    "speculators, own embedding": Head(container="speculators", owns_embedding=True, layers=(1, 3, 4)),
    "speculators, qwen3, fc_norm": Head(container="speculators", family="qwen3", flags=frozenset({"fc_norm"})),
    "speculators, two layers": Head(container="speculators", num_layers=2, flags=frozenset({"norm_before_residual"})),
}


@torch.no_grad()
def compare(engine: Engine, plain: PreTrainedModel, head: Head, tensors: dict[str, Tensor], *, rounds: int = 3) -> None:
    """Grow trees from a text, commit paths, and compare each node with the page's forward."""
    looked, drafter = drafter_at(engine, TEXT)
    tensors = in_doubles(tensors)
    embed, output = (part.weight.double() for part in (plain.get_input_embeddings(), plain.get_output_embeddings()))
    for text, paths, _ in rounds_of(looked, drafter, count=rounds):
        states = [rows.double() for rows in states_of(plain, text)]
        found = drafter.hidden(torch.arange(len(paths)))
        logits = drafter.model.logits(found)
        for row, path in enumerate(paths):
            expected, expected_logits = reference(head, tensors, states, embed, output, text, path)
            torch.testing.assert_close(found[row], expected[-1].float(), rtol=2e-4, atol=5e-5)
            torch.testing.assert_close(logits[row], expected_logits[-1].float(), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_outputs_in_a_tree_are_the_pages(name: str, target: Path, tmp_path: Path) -> None:
    head = FORMS[name]
    with open_engine(target, write_head(tmp_path / "head", head)) as engine:
        compare(engine, make_model(TARGET), head, tensors_of(head))


def test_torchs_own_file_is_read(target: Path, tmp_path: Path) -> None:
    head = Head(owns_embedding=True)
    with open_engine(target, write_head(tmp_path / "head", head, is_torch_file=True)) as engine:
        compare(engine, make_model(TARGET), head, tensors_of(head), rounds=1)


TARGETS: dict[str, Callable[[], PretrainedConfig]] = {
    name: of[name]
    for of, names in (
        (FAMILIES, ("gemma2", "gemma4", "gpt2", "qwen3-moe", "llama4")),
        (RECURRENT, ("qwen3.5", "qwen3-next", "nemotron-h", "lfm2", "jamba")),
    )
    for name in names
}


@pytest.mark.parametrize("family", TARGETS)
def test_hybrids_and_mixtures_give_the_states_between_their_layers(family: str, tmp_path: Path) -> None:
    config = TARGETS[family]()
    target = save_folder(tmp_path / "target", make_model(config))
    last = int(config.num_hidden_layers)
    head = Head(layers=(0, 2, last), read=(0, 2, last))
    with open_engine(target, write_head(tmp_path / "head", head)) as engine:
        compare(engine, make_model(config), head, tensors_of(head), rounds=2)
