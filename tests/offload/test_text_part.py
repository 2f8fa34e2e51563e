"""The layers of a model, and its text part: the weights of a tower for images are neither read nor wanted."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING

from offload.checkpoint import read_checkpoint
from offload.errors import CheckpointError
from offload.skeleton import build_skeleton
from offload.text_part import decoder_layers, language_model, model_from_config, unread_names
from tests.offload.streaming import logits, skeleton_of, streamed_logits, unlimited_placement
from tests.support.families import FAMILIES, make_model, save_folder

STACKS = {
    "blt": ("patcher", "local_encoder", "global_transformer", "local_decoder"),
    "hrm_text": ("L_module", "H_module"),
}
LOCAL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
STACKED: dict[str, dict[str, Any]] = {
    "blt": {
        "patcher_config": LOCAL, "encoder_config": {**LOCAL, "hidden_size_global": 32},
        "decoder_config": {**LOCAL, "hidden_size_global": 32}, "global_config": {**LOCAL, "hidden_size": 32},
        "encoder_hash_byte_group_vocab": 50, "patching_threshold": 4.1, "vocab_size": 64,
    },
    "hrm_text": {**LOCAL, "hidden_size": 32, "head_dim": 16},
}  # fmt: skip


def without(folder: Path, part: str) -> Path:
    """The folder, whose tensors of this part are gone."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    return folder


def test_the_layers_are_those_of_the_text_though_the_tower_has_as_many() -> None:
    name, layers = decoder_layers(make_model(FAMILIES["gemma3-images"]()))
    assert name == "model.language_model.layers"
    assert len(layers) == 3


def test_a_list_without_weights_is_none_of_layers() -> None:
    """Granite with windows may have as many rotations as layers."""
    model = make_model(FAMILIES["llama"]())
    model.model.rotations = nn.ModuleList(nn.Identity() for _ in model.model.layers)
    assert decoder_layers(model)[0] == "model.layers"


@pytest.mark.parametrize("family", STACKS)
def test_layers_of_several_stacks_are_one_list(family: str, tmp_path: Path) -> None:
    """Each weight of the stacks is in a layer's record, and the logits are those of the resident model."""
    model = make_model(CONFIG_MAPPING[family](**STACKED[family]))
    name, layers = decoder_layers(model)
    assert name == "model.layers"
    stacks = [f"model.{stack}.layers" for stack in STACKS[family]]
    assert [*layers] == [layer for stack in stacks for layer in cast("nn.ModuleList", model.get_submodule(stack))]
    assert language_model(model) is model
    skeleton = skeleton_of(save_folder(tmp_path, model))
    of_layers = [f"{stack}.{layer}." for stack in stacks for layer in range(2)]
    for start, record in zip(of_layers, skeleton.records, strict=True):
        assert record.tensors
        assert all(name.startswith(start) for name in record.tensors)
    assert not any(".layers." in name for name in skeleton.outside.tensors)
    for resident in (0, 2):
        found = streamed_logits(skeleton_of(tmp_path), unlimited_placement(skeleton, resident=resident))
        assert torch.equal(found, logits(model))


def test_the_tower_need_not_be_there(tmp_path: Path) -> None:
    config = FAMILIES["gemma3-images"]()
    model = make_model(config)
    folder = without(save_folder(tmp_path, model), "vision_tower")
    skeleton = build_skeleton(config, read_checkpoint(folder), dtype=torch.float32)
    read = {name for record in (*skeleton.records, skeleton.outside) for name in record.tensors}
    assert not any("vision" in name or "projector" in name for name in read)
    names = unread_names(model)
    assert skeleton.num_unread == sum(tensor.numel() for name, tensor in model.state_dict().items() if name in names)
    assert not any("language_model" in name or "lm_head" in name for name in names)


def test_the_text_part_must_be_there(tmp_path: Path) -> None:
    config = FAMILIES["gemma3-images"]()
    folder = without(save_folder(tmp_path, make_model(config)), "layers.1.mlp.up_proj")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="lacks"):
        build_skeleton(config, read_checkpoint(folder), dtype=torch.float32)


def test_a_language_model_is_read_whole() -> None:
    for family in ("llama", "gemma3", "gemma4", "opt"):
        assert unread_names(make_model(FAMILIES[family]())) == frozenset()


@pytest.mark.skipif("blt" not in CONFIG_MAPPING, reason="this transformers lacks it")
def test_a_stack_that_a_model_does_without_is_no_layer() -> None:
    counts = []
    for has_patcher in (True, False):
        config = CONFIG_MAPPING["blt"](**STACKED["blt"], patch_in_forward=has_patcher)
        counts.append(len(decoder_layers(model_from_config(config, dtype=torch.float32))[1]))
    assert counts == [8, 6]
