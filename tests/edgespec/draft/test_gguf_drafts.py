"""EAGLE-3 heads, DFlash, DSpark and DFlash2 drafters and assistants in GGUF files draft what those of folders do.

`gguf_drafts.py` writes what llama.cpp's converter writes of these folders: both were compared, tensors and settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from edgespec import EdgespecError
from edgespec.pair.drafts import open_draft, planned_draft
from edgespec.pair.folder import open_model
from edgespec.pair.pair import open_pair
from offload.formats.gguf_blocks import TYPES
from offload.gguf.header import read_gguf
from offload.gguf.rotation import LLAMA3, _llama3_factors
from offload.packed_outside import PackedHead, PackedTable
from offload.unpacked_once import packed_outside
from tests.edgespec.draft import dflash_drafter, eagle3_head, gemma_assistant
from tests.edgespec.draft.contract import GEMMAS_4, open_engine
from tests.edgespec.draft.dflash_drafter import Drafter, write_drafter
from tests.edgespec.draft.eagle3_head import HEAD_DIM, Head, write_head
from tests.edgespec.draft.gemma_assistant import Assistant, write_assistant
from tests.edgespec.draft.gguf_drafts import BOUND, KINDS, check_is_multiplied, random_blocks, write_as_gguf
from tests.edgespec.draft.test_mtp import first_guess
from tests.offload.gguf.files import copy_gguf
from tests.support.families import FAMILIES, GROUPED, make_model, save_folder
from tests.support.plain_weights import weights_of

TARGET = LlamaConfig(**{**GROUPED, "num_hidden_layers": 8})
DSPARK = Drafter(markov="vanilla", from_anchor=True)
WIDTH = 256  # of rows that a block of any type fits
BASE = 1e7  # by which some frequencies of a head are scaled
CAUSAL = (("use_sliding_window", True), ("is_causal", True))
Draft = Head | Drafter | Assistant
FORMS: dict[str, Draft] = {
    "EAGLE-3": Head(),
    **{f"assistant of {family}": Assistant() for family in GEMMAS_4},
    "EAGLE-3, a norm before the residual and one before fc": Head(
        flags=frozenset({"norm_before_residual", "norm_before_fc"})
    ),
    "EAGLE-3, other layers": Head(layers=(1, 3, 6), read=(2, 4, 7)),  # which the first of them numbers
    "EAGLE-3, an embedding of its own": Head(owns_embedding=True),
    "EAGLE-3, all tokens": Head(draft_vocab=257),
    "DFlash": Drafter(),
    "DFlash, windows": Drafter(windows=(8, None, 8), keys=CAUSAL, causal=(True, True, True)),
    "DSpark": DSPARK,
    "DFlash2": Drafter(selector=True, windows=(8, 8, 8), keys=(("use_sliding_window", True), ("is_causal", False))),
    "DFlash2, scales": Drafter(
        selector=True,
        inner=(("input_embedding_scale", 3.0), ("output_multiplier", 0.5), ("final_logit_softcapping", 4.0)),
    ),
}


ASSISTANT = f"assistant of {GEMMAS_4[0]}"
OWN_EMBEDDING = "EAGLE-3, an embedding of its own"
UNREAD = {"conf_proj.weight"}
WIDE = Assistant(width=WIDTH)
ARCH = "gemma4-assistant"


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write the target of a form, or one whose rows a block of any type fits; assistants have their own widths."""

    @cache
    def target_of(form: str, *, is_wide: bool = False) -> Path:
        sizes = {"hidden_size": WIDTH} if is_wide else {}
        config = (
            FAMILIES[form.split()[-1]]() if form.startswith("assistant") else LlamaConfig(**TARGET.to_dict() | sizes)
        )
        return save_folder(tmp_path_factory.mktemp("gguf") / "target", make_model(config))

    return target_of


@pytest.fixture
def target(target_of: Callable[..., Path]) -> Path:
    return target_of("EAGLE-3")


def write_draft(folder: Path, form: Draft) -> Path:
    if isinstance(form, Assistant):
        return write_assistant(folder, form)
    return write_head(folder, form) if isinstance(form, Head) else write_drafter(folder, form)


def in_file(path: Path, form: Draft, folder: Path, **changed: Any) -> Path:
    """A folder's draft as a file."""
    if isinstance(form, Assistant):
        return gemma_assistant.write_as_gguf(path, form, **changed)
    return write_as_gguf(folder, path, **changed)


def guess(target: Path, draft: Path) -> Tensor:
    with open_engine(target, draft) as engine:
        return first_guess(engine)


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_of_a_file_guesses_as_that_of_its_folder_by_bits(
    form: str, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder, target = write_draft(tmp_path / "draft", FORMS[form]), target_of(form)
    found = guess(target, in_file(tmp_path / "draft.gguf", FORMS[form], folder))
    assert torch.equal(found, guess(target, folder))


def test_a_file_of_before_july_says_the_same(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "draft", Head(flags=frozenset({"norm_before_residual"})))
    path = write_as_gguf(
        folder, tmp_path / "old.gguf",
        settings={"eagle3.target_layers": None, "eagle3.extract_layers": [2, 4, 5]},
        change=lambda name, tensor: (name.replace("attn_norm_2", "hidden_norm"), tensor),
    )  # fmt: skip
    assert torch.equal(guess(target, path), guess(target, folder))


def test_a_head_whose_rotation_is_llama_3s_has_its_factors(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "draft", Head())
    path = folder / "config.json"
    scaling = {"rope_type": "llama3", "factor": 8.0, **LLAMA3, "original_max_position_embeddings": 8192}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_scaling": scaling, "rope_theta": BASE}))
    factors = torch.tensor(_llama3_factors(scaling, BASE, HEAD_DIM))
    further = [("rope_freqs.weight", (len(factors),), 0, factors.numpy().tobytes())]
    whole = copy_gguf(write_as_gguf(folder, tmp_path / "a.gguf"), tmp_path / "b.gguf", further=further)
    found = guess(target, whole)
    assert torch.equal(found, guess(target, folder))
    assert not torch.equal(found, guess(target, tmp_path / "a.gguf"))


def packed(name: str, tensor: Tensor, *, kind: str) -> tuple[int, bytes] | None:
    """Random blocks for the matrices that they fit."""
    if tensor.dim() < 2 or tensor.shape[-1] % TYPES[kind].weights or not name.endswith(".weight") or name in UNREAD:
        return None
    return TYPES[kind].number, random_blocks(kind, tensor.numel(), seed=len(name))[0]


def numbers(name: str, tensor: Tensor, *, kind: str) -> tuple[str, Tensor]:
    """The same as numbers."""
    is_packed = packed(name, tensor, kind=kind) is not None
    return name, random_blocks(kind, tensor.numel(), seed=len(name))[1].view(tensor.shape) if is_packed else tensor


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((OWN_EMBEDDING, kind) for kind in KINDS),
        *((form, kind) for form in ("DFlash2", "DSpark", "DFlash", ASSISTANT) for kind in ("Q8_0", "IQ2_S")),
    ],
)
def test_a_draft_in_blocks_is_multiplied_so_and_guesses_as_its_numbers(
    form: str, kind: str, target_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for written in (eagle3_head, dflash_drafter):
        monkeypatch.setattr(written, "INNER", WIDTH)
        monkeypatch.setattr(written, "HEAD_DIM", WIDTH // written.HEADS)
    monkeypatch.setattr(dflash_drafter, "RANK", WIDTH)
    monkeypatch.setitem(dflash_drafter.SELECTOR, "selector_rank", WIDTH)
    target, of_form = target_of(form, is_wide=True), FORMS[form]
    wide = replace(of_form, width=WIDTH, **({"target_width": WIDTH} if isinstance(of_form, Head) else {}))
    folder = write_draft(tmp_path / "draft", wide)
    path = in_file(tmp_path / "blocks.gguf", wide, folder, pack=partial(packed, kind=kind))
    plain = in_file(tmp_path / "plain.gguf", wide, folder, change=partial(numbers, kind=kind))
    written = sum(one.block.name == kind for one in read_gguf(path).tensors.values())
    with open_engine(target, path) as engine:
        assert engine.pair.draft is not None
        leaves = [name.rpartition(".")[2] for name in engine.pair.draft.checkpoint.tensors]
        assert leaves.count(f"gguf_{kind.lower()}") == written
        check_is_multiplied(engine)
        draft = engine.pair.draft
        outside = {type(one) for one in packed_outside(draft.skeleton(draft.checkpoint, dtype=torch.bfloat16))}
        assert form != OWN_EMBEDDING or outside == {PackedTable, PackedHead}  # of which some rows alone are unpacked
        found = first_guess(engine)
        weights = weights_of(engine.pair.draft)
    with open_engine(target, plain) as engine:
        assert engine.pair.draft is not None
        expected = weights_of(engine.pair.draft)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
        torch.testing.assert_close(found, first_guess(engine), **BOUND)


@pytest.mark.parametrize("form", ["EAGLE-3", "DFlash2", ASSISTANT])
def test_a_file_is_planned_as_it_is_opened_from_its_header_alone_too(
    form: str, target_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder, target = write_draft(tmp_path / "draft", FORMS[form]), open_model(target_of(form))
    path = in_file(tmp_path / "draft.gguf", FORMS[form], folder)
    tensors = open_draft(path, target).checkpoint.tensors
    _, planned = planned_draft(path, target)
    assert planned is not None
    assert planned.checkpoint.tensors == tensors
    path.write_bytes(path.read_bytes()[: min(entry.offset for entry in tensors.values())])
    with pytest.raises(EdgespecError, match="is truncated"):
        open_draft(path, target)
    if form == ASSISTANT:  # whose rotation lies among its tensors
        with pytest.raises(EdgespecError, match="is truncated"):
            planned_draft(path, target)
    else:
        _, planned = planned_draft(path, target)
        assert planned is not None
        assert planned.checkpoint.tensors == tensors


@pytest.mark.parametrize("quant", ["int8", "nf4"])
@pytest.mark.parametrize("form", ["EAGLE-3", "DFlash2"])
def test_a_draft_of_a_file_can_be_rounded_further(form: str, quant: str, target: Path, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", FORMS[form])
    found = []
    for draft in (write_as_gguf(folder, tmp_path / "draft.gguf"), folder):
        with open_engine(target, draft, draft_quant=quant) as engine:
            found.append(first_guess(engine))
    assert not torch.equal(found[0], guess(target, folder))
    torch.testing.assert_close(*found, atol=0.1, rtol=0.0)  # rows in turn are rounded in groups of their own


def relative(path: Path, out: Path) -> Path:
    """A file whose map has what is added, as folders have it."""

    def change(tensor: Any, content: bytes) -> tuple[str, bytes]:
        if tensor.name != "d2t":
            return tensor.name, content
        ids = torch.frombuffer(bytearray(content), dtype=torch.int64)
        return "d2t", (ids - torch.arange(len(ids))).numpy().tobytes()

    return copy_gguf(path, out, change=change)


def test_a_map_of_what_is_added_is_refused(target: Path, tmp_path: Path) -> None:
    path = write_as_gguf(write_head(tmp_path / "draft", Head()), tmp_path / "a.gguf")
    with pytest.raises(EdgespecError, match="leads out of the target's 257 tokens, or to one twice"):
        open_pair(target, relative(path, tmp_path / "b.gguf"))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no states": ("EAGLE-3", {"eagle3.target_layers": None}, r"states eagle3\.target_layers = None"),
    "no mask": ("DFlash", {"tokenizer.ggml.mask_token_id": None}, "mask_token_id = None"),
    "DeepSeek V4's": ("DSpark", {"dflash.hyper_connection.count": 4}, r"states dflash\.hyper_connection\.count = 4"),
    "a window of unknown layers": ("DFlash", {"dflash.attention.sliding_window": 8}, "sliding_window_pattern = None"),
    "another target's width": ("EAGLE-3", {"eagle3.target_hidden_size": 48}, "hidden states of 48 numbers"),
    "another target's tokens": ("EAGLE-3", {"eagle3.vocab_size": 5000}, "a vocabulary of 5000 tokens"),
    "a fork's": ("DFlash", {"general.architecture": "dflash-draft"}, "is of the architecture 'dflash-draft'"),
}
OF_ASSISTANTS: dict[str, tuple[dict[str, Any], str]] = {
    "keys of its own": ({f"{ARCH}.attention.shared_kv_layers": 1}, r"shared_kv_layers = 1 of 3 layers"),
    "layers of another model": ({f"{ARCH}.nextn_predict_layers": 1}, r"nextn_predict_layers = 1 of 3 layers"),
    "no width of its target": ({f"{ARCH}.embedding_length_out": None}, r"lacks the setting .*embedding_length_out"),
    "another width than the target's": ({f"{ARCH}.embedding_length_out": 48}, "hidden states of 48 numbers"),
    "no window": ({f"{ARCH}.attention.sliding_window": None}, "lacks the setting .*sliding_window"),
    "inputs of layers": ({f"{ARCH}.embedding_length_per_layer_input": 8}, "hidden_size_per_layer_input = 8"),
    "another base": (
        {f"{ARCH}.rope.freq_base_swa": 1e6}, "sliding_attention heads by rope_theta = 1000000.0, .* rotated by 10000.0",
    ),
    "another base where all is seen": ({f"{ARCH}.rope.freq_base": 1e4}, "full_attention heads by rope_theta = 10000.0"),
    "another fork's": ({"general.architecture": "gemma4_assistant"}, "is of the architecture 'gemma4_assistant'"),
    "what is not known": ({f"{ARCH}.centroid_count": 2048}, r"states gemma4-assistant\.centroid_count = 2048"),
}  # fmt: skip
REFUSED |= {case: (ASSISTANT, *found) for case, found in OF_ASSISTANTS.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_by_name(case: str, target_of: Callable[..., Path], tmp_path: Path) -> None:
    form, settings, said = REFUSED[case]
    folder = write_draft(tmp_path / "draft", FORMS[form])
    path = in_file(tmp_path / "draft.gguf", FORMS[form], folder, settings=settings)
    with pytest.raises(EdgespecError, match=said):
        open_pair(target_of(form), path)


def test_a_list_that_begins_with_1_is_in_doubt_as_a_folders(target: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "draft", replace(Head(), layers=(1, 3, 6), read=(2, 4, 7)))
    draft = open_pair(target, write_as_gguf(folder, tmp_path / "a.gguf")).draft
    assert draft is not None
    assert "after 2, 4, 7 layers" in draft.notes[0]


def test_a_file_of_an_ordered_head_has_the_whole_one(tmp_path: Path) -> None:
    """The converter leaves the groups out."""
    form = Assistant(vocab=264, centroids=24, computed=5)
    config = FAMILIES["gemma4"]()
    config.vocab_size = form.vocab
    target = save_folder(tmp_path / "target", make_model(config))
    whole = {name: one for name, one in gemma_assistant.tensors_of(form).items() if "masked_embedding" not in name}
    folder = write_assistant(tmp_path / "whole", Assistant(vocab=264), tensors=whole)
    found = guess(target, gemma_assistant.write_as_gguf(tmp_path / "draft.gguf", form))
    assert torch.equal(found, guess(target, folder))
    assert not torch.equal(found, guess(target, write_assistant(tmp_path / "ordered", form)))


def test_an_assistants_head_and_the_projections_may_be_in_blocks_too(
    target_of: Callable[..., Path], tmp_path: Path
) -> None:
    def in_blocks(name: str, tensor: Tensor) -> tuple[int, bytes] | None:
        return packed(f"blk.{name}", tensor, kind="Q8_0") if name.startswith(("token_embd", "nextn")) else None

    def as_numbers(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        if not name.startswith(("token_embd", "nextn")):
            return name, tensor
        return name, numbers(f"blk.{name}", tensor, kind="Q8_0")[1]

    target = target_of(ASSISTANT)
    path = gemma_assistant.write_as_gguf(tmp_path / "blocks.gguf", WIDE, pack=in_blocks)
    plain = gemma_assistant.write_as_gguf(tmp_path / "plain.gguf", WIDE, change=as_numbers)
    torch.testing.assert_close(guess(target, path), guess(target, plain), **BOUND)
