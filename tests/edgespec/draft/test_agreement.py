"""The check of a head with its target measures the page's forward, takes the better reading, and keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edgespec import Engine, TreeSettings
from edgespec.config import DraftSampling
from edgespec.draft import agreement, teacher_forcing
from edgespec.draft.agreement import Agreement, Comparison, Misplaced, compare_readings
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.own_parts import aux_states_of
from edgespec.draft.readings import AS_STATED, Reading, read_as, readings_of
from edgespec.draft.teacher_forcing import Guessed, Guesses, Wanted
from edgespec.hub.names import MTP
from edgespec.model.causal_model import CausalModel
from edgespec.model.target import Target
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.tuning import draft_check
from tests.edgespec.draft.dflash_drafter import Drafter, after, places, selected, write_drafter
from tests.edgespec.draft.dflash_drafter import tensors_of as tensors_of_drafter
from tests.edgespec.draft.eagle3_head import TARGET, Head, reference, states_of, tensors_of, write_head
from tests.edgespec.draft.mtp_target import last_states
from tests.edgespec.draft.mtp_target import reference as reference_of_layer
from tests.edgespec.draft.mtp_target import write_target as write_mtp_target
from tests.edgespec.draft.test_paired_tokens import shared
from tests.support.families import make_model

TEXT = list(range(40, 70))
AUX_LAYERS = (2, 4, 5)


def open_engine(target: Path, folder: Path, **options: Any) -> Engine:
    pair = open_pair(target, folder)
    return Engine.from_pair(pair, context_tokens=128, dtype="float32", self_check=False, **options)


def write_draft(folder: Path, form: Head | Drafter) -> Path:
    return write_head(folder, form) if isinstance(form, Head) else write_drafter(folder, form)


def compared_states(target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The draft's hidden states [t, h] in each comparison that the check makes on the text."""
    seen: list[Tensor] = []
    right = teacher_forcing._compared

    def compared(draft: CausalModel, hidden: Tensor, *more: Any) -> Guessed:
        seen.append(hidden)
        return right(draft, hidden, *more)

    monkeypatch.setattr(teacher_forcing, "_compared", compared)
    with open_engine(target, folder, draft_check=False) as engine:
        assert engine.draft_model is not None
        compare_readings(engine.target_model, engine.draft_model, torch.tensor(TEXT))
    return seen


@pytest.mark.parametrize("flags", [frozenset(), frozenset({"norm_output", "norm_before_residual"})])
def test_both_depths_are_the_pages(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str]
) -> None:
    head = Head(flags=flags)
    seen = compared_states(target, write_head(tmp_path / "head", head), monkeypatch)
    plain = make_model(TARGET)
    embed, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    first, second, *_ = seen
    for row in (1, 2, 11, 28):
        states = states_of(plain, TEXT[:row])
        expected, _ = reference(head, tensors_of(head), states, embed, output, TEXT[:row], TEXT[row : row + 2])
        torch.testing.assert_close(first[row - 1], expected[0], rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(second[row - 1], expected[1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("form", [Drafter(), Drafter(container="speculators", from_anchor=True)])
def test_both_places_of_a_block_are_the_pages(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Drafter
) -> None:
    seen = compared_states(target, write_drafter(tmp_path / "drafter", form), monkeypatch)
    plain = make_model(TARGET)
    embed = plain.get_input_embeddings().weight
    for row in (0, 6, 18, 24):  # of several groups of blocks
        root = 1 + row
        expected = places(form, tensors_of_drafter(form), states_of(plain, TEXT[:root]), embed, TEXT[root])
        for place in range(2):
            torch.testing.assert_close(seen[place][row], expected[place], rtol=2e-4, atol=2e-5)


def test_a_place_of_a_block_is_compared_with_the_targets_of_its_place(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(target, write_drafter(tmp_path / "drafter", Drafter()), draft_check=False) as engine:
        draft = engine.draft_model
        assert draft is not None
        asked: list[Wanted] = []

        def compared(_: CausalModel, hidden: Tensor, wanted: Wanted, _latent: Tensor | None) -> Guessed:
            asked.append(wanted)
            return guessed(torch.ones(len(hidden)) > 0)

        monkeypatch.setattr(teacher_forcing, "_compared", compared)
        after = torch.arange(len(TEXT))[:, None]
        agreement._guesses(draft, torch.tensor(TEXT), torch.zeros(len(TEXT), 32), Wanted(tokens=after, p=after))
    roots = torch.arange(1, len(TEXT) - 1)
    assert torch.equal(asked[0].tokens[:, 0], roots)
    assert torch.equal(asked[1].tokens[:, 0], roots + 1)


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_a_layer_that_reads_its_inputs_the_other_way_round_is_found(is_exchanged: bool, tmp_path: Path) -> None:
    """The layer hands on a token's embedding, which the target's next token follows; or what lies in its place."""
    folder, _ = write_mtp_target(tmp_path / "target", "glm4_moe", share=0.01)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("eh_proj.weight"))
    if is_exchanged:
        tensors[name] = torch.cat(tensors[name].chunk(2, 1)[::-1], 1).contiguous()
        save_file(tensors, path)
    pair = open_pair(folder, MTP)
    with Engine.from_pair(pair, context_tokens=320, dtype="float32", self_check=False, tree=TreeSettings()) as engine:
        found = engine.draft_check
    assert found.comparison.best.first > 0.8
    assert found.comparison.reading == (Reading(swaps_inputs=True) if is_exchanged else AS_STATED)
    assert ("reads the feature before the embedding" in found.in_words) == is_exchanged


@pytest.mark.parametrize("reading", [AS_STATED, Reading(before_norm=True), Reading(flips_output=True)])
def test_a_layer_is_compared_as_the_page_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reading: Reading
) -> None:
    """Its features are the target's last states, before the norm or after it, and both depths are the page's."""
    folder, plain = write_mtp_target(tmp_path / "target", "deepseek_v3")
    features: list[tuple[bool, Tensor]] = []
    seen: list[Tensor] = []
    right, right_compared = agreement._guesses, teacher_forcing._compared

    def guesses(draft: CausalModel, ids: Tensor, own: Tensor, wanted: Wanted, **named: int) -> Guesses:
        features.append((aux_states_of(draft.model) is None, own))
        return right(draft, ids, own, wanted, **named)

    def compared(draft: CausalModel, hidden: Tensor, *more: Any) -> Guessed:
        seen.append(hidden)
        return right_compared(draft, hidden, *more)

    monkeypatch.setattr(agreement, "_guesses", guesses)
    monkeypatch.setattr(agreement, "_shifted", lambda features, _: features)
    pair = open_pair(folder, MTP)
    with Engine.from_pair(pair, context_tokens=128, dtype="float32", self_check=False, draft_check=False) as engine:
        draft = engine.draft_model
        assert draft is not None
        compare_readings(engine.target_model, draft, torch.tensor(TEXT))
        for is_normed, own in features:
            expected = last_states(plain, is_normed=is_normed, input_ids=torch.tensor([TEXT]))
            torch.testing.assert_close(own, expected, rtol=2e-4, atol=2e-5)
        assert {is_normed for is_normed, _ in features} == {True, False}
        (own,) = (own for is_normed, own in features[:2] if is_normed != reading.before_norm)
        monkeypatch.setattr(teacher_forcing, "_compared", compared)
        with read_as(draft.model, reading, num_layers=int(plain.config.num_hidden_layers)):
            anything = torch.zeros(len(TEXT), 1)
            right(draft, torch.tensor(TEXT), own, Wanted(tokens=anything.long(), p=anything))
    first, second = seen
    for row in (1, 11, 28):
        outputs, _ = reference_of_layer(plain, TEXT[:row], TEXT[row : row + 2], reading)
        torch.testing.assert_close(first[row - 1], outputs[0], rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(second[row - 1], outputs[1], rtol=2e-4, atol=2e-5)


def state_of(draft: Any) -> tuple[Any, ...]:
    aux_states = aux_states_of(draft)
    layer = draft.model.layers[0]
    return aux_states.layers, (layer.norm_before_residual, layer.has_feature_first), is_recycled_before(draft)


def is_recycled_before(draft: Any) -> bool:
    """Whether what is recycled has not passed the norm."""
    return isinstance(draft.model.norm, torch.nn.Identity)


def guesses_of(first: float, second: float) -> Guesses:
    """Of 200 tokens, the first ones: those of a reading that agrees less are among those of one that agrees more."""
    one, other = map(guessed, [torch.arange(200) < 200 * share for share in (first, second)])
    return Guesses(first=one, second=other)


def guessed(hits: Tensor) -> Guessed:
    """What shares all with the target at these tokens, and nothing at the others."""
    return Guessed(hits=hits, shared=shared(hits.double()))


@pytest.mark.parametrize(
    ("good", "reading"),
    [
        ((AUX_LAYERS, (False, False), True), AS_STATED),
        (((3, 5, 6), (False, False), True), Reading(shift=1)),
        (((1, 3, 4), (False, False), True), Reading(shift=-1)),
        ((AUX_LAYERS, (True, False), True), Reading(flips_residual=True)),
        ((AUX_LAYERS, (False, True), True), Reading(swaps_inputs=True)),
        ((AUX_LAYERS, (False, False), False), Reading(flips_output=True)),
        (((3, 5, 6), (False, False), False), Reading(shift=1, flips_output=True)),
    ],
)
def test_the_reading_that_agrees_clearly_better_is_used_and_kept(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: tuple[Any, ...], reading: Reading
) -> None:
    """A head that agrees where all of it is right: the norm of what is recycled shows one token deeper alone."""
    calls = []

    def found_of(draft: CausalModel, *_: Any, late: int) -> Guesses:
        state = state_of(draft.model)
        calls.append(state)
        return guesses_of(0.7 if state[:2] == good[:2] else 0.05, 0.5 if state == good else 0.05)

    monkeypatch.setattr(agreement, "_guesses", found_of)
    folder = write_head(tmp_path / "head", Head())
    for is_new in (True, False):
        with open_engine(target, folder) as engine:
            found, draft = engine.draft_check, engine.draft_model
            assert (found.is_new, found.comparison.reading) == (is_new, reading)
            assert state_of(draft.model) == good
            assert engine.target_model._aux_states is aux_states_of(draft.model)
            assert ("the former is used" in found.in_words) == (reading != AS_STATED)
        assert len(calls) == (10 if reading == AS_STATED else 4 * 10)  # another one is tried on further texts
    with open_engine(target, folder, draft_check=False) as engine:
        assert engine.draft_check is None
        assert state_of(engine.draft_model.model) == (AUX_LAYERS, (False, False), True)


@torch.no_grad()
def test_what_is_accepted_is_what_both_share_of_the_targets_tokens() -> None:
    """A draft that knows two tokens: of the target's third nothing is accepted, nor does it agree where that leads."""
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    draft: Any = SimpleNamespace(vocab=2, logits=lambda hidden: hidden)
    tokens, p = torch.tensor([[1, 2, 0], [2, 0, 1]]), torch.tensor([[0.8, 0.15, 0.05], [0.5, 0.3, 0.2]])
    found = teacher_forcing._compared(draft, logits, Wanted(tokens=tokens, p=p))
    q = logits.softmax(-1)
    expected = [min(0.8, q[0, 1]) + min(0.05, q[0, 0]), min(0.3, q[1, 0]) + min(0.2, q[1, 1])]
    assert found.shared.accepted.tolist() == pytest.approx([float(share) for share in expected])
    alike = [(0.8 * q[0, 1]) ** 0.5 + (0.05 * q[0, 0]) ** 0.5, (0.3 * q[1, 0]) ** 0.5 + (0.2 * q[1, 1]) ** 0.5]
    assert found.shared.affinity.tolist() == pytest.approx([float(share) for share in alike])
    assert found.hits.tolist() == [True, False]


@pytest.mark.parametrize("at_second", [True, False])
@pytest.mark.parametrize("form", [Head(), Drafter(), Drafter(block=2)])
def test_positions_that_are_off_by_one_are_named_where_both_depths_say_so(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Head | Drafter, at_second: bool
) -> None:
    """A draft that agrees with features of a token later; a later feature alone helps at one depth.

    A block of one place has one depth alone, which both shares are of.
    """
    right: dict[int, Tensor] = {}

    def found_of(draft: CausalModel, ids: Tensor, features: Tensor, wanted: Wanted, *, late: int) -> Guesses:
        stated = right.setdefault(int(ids.sum()), features)  # of each text, which come first
        is_later = torch.equal(features[:-1], stated[1:])
        return guesses_of(0.6 if is_later else 0.3, 0.5 if is_later and at_second else 0.2)

    monkeypatch.setattr(agreement, "_guesses", found_of)
    with open_engine(target, write_draft(tmp_path / "draft", form)) as engine:
        found = engine.draft_check
    assert found.comparison.reading == AS_STATED
    misplaced = found.comparison.misplaced
    assert misplaced is None or (misplaced.what, misplaced.later) == ("features", 1)
    is_named = at_second and form != Drafter(block=2)
    assert (misplaced is not None) == is_named
    assert ("features of a token later it would be" in found.in_words) == is_named
    assert ("positions are off by one" in found.in_words) == is_named
    assert ("60% of the next tokens" in found.in_words) == is_named


@pytest.mark.parametrize(
    ("gains", "is_named"),
    [((0.006, 0.006), True), ((0.004, 0.004), False), ((0.05, 0.04), True), ((0.04, 0.05), False)],
)
def test_features_of_a_token_later_are_named_where_both_depths_pay_and_the_nearest_token_gains_most(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gains: tuple[float, float], is_named: bool
) -> None:
    """Each depth is surely better: by less than anybody would notice of it alone, or as what a later feature knows."""
    right: dict[int, Tensor] = {}

    def found_of(draft: CausalModel, ids: Tensor, features: Tensor, wanted: Wanted, *, late: int) -> Guesses:
        stated = right.setdefault(int(ids.sum()), features)  # of each text, which come first
        is_later = torch.equal(features[:-1], stated[1:])
        shares = [shared(torch.full((200,), 0.5 + gain * is_later).double()) for gain in gains]
        first, second = (Guessed(hits=torch.ones(200) > 0, shared=share) for share in shares)
        return Guesses(first=first, second=second)

    monkeypatch.setattr(agreement, "_guesses", found_of)
    with open_engine(target, write_drafter(tmp_path / "drafter", Drafter())) as engine:
        assert (engine.draft_check.comparison.misplaced is not None) == is_named


@pytest.mark.parametrize("later", [1, -1])
@pytest.mark.parametrize("is_block", [True, False])
def test_drafted_rows_that_are_a_position_off_are_named(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int, is_block: bool
) -> None:
    def found_of(*_: Any, late: int) -> Guesses:
        return guesses_of(0.6 if late == later and is_block else 0.4, 0.5 if late == later else 0.3)

    monkeypatch.setattr(agreement, "_guesses", found_of)
    with open_engine(target, write_draft(tmp_path / "d", Drafter() if is_block else Head())) as engine:
        found = engine.draft_check
    assert (found.comparison.misplaced.what, found.comparison.misplaced.later) == ("rows", later)
    side = "later" if later > 0 else "earlier"
    assert f"with what it drafts placed a token {side} it would be for {60 if is_block else 40}%" in found.in_words
    assert found.is_worth_saying


@pytest.mark.parametrize("form", [Head(), Drafter()])
def test_rows_that_are_drafted_late_are_read_late_and_the_texts_are_not(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Head | Drafter
) -> None:
    """A head's children, and a block, stand so many positions later; the rows of the text stay."""
    draft = write_draft(tmp_path / "draft", form)
    seen: list[Tensor] = []
    right = CausalModel.read

    def read(self: CausalModel, rows: Any, *more: Any) -> Any:
        seen.extend(one.positions for one in rows)
        return right(self, rows, *more)

    with open_engine(target, draft, draft_check=False) as engine:
        model = engine.draft_model
        assert model is not None
        monkeypatch.setattr(CausalModel, "read", read)
        nothing = torch.zeros(len(TEXT), 1)
        features = torch.zeros(len(TEXT), 32)
        for late in (0, 2):
            agreement._guesses(model, torch.tensor(TEXT), features, Wanted(tokens=nothing.long(), p=nothing), late=late)
    straight, moved = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert torch.equal(straight[0], moved[0])  # the text's own rows
    for stated, found in zip(straight[1:], moved[1:], strict=True):
        assert torch.equal(stated[: len(TEXT)], found[: len(TEXT)])
        assert torch.equal(stated[len(TEXT) :] + 2, found[len(TEXT) :])


SOME = {"owns_ends": True, "draft_vocab": 100}


@pytest.mark.parametrize(
    "form",
    [
        *(Drafter(container="speculators", markov=markov, from_anchor=anchor, **SOME)
          for markov in ("vanilla", "gated", "rnn") for anchor in (True, False)),
        Drafter(container="speculators", selector=True, owns_ends=True),
    ],
)  # fmt: skip
def test_both_places_of_a_block_that_reads_tokens_are_the_pages(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Drafter
) -> None:
    """Each is guessed after the text's own tokens before it."""
    seen: list[Tensor] = []
    right = teacher_forcing._compared

    def compared(draft: CausalModel, hidden: Tensor, wanted: Wanted, by_path: Any) -> Guessed:
        seen.append(by_path(slice(None), draft.logits(hidden)))
        return right(draft, hidden, wanted, by_path)

    monkeypatch.setattr(teacher_forcing, "_compared", compared)
    with open_engine(target, write_drafter(tmp_path / "drafter", form), draft_check=False) as engine:
        assert engine.draft_model is not None
        compare_readings(engine.target_model, engine.draft_model, torch.tensor(TEXT))
    plain, tensors = make_model(TARGET), tensors_of_drafter(form)
    embed = plain.get_input_embeddings().weight
    for row in (0, 6, 18, 24):
        root = 1 + row
        hidden = places(form, tensors, states_of(plain, TEXT[:root]), embed, TEXT[root])
        for place in range(2):
            head, path = tensors["lm_head.weight"], TEXT[root : root + 1 + place]
            expected = (
                selected(tensors, hidden[place], hidden[place] @ head.T, path[-1])
                if form.selector
                else after(form, tensors, hidden, head, path)
            )
            torch.testing.assert_close(seen[place][row], expected[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("markov", "states_it"), [(None, True), ("gated", False)])
def test_a_block_whose_first_row_guesses_the_other_way_is_read_so_and_texts_stay(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, markov: str | None, states_it: bool
) -> None:
    """What the check found is what drafts: the marginals of the place that it found are those of the first token."""
    right, tried = agreement._guesses, set[tuple[int, int]]()

    def found_of(draft: CausalModel, *more: Any, late: int) -> Guesses:
        first = draft.model.block.first_slot
        if (first, late) not in tried:  # each can be measured, and one text says so
            right(draft, *more, late=late)
            tried.add((first, late))
        agrees = first == (1 if states_it else 0)
        return guesses_of(0.6 if agrees else 0.2, 0.4 if agrees else 0.1)

    monkeypatch.setattr(agreement, "_guesses", found_of)
    form = Drafter(container="speculators", markov=markov, from_anchor=states_it)
    folder = write_drafter(tmp_path / "drafter", form)
    texts = []
    for draft in (folder, None):
        pair = open_pair(target, draft)
        tree = TreeSettings(size=12) if draft else TreeSettings(policy="none")
        with Engine.from_pair(pair, context_tokens=128, dtype="float32", self_check=False, tree=tree) as engine:
            texts.append(engine.generate(TEXT, max_new_tokens=12, seed=1, ignore_eos=True).token_ids)
            if draft is None:
                continue
            found, model = engine.draft_check, engine.draft_model
            assert model is not None
            assert found.comparison.reading == Reading(flips_anchor=True)
            assert "sample_from_anchor is the other way round" in found.in_words
            looked = Target(engine.target_model)
            drafter = open_drafter(model, looked, sampling=DraftSampling(temperature=1.0))
            looked.prefill(torch.tensor(TEXT))
            drafter.begin(TEXT)
            q = drafter.expand(torch.tensor([7]), torch.tensor([-1]))
    assert texts[0] == texts[1]
    plain, tensors = make_model(TARGET), tensors_of_drafter(form)
    embed, output = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    other = replace(form, from_anchor=not states_it)
    hidden = places(other, tensors, states_of(plain, TEXT), embed, 7)
    logits = hidden[:1] @ output.T if markov is None else after(other, tensors, hidden, output, [7])
    torch.testing.assert_close(q, logits.softmax(-1), rtol=1e-3, atol=1e-6)


def test_the_checks_text_is_the_beginnings_of_several_files() -> None:
    """What a reading gains differs from file to file, so that one file's tokens are no sample."""
    pair = open_pair(DEMO_FOLDER / "target", DEMO_FOLDER / "draft")
    ids, *further = draft_check._texts(pair, most=256)
    assert [len(one) for one in (ids, *further)] == [256, 256, 253, 130]  # as far as the files go
    text = pair.tokenizer.decode(ids)
    lines = (DEMO_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert all(prompt[:40] in text for prompt in prompts)


@pytest.mark.parametrize(
    ("gain_of_further", "reading"), [(0.02, Reading(shift=1)), (0.002, AS_STATED), (-0.02, AS_STATED)]
)
def test_what_one_text_alone_says_changes_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain_of_further: float, reading: Reading
) -> None:
    """Another reading that is surely better on the first text has to be so on further ones, too."""
    texts: list[int] = []

    def found_of(draft: CausalModel, ids: Tensor, *_: Any, late: int) -> Guesses:
        key = int(ids.sum())
        texts.extend([key] if key not in texts else [])
        gain = 0.02 if key == texts[0] else gain_of_further
        noise = torch.randn(256, generator=torch.Generator().manual_seed(key), dtype=torch.float64) * 0.02
        is_other = state_of(draft.model)[0] == (3, 5, 6)
        one = shared(0.5 + (gain / 2 + noise) * is_other)
        return Guesses(
            first=Guessed(hits=torch.ones(256) > 0, shared=one), second=Guessed(hits=torch.ones(256) > 0, shared=one)
        )

    monkeypatch.setattr(agreement, "_guesses", found_of)
    with open_engine(target, write_head(tmp_path / "head", Head())) as engine:
        assert engine.draft_check.comparison.reading == reading
    assert len(texts) > 1


@pytest.mark.parametrize("from_anchor", [True, False])
def test_a_block_that_guesses_nothing_the_other_way_round_is_read_as_stated(
    target: Path, tmp_path: Path, from_anchor: bool
) -> None:
    form = Drafter(container="speculators", from_anchor=from_anchor, block=1 if from_anchor else 2)
    with open_engine(target, write_drafter(tmp_path / "drafter", form)) as engine:
        assert not engine.draft_check.comparison.reading.flips_anchor
        flips = [one for one in readings_of(engine.draft_model.model, num_layers=8) if one.flips_anchor]
        assert bool(flips) != from_anchor


def test_little_more_agreement_changes_nothing_and_a_poor_head_is_named(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found_of(draft: CausalModel, *_: Any, late: int) -> Guesses:
        share = 0.14 if state_of(draft.model)[1][0] else 0.1
        return guesses_of(share, share)

    monkeypatch.setattr(agreement, "_guesses", found_of)
    with open_engine(target, write_head(tmp_path / "head", Head())) as engine:
        assert engine.draft_check.comparison.reading == AS_STATED
        assert "10% of the next tokens" in engine.draft_check.in_words
        assert "edgespec_taps" in engine.draft_check.in_words


def test_what_was_kept_by_another_version_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    one = Agreement(first=0.5, second=0.25)
    for misplaced in (None, Misplaced(what="rows", later=-1, agreement=one)):
        reading = Reading(shift=1, before_norm=True, flips_anchor=True)
        found = Comparison(stated=one, best=one, reading=reading, misplaced=misplaced)
        draft_check._write_cached(path, found)
        assert draft_check._read_cached(path) == found
    for content in ("{}", "no JSON", '{"format": 4}', '{"format": 5, "stated": {}}'):
        path.write_text(content)
        assert draft_check._read_cached(path) is None
