"""Matrices whose rows lie in turn in one tensor, as Inkling's gates and their other halves do, are read as two."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, core_model_loading
from transformers.core_model_loading import PermuteForRope, WeightConverter

from offload import stored_names
from offload.checkpoint import read_checkpoint
from offload.errors import CheckpointError
from offload.layer_parts import parts_of
from offload.layer_store import LayerStore, joined
from offload.quantize import quantize_layer
from offload.skeleton import build_skeleton
from tests.offload.streaming import CPU, logits, skeleton_of, streamed_logits, unlimited_placement
from tests.support.families import FAMILIES, make_model, save_folder
from tests.support.tiny_configs import tiny_config

QUERIES = "model.language_model.message_input.query"
needs_inkling = pytest.mark.skipif("inkling_mm_model" not in CONFIG_MAPPING, reason="this transformers lacks it")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of Inkling, whose first layer has no experts."""
    torch.manual_seed(0)
    config = tiny_config("inkling_mm_model")
    config.text_config.mlp_layer_types[0] = "dense"
    config.text_config.initializer_range = 0.1  # with small weights, wrong gates change less than bf16 rounds
    found = save_folder(tmp_path, AutoModelForImageTextToText.from_config(config))
    names = load_file(found / "model.safetensors")
    for name in ("mlp.experts.w13_weight", "mlp.shared_experts.shared_w13_weight", "mlp.w13_dn.weight"):
        assert any(stored.endswith(name) for stored in names), name
    return found


@needs_inkling
@pytest.mark.parametrize("resident", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as-stored", "converted"])
def test_logits_are_those_of_transformers(dtype: torch.dtype, resident: int, folder: Path) -> None:
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    skeleton = skeleton_of(folder, dtype)
    placement = unlimited_placement(skeleton, resident=resident)
    expected = logits(reference)
    # Transformers 5.17 rounds some numbers in bf16 elsewhere: 0.01 of the largest logit; exchanged gates change 0.13.
    tolerance = 1e-5 if dtype == torch.float32 else 0.03 * float(expected.abs().max())
    torch.testing.assert_close(streamed_logits(skeleton, placement), expected, rtol=0, atol=tolerance)


@needs_inkling
def test_layers_are_those_of_transformers_however_they_are_read(folder: Path) -> None:
    """As a whole, in parts that end within a row, and expert by expert."""
    expected = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    skeleton = skeleton_of(folder)
    store = LayerStore({entry.file for record in skeleton.records for entry in record.entries})
    for record in skeleton.records:
        whole = torch.zeros(record.flat_bytes, dtype=torch.uint8)
        store.copy(record, whole)
        for name, found in record.flat_views(whole).items():
            assert torch.equal(found, expected[name]), name
        in_parts = torch.zeros_like(whole)
        for part in parts_of(record, 1280):
            part.read(store, in_parts[part.start : part.end])
        assert in_parts.equal(whole)
    assert skeleton.expert_groups
    for group in skeleton.expert_groups:
        for number, record in enumerate(group.experts):
            for attribute, weight in group.weights(store.pieces(record), torch.empty(0)).items():
                found = torch.cat(list(weight.blocks()))
                assert torch.equal(found, expected[f"{group.module_name}.{attribute}"][number])


@needs_inkling
def test_layers_are_packed_as_if_they_lay_in_order(folder: Path, tmp_path: Path) -> None:
    in_order = tmp_path / "in_order"
    shutil.copytree(folder, in_order)
    tensors = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, in_order / "model.safetensors")
    made = []
    for skeleton in (skeleton_of(folder), skeleton_of(in_order)):
        store = LayerStore({entry.file for record in skeleton.records for entry in record.entries})
        made.append([quantize_layer(skeleton, record, store, "int8", CPU) for record in skeleton.records])
    for found, expected in zip(*made, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@needs_inkling
def test_two_matrices_in_turn_are_the_bytes_of_one(folder: Path) -> None:
    """They are counted once, and read and let go as one range; direct reads, which copy bytes, are not for them."""
    record = skeleton_of(folder).records[0]
    names = [name for name in record.tensors if name.endswith(("gate_proj.weight", "up_proj.weight"))]
    pair = record.without(frozenset(record.tensors.keys() - set(names)))
    stored = read_checkpoint(folder).tensors["model.llm.layers.0.mlp.w13_dn.weight"]
    assert pair.stored_bytes == stored.num_bytes
    assert pair.ranges == ((stored.file, stored.offset, stored.offset + stored.num_bytes),)
    assert not pair.is_stored_as_computed
    few = pair.entries[1].file_range(0, stored.shape[1])  # of a part that begins in the second matrix
    assert joined([pair.ranges[0], few]) == pair.ranges
    row_bytes = stored.num_bytes // stored.shape[0]
    assert pair.entries[1].file_range(0, 1) == (stored.file, stored.offset + row_bytes, stored.offset + row_bytes + 4)


@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason="this transformers lacks it")
def test_of_a_head_the_rows_that_stand_for_tokens_are_read(tmp_path: Path) -> None:
    """Inkling 2 is published with further ones."""
    config = tiny_config("inkling2_text")
    config.unpadded_vocab_size = 250
    folder = save_folder(tmp_path, AutoModelForCausalLM.from_config(config))
    stored = load_file(folder / "model.safetensors")["model.llm.unembed.weight"]
    head = skeleton_of(folder).outside.tensors["lm_head.weight"]
    assert (stored.shape[0], head.shape[0]) == (257, 250)
    assert torch.equal(LayerStore({head.pieces[0].file}).assembled(head, torch.float32), stored[:250])


@needs_inkling
@pytest.mark.parametrize("order", [{"dim": 1}, {"dim": 0, "inverse": True}, None], ids=["columns", "other-way", "rope"])
def test_numbers_in_another_order_are_refused_by_that_reason(
    order: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of such a model is missing."""
    operation = PermuteForRope() if order is None else core_model_loading.Interleave(**order)
    folder, config = save_folder(tmp_path, make_model(FAMILIES["llama"]())), FAMILIES["llama"]()
    reordered = WeightConverter(source_patterns="q_proj", target_patterns="q_proj", operations=[operation])
    monkeypatch.setattr(stored_names, "get_model_conversion_mapping", lambda _model: [reordered])
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.weight' transposed or in") as caught:
        build_skeleton(config, read_checkpoint(folder), dtype=torch.float32)
    assert caught.value.code == "E_UNSUPPORTED_ARCHITECTURE"


@pytest.mark.skipif("inkling2_loop" not in CONFIG_MAPPING, reason="this transformers lacks it")
@pytest.mark.parametrize("resident", [0, 4])
def test_experts_that_a_mapping_would_unpack_are_read_where_they_are_stored_as_they_are(
    resident: int, tmp_path: Path
) -> None:
    """Inkling 2's loops also have queries of two tensors in one."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config("inkling2_loop")).eval()
    queries = model.get_parameter(QUERIES)
    torch.nn.init.normal_(queries)  # as made, they are 0
    folder = save_folder(tmp_path, model)
    names = load_file(folder / "model.safetensors")
    assert any(name.endswith("middle_cycle_cross_pass_kv_queries") for name in names)
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    skeleton = skeleton_of(folder, torch.float32)
    store = LayerStore({entry.file for entry in skeleton.outside.entries})
    assert torch.equal(store.assembled(skeleton.outside.tensors[QUERIES], torch.float32), queries)
    placement = unlimited_placement(skeleton, resident=resident)
    torch.testing.assert_close(streamed_logits(skeleton, placement), logits(reference))
    (name,) = [name for name in names if name.endswith("0.mlp.experts.w13_weight")]
    save_file({**names, f"{name}_scale": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="w13_weight' packed in a form that is not read"):
        skeleton_of(folder, torch.float32)
