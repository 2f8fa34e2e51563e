"""Drafts of prompts with pictures: a copy sees what its target sees, heads get its rows, others read words alone."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("PIL")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4", reason="a newer transformers has them")

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.config import DraftSampling
from edgespec.draft.feature_head import open_drafter
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.hub.names import MTP
from edgespec.model.causal_model import CausalModel
from edgespec.model.picture_prompt import PicturePrompt
from edgespec.model.seeing import see
from edgespec.model.target import Target
from edgespec.text.request import TextOptions
from tests.support.tiny_pictures import NEW, SEEING, Family, add_predicting_layer, generated, seeing_prompt

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


def test_a_head_gets_the_targets_rows_and_its_positions(
    with_layer: tuple[Family, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, folder = with_layer
    prompt = seeing_prompt(of, (1, 2))
    tree = TreeSettings(policy="chain", draw="chosen", draft_tokens=3, lookup=False)
    embedded: list[Tensor] = []
    shifts = set()

    def read(model: CausalModel, parts: Any) -> Any:
        if hasattr(model.model, "fuse"):
            for part in parts:
                assert part.seen is not None
                assert bool((part.ids >= 0).all())
                if part.seen.embedded is not None:
                    embedded.append(part.seen.embedded)
                else:
                    shifts.add(int((part.seen.rotated[0] - part.row_positions).unique()))
        return before(model, parts)

    before = CausalModel.read
    with Engine.from_pretrained(
        folder, draft=MTP, device="cpu", dtype="float32", context_tokens=256, tree=tree, draft_check=False,
        limits=MemoryLimits(max_resident_layers=0),
    ) as engine:  # fmt: skip
        monkeypatch.setattr(CausalModel, "read", read)
        found = engine.generate(prompt, **GREEDY)
    assert list(found.token_ids) == generated(of, prompt)
    seen = see(of.model, prompt)
    torch.testing.assert_close(torch.cat(embedded), seen.embedded, rtol=1e-5, atol=1e-6)
    assert shifts == {seen.shift}
