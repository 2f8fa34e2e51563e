"""Drafts of prompts with pictures: a copy sees what its target sees, heads get its rows, others read words alone."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("PIL")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4", reason="a newer transformers has them")

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.config import DraftSampling
from edgespec.draft.eagle3_network import Eagle3Fuse
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.head_network import Fuse
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.hub.names import MTP
from edgespec.model.causal_model import CausalModel
from edgespec.model.pass_rows import PassRows
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seeing import see
from edgespec.model.target import Target
from edgespec.text.request import TextOptions
from tests.edgespec.draft.contract import write_feature_head
from tests.edgespec.draft.dflash_drafter import Drafter, write_drafter
from tests.edgespec.draft.eagle3_head import Head, write_head
from tests.edgespec.draft.gemma_assistant import Assistant, write_assistant
from tests.support.tiny_pictures import (
    NEW,
    SEEING,
    Family,
    add_predicting_layer,
    gemma4_of,
    generated,
    image_token_id,
    seeing_prompt,
)

CPU = torch.device("cpu")
ROOT = torch.tensor([-1])
GREEDY: TextOptions = {"max_new_tokens": NEW, "temperature": 0.0, "eos_token_id": []}


def drafted(family: Family, prompt: PicturePrompt, *, is_copy: bool) -> tuple[LanguageModelDrafter, Tensor, Tensor]:
    """A drafter of the target's own weights, what it says behind a prompt and a token, and what the target says."""
    models = [CausalModel(copy.deepcopy(family.model), device=CPU) for _ in range(2)]
    target = Target(models[0])
    target.seen = see(family.model, prompt)
    sampling = DraftSampling(temperature=1.0)
    drafter = open_drafter(models[1], target, sampling=sampling, is_copy=is_copy)
    target.begin([*prompt.ids, 40, 50])
    (hidden,) = target.read([target.text_rows(target.num_unread)])
    drafter.begin([*prompt.ids, 40])
    return drafter, drafter.expand(torch.tensor([50]), ROOT)[0], target.logits(hidden[-1:])[0].softmax(-1)


@pytest.mark.parametrize("family", SEEING)
def test_a_copy_says_behind_pictures_what_its_target_says(family: str) -> None:
    of = SEEING[family]()
    drafter, q, p = drafted(of, seeing_prompt(of, (1, 2)), is_copy=True)
    torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-5)
    below = drafter.expand(torch.tensor([60, 61]), torch.tensor([0, 0]))
    assert below.shape[0] == 2, "rows of its tree are shifted with it"


def test_a_copys_rows_of_another_picture_are_not_kept() -> None:
    of = SEEING["smolvlm"]()
    drafter, _, _ = drafted(of, seeing_prompt(of, (1, 2)), is_copy=True)
    other = seeing_prompt(of, (3, 2))
    drafter.seen = see(of.model, other)
    drafter.begin(other.ids)
    assert len(drafter.cache.ids) == other.image_rows[0][0]


def test_another_draft_reads_words_alone() -> None:
    of = SEEING["smolvlm"]()
    prompt = seeing_prompt(of, (1, 2))
    drafter, q, p = drafted(of, prompt, is_copy=False)
    words = [token for token in prompt.ids if token != of.model.config.image_token_id]
    assert list(drafter.cache.ids) == [*words, 40]
    assert float((q - p).abs().max()) > 1e-3


@pytest.fixture
def with_layer(tmp_path: Path) -> tuple[Family, Path]:
    """Qwen 3.5 with pictures, whose files have a layer that predicts several tokens."""
    of, folder = SEEING["qwen3_5"](), tmp_path / "model"
    of.model.save_pretrained(folder)
    of.processor.tokenizer.save_pretrained(folder)
    add_predicting_layer(folder, of)
    return of, folder


@contextmanager
def rows_of_drafts(folder: Path, draft: Path | str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Any]]:
    """An engine with a head, and the rows of the head's passes."""
    read_rows: list[PassRows] = []
    before = CausalModel.read

    def read(model: CausalModel, parts: Any) -> Any:
        if hasattr(model.model, "fuse"):
            read_rows.extend(replace(part, positions=part.positions.clone()) for part in parts)
        return before(model, parts)

    tree = TreeSettings(policy="chain", draw="chosen", draft_tokens=3, lookup=False)
    with Engine.from_pretrained(
        folder, draft=draft, device="cpu", dtype="float32", context_tokens=256, tree=tree, draft_check=False,
        self_check=False, limits=MemoryLimits(max_resident_layers=0),
    ) as engine:  # fmt: skip
        monkeypatch.setattr(CausalModel, "read", read)
        yield engine, read_rows


def check_positions(read_rows: list[PassRows], seen: Any) -> None:
    """Rows of the prompt have its positions, and those behind it are shifted."""
    of_prompt = []
    for part in read_rows:
        assert bool((part.ids >= 0).all())
        rotated = part.seen.rotated
        is_behind = part.row_positions >= seen.num_rows
        assert bool((rotated[:, is_behind] == part.row_positions[is_behind] + seen.shift).all())
        of_prompt.append(rotated[:, ~is_behind])
    assert torch.equal(torch.cat(of_prompt, 1)[:, : seen.num_rows], seen.rotated)


def test_a_head_gets_the_targets_rows_and_its_positions(
    with_layer: tuple[Family, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, folder = with_layer
    prompt = seeing_prompt(of, (1, 2))
    with rows_of_drafts(folder, MTP, monkeypatch) as (engine, read_rows):
        found = engine.generate(prompt, **GREEDY)
    assert list(found.token_ids) == generated(of, prompt)
    seen = see(of.model, prompt)
    embedded = [part.seen.embedded for part in read_rows if part.seen.embedded is not None]
    torch.testing.assert_close(torch.cat(embedded), seen.embedded, rtol=1e-5, atol=1e-6)
    check_positions(read_rows, seen)


def saved(of: Family, folder: Path) -> Path:
    """The family's folder."""
    of.model.save_pretrained(folder)
    of.processor.tokenizer.save_pretrained(folder)
    return folder


def embeddings_taken_by(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What heads' modules of this kind take beside features from now on, call by call."""
    taken: list[Tensor] = []
    forward = kind.forward

    def fuse(module: nn.Module, embedded: Tensor, previous: Tensor) -> Tensor:
        taken.append(embedded)
        found: Tensor = forward(module, embedded, previous)
        return found

    monkeypatch.setattr(kind, "forward", fuse)
    return taken


def state_axes(draft: Path, **named: Any) -> None:
    """Let a draft's config state a rotation of several axes."""
    config = json.loads((draft / "config.json").read_text())
    config["rope_scaling"] = {"mrope_section": [2, 2, 2], **named}
    (draft / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("family", "owns_table", "rotation"),
    [("gemma3", False, None), ("smolvlm", True, None), ("qwen3_vl", False, "mrope"), ("qwen2_5_vl", True, "default")],
)
def test_an_eagle3_head_embeds_words_itself_and_gets_pictures_of_the_target(
    family: str, owns_table: bool, rotation: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = SEEING[family]()
    vocab, prompt = int(of.model.config.get_text_config().vocab_size), seeing_prompt(of, (1, 2))
    form = Head(width=64, target_width=64, vocab=vocab, layers=(0, 2, 4), read=(0, 2, 4), owns_embedding=owns_table)
    draft = write_head(tmp_path / "head", form)
    if rotation is not None:
        state_axes(draft, type=rotation)
    fused = embeddings_taken_by(Eagle3Fuse, monkeypatch)
    with rows_of_drafts(saved(of, tmp_path / "model"), draft, monkeypatch) as (engine, read_rows):
        table = engine._loaded.draft.model.get_input_embeddings().weight.clone()
        assert list(engine.generate(prompt, **GREEDY).token_ids) == generated(of, prompt)
    seen, ids = see(of.model, prompt), torch.tensor(prompt.ids)
    is_picture = (ids == image_token_id(of.model.config))[:, None]
    torch.testing.assert_close(torch.cat(fused)[: len(ids)], torch.where(is_picture, seen.embedded, table[ids]))
    if rotation is not None:
        check_positions(read_rows, seen)


@pytest.mark.parametrize("family", ["smolvlm", "gemma3"])
def test_a_head_of_ours_gets_pictures_of_the_target(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = SEEING[family]()
    prompt, folder = seeing_prompt(of, (1, 2)), saved(of, tmp_path / "model")
    fused = embeddings_taken_by(Fuse, monkeypatch)
    with rows_of_drafts(folder, write_feature_head(tmp_path / "head", folder), monkeypatch) as (engine, _):
        fused.clear()
        assert list(engine.generate(prompt, **GREEDY).token_ids) == generated(of, prompt)
    expected = see(of.model, prompt).embedded
    torch.testing.assert_close(torch.cat(fused)[: len(prompt.ids)], expected, rtol=1e-5, atol=1e-6)


def test_a_head_of_another_width_embeds_all_rows_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = SEEING["smolvlm"]()
    vocab, prompt = int(of.model.config.text_config.vocab_size), seeing_prompt(of, (1, 2))
    form = Head(target_width=64, vocab=vocab, layers=(0, 2, 4), read=(0, 2, 4), owns_embedding=True)
    draft = write_head(tmp_path / "head", form)
    with rows_of_drafts(saved(of, tmp_path / "model"), draft, monkeypatch) as (engine, read_rows):
        assert list(engine.generate(prompt, **GREEDY).token_ids) == generated(of, prompt)
    assert read_rows


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_a_block_drafters_rows_rotate_as_the_targets(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = SEEING["qwen3_vl"]()
    vocab, prompt = int(of.model.config.text_config.vocab_size), seeing_prompt(of, (1, 2))
    form = Drafter(
        width=64, vocab=vocab, draft_vocab=vocab, ids=(0, 1, 3), read=(1, 2, 4), keys=(("num_target_layers", 4),),
        markov="vanilla" if kind == "dspark" else None, selector=kind == "dflash2",
    )  # fmt: skip
    draft = write_drafter(tmp_path / "drafter", form)
    state_axes(draft, rope_type="default", mrope_interleaved=True)
    with rows_of_drafts(saved(of, tmp_path / "model"), draft, monkeypatch) as (engine, read_rows):
        assert list(engine.generate(prompt, **GREEDY).token_ids) == generated(of, prompt)
    check_positions(read_rows, see(of.model, prompt))


def test_an_assistant_reads_the_targets_keys_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = gemma4_of(head_dim=8, global_head_dim=24)
    vocab, prompt = int(of.model.config.text_config.vocab_size), seeing_prompt(of, (1, 2))
    draft = write_assistant(tmp_path / "assistant", Assistant(target_width=64, vocab=vocab, window=24))
    with rows_of_drafts(saved(of, tmp_path / "model"), draft, monkeypatch) as (engine, read_rows):
        assert list(engine.generate(prompt, **GREEDY).token_ids) == generated(of, prompt)
    (first, *_) = read_rows
    assert first.lent["full_attention"].keys.shape[2] == len(prompt.ids)
