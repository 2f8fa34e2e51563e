"""DFlash drafters of both containers: their marginals are the page's, and texts are plain decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.draft.block import BlockDrafter
from tests.conftest import GROUPED, make_model, save_folder
from tests.edgespec.draft.contract import GREEDY_AND_WARM, PROMPT, TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.dflash_drafter import Drafter, reference, tensors_of, write_drafter
from tests.edgespec.draft.eagle3_head import states_of

PLAIN = LlamaConfig(**{**GROUPED, "num_hidden_layers": 8})

FORMS: dict[str, Drafter] = {
    "plain": Drafter(),
    "plain, default ids": Drafter(ids=None, read=(2, 4, 6)),
    "plain, causal": Drafter(causal=(True, True, True), inner=(("causal", True),)),
    "plain, windows": Drafter(windows=(6, None, 6), causal=(True, False, True)),
    "plain, windows that are not causal": Drafter(windows=(6, 6, None), keys=(("is_causal", False),)),
    "plain, a long block": Drafter(block=9),
    "speculators": Drafter(container="speculators"),
    "speculators, from the anchor": Drafter(container="speculators", from_anchor=True),
    "speculators, own ends, some tokens": Drafter(container="speculators", owns_ends=True, draft_vocab=100),
    "speculators, windows": Drafter(container="speculators", windows=(6, None, 6), causal=(True, False, True)),
    "speculators, windows that are not causal": Drafter(
        container="speculators", windows=(6, None, None), keys=(("sliding_window_non_causal", True),)
    ),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("dflash") / "target", make_model(PLAIN))


@torch.no_grad()
def compare(engine: Engine, plain: PreTrainedModel, form: Drafter) -> None:
    """Grow trees from a text, commit paths, and compare the q of every node with the page's forward."""
    looked, drafter = drafter_at(engine, TEXT)
    assert isinstance(drafter, BlockDrafter)
    tensors = tensors_of(form)
    embed, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert isinstance(embed, Tensor)
    for text, paths, q in rounds_of(looked, drafter, count=4):
        logits = reference(form, tensors, states_of(plain, text), embed, output, paths[0][0])
        assert drafter.max_depth == logits.shape[0]
        expected = torch.cat([logits.softmax(-1), torch.zeros(1, form.vocab)])  # nothing behind the block
        places = torch.tensor([len(path) - 1 for path in paths]).clamp(max=logits.shape[0])
        torch.testing.assert_close(q, expected[places], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_marginals_are_the_pages(name: str, target_folder: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", FORMS[name])
    with open_engine(target_folder, folder) as engine:
        compare(engine, make_model(PLAIN), FORMS[name])


def test_trees_are_as_deep_as_the_block_and_the_tuner_knows_its_calls(target_folder: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter", Drafter())
    with open_engine(target_folder, drafter) as engine:
        assert engine.tree.depth == engine.largest_tree.depth == 4
        assert engine.trees.tuner is not None
        growth = engine.trees.tuner.choice(SamplingSettings()).costs.growth
        growth.observe(2, 8, 0.02)
        assert growth.seconds(4, 8) == growth.seconds(9, 8) < 1.2 * growth.seconds(2, 8)


@pytest.mark.parametrize("options", GREEDY_AND_WARM, ids=["greedy", "warm"])
def test_penalties_give_plain_decodings_tokens(target_folder: Path, options: dict[str, Any], tmp_path: Path) -> None:
    form = FORMS["speculators, from the anchor"]
    folder = write_drafter(tmp_path / "drafter", form)
    found = []
    for draft in (None, folder):
        with open_engine(target_folder, draft, tree=TreeSettings(policy="opt-tree", size=12, lookup=False)) as engine:
            found.append(engine.generate(PROMPT, **options, repetition_penalty=1.4).token_ids)
    assert found[0] == found[1]
