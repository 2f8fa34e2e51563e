"""DFlash2 drafters: a node's q is the page's of its own path, over convolutions within the block and few candidates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec import Engine
from edgespec.draft.block import SelectorBlockDrafter
from edgespec.draft.dflash_network import DFlashLayer
from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair
from tests.conftest import make_model, save_folder
from tests.edgespec.draft.contract import TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.dflash_drafter import CANDIDATES, Drafter, places, selected, tensors_of, write_drafter
from tests.edgespec.draft.eagle3_head import states_of
from tests.edgespec.draft.test_dflash import PLAIN

SCALES = (("input_embedding_scale", 3.0), ("output_multiplier", 0.5), ("final_logit_softcapping", 4.0))
WINDOWS: dict[str, Any] = {"windows": (9, 9, 9)}
FORMS: dict[str, Drafter] = {
    "plain": Drafter(selector=True),
    "plain, block size inside": Drafter(selector=True, keys=(("block_size", None),), inner=(("block_size", 5),)),
    "plain, windows of which nothing is said": Drafter(selector=True, **WINDOWS),
    "plain, causal": Drafter(selector=True, keys=(("is_causal", True),), causal=(True, True, True)),
    "plain, scales": Drafter(selector=True, inner=SCALES),
    "speculators": Drafter(container="speculators", selector=True, **WINDOWS),
    "speculators, own ends": Drafter(container="speculators", selector=True, owns_ends=True),
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("dflash2") / "target", make_model(PLAIN))


@torch.no_grad()
def compare(engine: Engine, form: Drafter, *, rounds: int = 5, keeps_others: bool = False) -> None:
    """Grow trees from a text, commit paths, and compare the q of every node with the page's forward."""
    looked, drafter = drafter_at(engine, TEXT)
    assert isinstance(drafter, SelectorBlockDrafter)
    if keeps_others:
        drafter.sampling = replace(drafter.sampling, tail_share=0.05)
    plain, tensors = make_model(PLAIN), tensors_of(form)
    embed, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    assert isinstance(embed, Tensor)
    inner = dict(form.inner)
    for text, paths, found in rounds_of(looked, drafter, count=rounds):
        hidden = places(form, tensors, states_of(plain, text), embed, paths[0][0])
        known = hidden @ tensors.get("lm_head.weight", output).T * inner.get("output_multiplier", 1.0)
        cap = inner.get("final_logit_softcapping")
        known = cap * (known / cap).tanh() if cap else known
        for path, q in zip(paths, found, strict=True):
            if len(path) > len(hidden):
                assert not q.any(), "behind the block"
                continue
            place = len(path) - 1
            expected = selected(tensors, hidden[place], known[place], path[-1]).softmax(-1)[0]
            if keeps_others:
                alone = known[place].softmax(-1)
                expected = torch.where(expected > 0, expected * alone[expected > 0].sum(), alone)
            else:
                assert int((q > 0).sum()) <= CANDIDATES
            torch.testing.assert_close(q, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_a_nodes_distribution_is_the_pages_of_its_path(name: str, target_folder: Path, tmp_path: Path) -> None:
    with open_engine(target_folder, write_drafter(tmp_path / "drafter", FORMS[name])) as engine:
        compare(engine, FORMS[name])


@pytest.mark.parametrize("name", ["plain", "plain, scales", "speculators, own ends"])
def test_where_cut_off_tokens_keep_a_part_candidates_have_what_their_place_gives_them(
    name: str, target_folder: Path, tmp_path: Path
) -> None:
    """Coupled children are the better the closer q is to p: candidates alone would count as surer than they are."""
    with open_engine(target_folder, write_drafter(tmp_path / "drafter", FORMS[name])) as engine:
        compare(engine, FORMS[name], keeps_others=True)


@torch.no_grad()
def test_a_convolution_begins_anew_with_every_block(target_folder: Path, tmp_path: Path) -> None:
    with open_engine(target_folder, write_drafter(tmp_path / "drafter", FORMS["plain"])) as engine:
        assert engine.draft_model is not None
        layer = engine.draft_model.model.model.layers[0]
        assert isinstance(layer, DFlashLayer)
        rows = torch.randn(1, 10, 32, generator=torch.Generator().manual_seed(1))
        kernels, _ = layer.attention_conv.kernels(rows)
        both = layer.attention_conv(kernels, rows)
        for block in (slice(0, 5), slice(5, 10)):
            assert torch.equal(layer.attention_conv(kernels[block], rows[:, block]), both[:, block])
        assert torch.equal(both[0, 5], kernels[5, 0] * rows[0, 5])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inner": (("conv_group_size", 5),)}, "conv_group_size = 5, which does not divide 32"),
        ({"inner": (("selector_rank", 0),)}, "selector_rank = 0"),
        ({"inner": (("output_multiplier", -1.0),)}, "output_multiplier = -1.0, which is no number above 0"),
        ({"inner": (("projector_type", "dspark"),)}, "projector_type"),
        ({"windows": (4, 4, 4)}, "a window of 4 tokens, smaller than its block of 5"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    changes: dict[str, Any], said: str, target_folder: Path, tmp_path: Path
) -> None:
    folder = write_drafter(tmp_path / "drafter", replace(FORMS["plain"], **changes))
    with pytest.raises(EdgespecError, match=said):
        open_pair(target_folder, folder)


def test_its_tables_are_planned_with_it(target_folder: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", FORMS["plain"])
    with_weights = open_pair(target_folder, folder).draft
    assert with_weights is not None
    names = {name for name in with_weights.checkpoint.tensors if name.startswith("selector.")}
    codebooks = {f"selector.{name}_codebook.weight" for name in ("predecessor", "successor")}
    assert names == {"selector.hidden_projection.weight", *codebooks}
    assert with_weights.notes[0].startswith("is a DFlash2 drafter, which guesses 4 tokens")
