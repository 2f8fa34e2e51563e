"""DFlash, DSpark and DFlash2 drafters of both containers: a node's q is the page's of its own path.

Theirs are marginals of a block's places, what a chain of tokens makes of them, and a few candidates behind
convolutions within the block.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.draft.block import BlockDrafter, MarkovBlockDrafter, SelectorBlockDrafter
from edgespec.draft.dflash_network import DFlashLayer
from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair
from tests.edgespec.draft.contract import GREEDY_AND_WARM, PROMPT, TEXT, drafter_at, open_engine, rounds_of
from tests.edgespec.draft.dflash_drafter import (
    CANDIDATES,
    Drafter,
    after,
    of_all_tokens,
    places,
    selected,
    tensors_of,
    write_drafter,
)
from tests.edgespec.draft.eagle3_head import TARGET, in_doubles, states_of
from tests.support.families import make_model

SCALES = (("input_embedding_scale", 3.0), ("output_multiplier", 0.5), ("final_logit_softcapping", 4.0))
WINDOWS: dict[str, Any] = {"windows": (9, 9, 9)}
PUBLISHED: dict[str, Any] = {"container": "speculators"}
FORMS: dict[str, Drafter] = {
    "DFlash": Drafter(),
    "DFlash, default ids": Drafter(ids=None, read=(2, 4, 6)),
    "DFlash, causal": Drafter(causal=(True, True, True), inner=(("causal", True),)),
    "DFlash, windows": Drafter(windows=(6, None, 6), causal=(True, False, True)),
    "DFlash, windows that are not causal": Drafter(windows=(6, 6, None), keys=(("is_causal", False),)),
    "DFlash, a long block": Drafter(block=9),
    "DFlash, speculators": Drafter(**PUBLISHED),
    "DFlash, speculators, from the anchor": Drafter(**PUBLISHED, from_anchor=True),
    "DFlash, speculators, own ends, some tokens": Drafter(**PUBLISHED, owns_ends=True, draft_vocab=100),
    "DFlash, speculators, windows": Drafter(**PUBLISHED, windows=(6, None, 6), causal=(True, False, True)),
    "DFlash, speculators, windows that are not causal": Drafter(
        **PUBLISHED, windows=(6, None, None), keys=(("sliding_window_non_causal", True),)
    ),
    "DSpark": Drafter(markov="vanilla", from_anchor=True),
    "DSpark, gated": Drafter(markov="gated", from_anchor=True),
    "DSpark, from the places": Drafter(markov="vanilla", keys=(("sample_from_anchor", False),)),
    "DSpark, older names": Drafter(markov="rnn", from_anchor=True, prefix="logit_head"),
    "DSpark, speculators": Drafter(**PUBLISHED, markov="gated", from_anchor=True),
    "DSpark, speculators, own ends, some tokens": Drafter(
        **PUBLISHED, markov="rnn", from_anchor=True, owns_ends=True, draft_vocab=100
    ),
    "DFlash2": Drafter(selector=True),
    "DFlash2, block size inside": Drafter(selector=True, keys=(("block_size", None),), inner=(("block_size", 5),)),
    "DFlash2, windows of which nothing is said": Drafter(selector=True, **WINDOWS),
    "DFlash2, causal": Drafter(selector=True, keys=(("is_causal", True),), causal=(True, True, True)),
    "DFlash2, scales": Drafter(selector=True, inner=SCALES),
    "DFlash2, speculators": Drafter(**PUBLISHED, selector=True, **WINDOWS),
    "DFlash2, speculators, own ends": Drafter(**PUBLISHED, selector=True, owns_ends=True),
}


@torch.no_grad()
def compare(engine: Engine, form: Drafter, *, keeps_others: bool = False) -> None:
    """Grow trees from a text, commit paths, and compare the q of every node with the page's forward."""
    looked, drafter = drafter_at(engine, TEXT)
    kind = MarkovBlockDrafter if form.markov else SelectorBlockDrafter if form.selector else BlockDrafter
    assert type(drafter) is kind
    if keeps_others:
        drafter.sampling = replace(drafter.sampling, tail_share=0.05)
    plain, tensors = make_model(TARGET), in_doubles(tensors_of(form))
    embed, output = (part.weight.double() for part in (plain.get_input_embeddings(), plain.get_output_embeddings()))
    near = {"rtol": 1e-4, "atol": 1e-5} if form.selector else {"rtol": 1e-3, "atol": 1e-6}
    for text, paths, found in rounds_of(looked, drafter, count=5 if form.selector else 4):
        hidden = places(form, tensors, [rows.double() for rows in states_of(plain, text)], embed, paths[0][0])
        assert drafter.max_depth == len(hidden)
        known = known_of(form, tensors, hidden, output)
        for path, q in zip(paths, found, strict=True):
            place = len(path) - 1
            if place >= len(hidden):
                assert not q.any(), "behind the block"
                continue
            expected = known[place].softmax(-1)
            if form.markov:
                expected = after(form, tensors, hidden, output, path).softmax(-1)[0]
            elif form.selector:
                alone, expected = expected, selected(tensors, hidden[place], known[place], path[-1]).softmax(-1)[0]
                assert keeps_others or int((q > 0).sum()) <= CANDIDATES
                if keeps_others:
                    expected = torch.where(expected > 0, expected * alone[expected > 0].sum(), alone)
            torch.testing.assert_close(q, expected.float(), **near)


def known_of(form: Drafter, tensors: dict[str, Tensor], hidden: Tensor, output: Tensor) -> Tensor:
    """The logits [s, V] of the places of a block."""
    inner = dict(form.inner)
    known = hidden @ tensors.get("lm_head.weight", output).T * inner.get("output_multiplier", 1.0)
    cap = inner.get("final_logit_softcapping")
    return of_all_tokens(form, tensors, cap * (known / cap).tanh() if cap else known)


@pytest.mark.parametrize("name", FORMS)
def test_a_nodes_distribution_is_the_pages_of_its_path(name: str, target: Path, tmp_path: Path) -> None:
    with open_engine(target, write_drafter(tmp_path / "drafter", FORMS[name])) as engine:
        compare(engine, FORMS[name])


@pytest.mark.parametrize("name", ["DFlash2", "DFlash2, scales", "DFlash2, speculators, own ends"])
def test_where_cut_off_tokens_keep_a_part_candidates_have_what_their_place_gives_them(
    name: str, target: Path, tmp_path: Path
) -> None:
    """Coupled children are the better the closer q is to p: candidates alone would count as surer than they are."""
    with open_engine(target, write_drafter(tmp_path / "drafter", FORMS[name])) as engine:
        compare(engine, FORMS[name], keeps_others=True)


def test_trees_are_as_deep_as_the_block_and_the_tuner_knows_its_calls(target: Path, tmp_path: Path) -> None:
    with open_engine(target, write_drafter(tmp_path / "drafter", Drafter())) as engine:
        assert engine.tree.depth == engine.largest_tree.depth == 4
        growth = engine.trees.tuner.choice(SamplingSettings()).costs.growth
        growth.observe(2, 8, 0.02)
        assert growth.seconds(4, 8) == growth.seconds(9, 8) < 1.2 * growth.seconds(2, 8)


@pytest.mark.parametrize("options", GREEDY_AND_WARM, ids=["greedy", "warm"])
def test_penalties_give_plain_decodings_tokens(target: Path, options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", FORMS["DFlash, speculators, from the anchor"])
    found = []
    for draft in (None, folder):
        with open_engine(target, draft, tree=TreeSettings(policy="opt-tree", size=12, lookup=False)) as engine:
            found.append(engine.generate(PROMPT, **options, repetition_penalty=1.4).token_ids)
    assert found[0] == found[1]


@torch.no_grad()
def test_a_convolution_begins_anew_with_every_block(target: Path, tmp_path: Path) -> None:
    with open_engine(target, write_drafter(tmp_path / "drafter", FORMS["DFlash2"])) as engine:
        layer = engine.draft_model.model.model.layers[0]
        assert isinstance(layer, DFlashLayer)
        rows = torch.randn(1, 10, 32, generator=torch.Generator().manual_seed(1))
        kernels, _ = layer.attention_conv.kernels(rows)
        both = layer.attention_conv(kernels, rows)
        for block in (slice(0, 5), slice(5, 10)):
            assert torch.equal(layer.attention_conv(kernels[block], rows[:, block]), both[:, block])
        assert torch.equal(both[0, 5], kernels[5, 0] * rows[0, 5])


@pytest.mark.parametrize(
    ("form", "inner", "said"),
    [
        ("DSpark", {"markov_head_type": "other"}, "'other', which is none of vanilla, gated, rnn"),
        ("DSpark", {"markov_rank": 0}, "markov_rank = 0"),
        ("DSpark", {"dspark_backbone_conv_enabled": True}, "convolutions"),
        ("DFlash2", {"conv_group_size": 5}, "conv_group_size = 5, which does not divide 32"),
        ("DFlash2", {"selector_rank": 0}, "selector_rank = 0"),
        ("DFlash2", {"output_multiplier": -1.0}, "output_multiplier = -1.0, which is no number above 0"),
        ("DFlash2", {"projector_type": "dspark"}, "projector_type"),
        ("DFlash2, windows of which nothing is said", {}, "a window of 4 tokens, smaller than its block of 5"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    form: str, inner: dict[str, Any], said: str, target: Path, tmp_path: Path
) -> None:
    windows = {} if inner else {"windows": (4, 4, 4)}
    folder = write_drafter(tmp_path / "drafter", replace(FORMS[form], inner=tuple(inner.items()), **windows))
    with pytest.raises(EdgespecError, match=said):
        open_pair(target, folder)


def test_the_head_that_guesses_acceptance_is_named_once(target: Path, tmp_path: Path) -> None:
    for markov, is_named in (("vanilla", True), (None, False)):
        draft = open_pair(target, write_drafter(tmp_path / str(markov), Drafter(markov=markov))).draft
        assert [note.count("is not used") for note in draft.notes if "guesses how far" in note] == [1] * is_named


def test_its_tables_are_planned_with_it(target: Path, tmp_path: Path) -> None:
    with_weights = open_pair(target, write_drafter(tmp_path / "drafter", FORMS["DFlash2"])).draft
    names = {name for name in with_weights.checkpoint.tensors if name.startswith("selector.")}
    codebooks = {f"selector.{name}_codebook.weight" for name in ("predecessor", "successor")}
    assert names == {"selector.hidden_projection.weight", *codebooks}
    assert with_weights.notes[0].startswith("is a DFlash2 drafter, which guesses 4 tokens")
