"""DSpark drafters: a node's q is the page's of its own path, and texts are plain decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec import Engine
from edgespec.draft.block import MarkovBlockDrafter
from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair
from tests.conftest import make_model, save_folder
from tests.edgespec.draft.contract import TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.dflash_drafter import Drafter, after, places, tensors_of, write_drafter
from tests.edgespec.draft.eagle3_head import states_of
from tests.edgespec.draft.test_dflash import (
    PLAIN,
)

FORMS: dict[str, Drafter] = {
    "plain": Drafter(markov="vanilla", from_anchor=True),
    "plain, gated": Drafter(markov="gated", from_anchor=True),
    "plain, from the places": Drafter(markov="vanilla", keys=(("sample_from_anchor", False),)),
    "plain, older names": Drafter(markov="rnn", from_anchor=True, prefix="logit_head"),
    "speculators": Drafter(container="speculators", markov="gated", from_anchor=True),
    "speculators, own ends, some tokens": Drafter(
        container="speculators", markov="rnn", from_anchor=True, owns_ends=True, draft_vocab=100
    ),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("dspark") / "target", make_model(PLAIN))


@torch.no_grad()
def compare(engine: Engine, form: Drafter) -> None:
    """Grow trees from a text, commit paths, and compare the q of every node with the page's forward."""
    looked, drafter = drafter_at(engine, TEXT)
    assert isinstance(drafter, MarkovBlockDrafter)
    plain, tensors = make_model(PLAIN), tensors_of(form)
    embed, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert isinstance(embed, Tensor)
    for text, paths, found in rounds_of(looked, drafter, count=3):
        hidden = places(form, tensors, states_of(plain, text), embed, paths[0][0])
        for path, q in zip(paths, found, strict=True):
            if len(path) > len(hidden):
                assert not q.any(), "behind the block"
                continue
            torch.testing.assert_close(
                q, after(form, tensors, hidden, output, path).softmax(-1)[0], rtol=1e-3, atol=1e-6
            )


@pytest.mark.parametrize("name", FORMS)
def test_a_nodes_distribution_is_the_pages_of_its_path(name: str, target_folder: Path, tmp_path: Path) -> None:
    with open_engine(target_folder, write_drafter(tmp_path / "drafter", FORMS[name])) as engine:
        compare(engine, FORMS[name])


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"markov_head_type": "other"}, "'other', which is none of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "markov_rank = 0"),
        ({"dspark_backbone_conv_enabled": True}, "convolutions"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    inner: dict[str, Any], said: str, target_folder: Path, tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", Drafter(markov="vanilla", inner=tuple(inner.items())))
    with pytest.raises(EdgespecError, match=said):
        open_pair(target_folder, folder)


def test_the_head_that_guesses_acceptance_is_named_once(target_folder: Path, tmp_path: Path) -> None:
    for markov, is_named in (("vanilla", True), (None, False)):
        draft = open_pair(target_folder, write_drafter(tmp_path / str(markov), Drafter(markov=markov))).draft
        assert draft is not None
        assert [note.count("is not used") for note in draft.notes if "guesses how far" in note] == [1] * is_named
