"""Gemma 4 assistants in GGUF files draft what those of their folders do, by a whole head in any case."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec import EdgespecError
from edgespec.pair.pair import open_pair
from tests.conftest import FAMILIES, make_model, save_folder
from tests.edgespec.draft.contract import GEMMAS_4, open_engine
from tests.edgespec.draft.gemma_assistant import (
    Assistant,
    tensors_of,
    write_as_gguf,
    write_assistant,
)
from tests.edgespec.draft.gguf_drafts import BOUND, KINDS
from tests.edgespec.draft.test_gguf_drafts import numbers, packed
from tests.edgespec.draft.test_mtp import first_guess

FORM = Assistant()
WIDE = Assistant(width=256)  # of which blocks of any type fit rows
ARCH = "gemma4-assistant"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("gguf") / "target", make_model(FAMILIES["gemma4"]()))


def guess(target: Path, draft: Path) -> Tensor:
    with open_engine(target, draft) as engine:
        return first_guess(engine)


@pytest.mark.parametrize("family", GEMMAS_4)
def test_an_assistant_of_a_file_guesses_as_that_of_its_folder_by_bits(family: str, tmp_path: Path) -> None:
    target = save_folder(tmp_path / "target", make_model(FAMILIES[family]()))
    found = guess(target, write_as_gguf(tmp_path / "draft.gguf", FORM))
    assert torch.equal(found, guess(target, write_assistant(tmp_path / "draft", FORM)))


def test_a_file_of_an_ordered_head_has_the_whole_one(tmp_path: Path) -> None:
    """The converter leaves the groups out."""
    form = Assistant(vocab=264, centroids=24, computed=5)
    config = FAMILIES["gemma4"]()
    config.vocab_size = form.vocab
    target = save_folder(tmp_path / "target", make_model(config))
    whole = {name: one for name, one in tensors_of(form).items() if "masked_embedding" not in name}
    folder = write_assistant(tmp_path / "whole", Assistant(vocab=264), tensors=whole)
    found = guess(target, write_as_gguf(tmp_path / "draft.gguf", form))
    assert torch.equal(found, guess(target, folder))
    assert not torch.equal(found, guess(target, write_assistant(tmp_path / "ordered", form)))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_assistant_in_blocks_is_multiplied_so_and_guesses_as_its_numbers(
    kind: str, target: Path, tmp_path: Path
) -> None:
    path = write_as_gguf(tmp_path / "blocks.gguf", WIDE, pack=partial(packed, kind=kind))
    plain = write_as_gguf(tmp_path / "plain.gguf", WIDE, change=partial(numbers, kind=kind))
    draft = open_pair(target, path).draft
    assert draft is not None
    assert any(name.endswith(f"q_proj.gguf_{kind.lower()}") for name in draft.checkpoint.tensors)
    torch.testing.assert_close(guess(target, path), guess(target, plain), **BOUND)


def test_the_head_and_the_projections_may_be_in_blocks_too(target: Path, tmp_path: Path) -> None:
    def in_blocks(name: str, tensor: Tensor) -> tuple[int, bytes] | None:
        return packed(f"blk.{name}", tensor, kind="Q8_0") if name.startswith(("token_embd", "nextn")) else None

    def as_numbers(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if not name.startswith(("token_embd", "nextn")):
            return name, tensor
        return name, numbers(f"blk.{name}", tensor, kind="Q8_0")[1]

    path = write_as_gguf(tmp_path / "blocks.gguf", WIDE, pack=in_blocks)
    plain = write_as_gguf(tmp_path / "plain.gguf", WIDE, change=as_numbers)
    torch.testing.assert_close(guess(target, path), guess(target, plain), **BOUND)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keys of its own": ({f"{ARCH}.attention.shared_kv_layers": 1}, r"shared_kv_layers = 1 of 3 layers"),
    "layers of another model": ({f"{ARCH}.nextn_predict_layers": 1}, r"nextn_predict_layers = 1 of 3 layers"),
    "no width of its target": ({f"{ARCH}.embedding_length_out": None}, r"lacks the setting .*embedding_length_out"),
    "another target's width": ({f"{ARCH}.embedding_length_out": 48}, "hidden states of 48 numbers"),
    "no window": ({f"{ARCH}.attention.sliding_window": None}, "lacks the setting .*sliding_window"),
    "inputs of layers": ({f"{ARCH}.embedding_length_per_layer_input": 8}, "hidden_size_per_layer_input = 8"),
    "another base": (
        {f"{ARCH}.rope.freq_base_swa": 1e6}, "sliding_attention heads by rope_theta = 1000000.0, .* rotated by 10000.0",
    ),
    "another base where all is seen": ({f"{ARCH}.rope.freq_base": 1e4}, "full_attention heads by rope_theta = 10000.0"),
    "a fork's": ({"general.architecture": "gemma4_assistant"}, "is of the architecture 'gemma4_assistant'"),
    "what is not known": ({f"{ARCH}.centroid_count": 2048}, r"states gemma4-assistant\.centroid_count = 2048"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, target: Path, tmp_path: Path) -> None:
    settings, said = REFUSED[case]
    path = write_as_gguf(tmp_path / "draft.gguf", FORM, settings=settings)
    with pytest.raises(EdgespecError, match=said):
        open_pair(target, path)
