"""DSpark drafters: a node's q is the page's of its own path, and texts are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec import Engine
from edgespec.draft.markov import MarkovHead
from edgespec.draft.markov_block import MarkovBlockDrafter
from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair
from tests.conftest import make_model, save_folder
from tests.edgespec.draft.contract import TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.dflash_drafter import Drafter, after, places, tensors_of, write_drafter
from tests.edgespec.draft.eagle3_head import states_of
from tests.edgespec.draft.test_dflash import (
    PLAIN,
    block_position_off_by_one,
    context_position_off_by_one,
    features_of_the_token_before,
    taps_off_by_one,
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


def without_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MarkovBlockDrafter, "_bias", lambda self, latent: latent.new_zeros(len(latent), self.model.vocab))


def of_the_root(patch: pytest.MonkeyPatch) -> None:
    right = MarkovHead.forward
    patch.setattr(MarkovHead, "forward", lambda self, tokens, *more: right(self, torch.full_like(tokens, 7), *more))


def state_of_the_first(patch: pytest.MonkeyPatch) -> None:
    right = MarkovHead.forward
    patch.setattr(MarkovHead, "forward", lambda self, tokens, hidden, states: right(self, tokens, hidden, states * 0))


def place_after(patch: pytest.MonkeyPatch) -> None:
    right = MarkovBlockDrafter.took_nodes
    patch.setattr(MarkovBlockDrafter, "took_nodes", lambda self, parents: right(self, parents) + 1)


def bias_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """A node's children have the bias of its parent's token."""
    right = MarkovBlockDrafter.answer

    def answer(self: MarkovBlockDrafter, tokens: Tensor, parents: Tensor) -> Any:
        seen = torch.cat([getattr(self, "seen", tokens.new_zeros(0)) if self._num_rows else tokens[:0], tokens])
        self.seen = seen  # type: ignore[attr-defined]
        return right(self, seen[parents.clamp(min=0)], parents)

    patch.setattr(MarkovBlockDrafter, "answer", answer)


OWN = [without_bias, of_the_root, state_of_the_first, place_after, bias_of_the_token_before]
OF_BLOCKS = [taps_off_by_one, context_position_off_by_one, block_position_off_by_one, features_of_the_token_before]


@pytest.mark.parametrize("plant", [*OWN, *OF_BLOCKS])
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS["plain, older names"]
    plant(monkeypatch)
    drafter = write_drafter(tmp_path / "drafter", form)
    with open_engine(target_folder, drafter) as engine, pytest.raises(AssertionError, match=r"Tensor-likes|behind"):
        compare(engine, form)


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
