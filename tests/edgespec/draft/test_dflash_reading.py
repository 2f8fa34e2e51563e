"""What a DFlash drafter's folder may say, what is refused by name, and where a drafter is listed and planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from edgespec import EdgespecError
from edgespec.pair.drafts import open_draft
from edgespec.pair.folder import open_model
from edgespec.placement.memory import device_memory
from edgespec.placement.place import pair_weights
from edgespec.placement.run_config import resolve_run_config
from edgespec.tree.settings import TreeSettings
from tests.edgespec.draft.dflash_drafter import Drafter, config_of, tensors_of, write_drafter

PLAIN, SPECULATORS = Drafter(), Drafter(container="speculators")
SWA = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 6}


def opened(
    target: Path, folder: Path, form: Drafter, config: dict[str, Any] | None = None, **tensors: Tensor | None
) -> Any:
    """The draft of a folder with other keys in its config, and other tensors; None takes one out."""
    write_drafter(folder, form)
    stated = config_of(form) | (config or {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stated.items() if value != "drop"}))
    kept = {name: tensor for name, tensor in (tensors_of(form) | tensors).items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return open_draft(folder, open_model(target))


@pytest.mark.parametrize(
    ("form", "config", "tensors", "words"),
    [
        (PLAIN, {"block_size": "drop"}, {}, "block_size"),
        (PLAIN, {"block_size": 1}, {}, "none is guessed"),
        (PLAIN, {"dflash_config": {}}, {}, "mask_token_id"),
        (PLAIN, {"dflash_config": {"mask_token_id": 257}}, {}, "mask_token_id = 257"),
        (PLAIN, {"dflash_config": {"mask_token_id": 5, "target_layer_ids": ["a"]}}, {}, "no list of whole numbers"),
        (PLAIN, {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 8]}}, {}, "the target has 8 layers"),
        (PLAIN, {"dflash_config": {"mask_token_id": 5, "attention_sink_bias": True}}, {}, "attention_sink_bias"),
        (PLAIN, {"dflash_config": {"mask_token_id": 5, "use_swa": True}}, {}, "use_swa"),
        (PLAIN, {"dflash_config": {"mask_token_id": 5, "causal": "yes"}}, {}, "causal = 'yes'"),
        (PLAIN, SWA | {"sliding_window": 4}, {}, "smaller than its block"),
        (PLAIN, SWA | {"sliding_window": "drop"}, {}, "needs one"),
        (PLAIN, {"model_type": "llama"}, {}, "'llama'"),
        (PLAIN, {"num_target_layers": 9}, {}, "a target of 9 layers"),
        (PLAIN, {"vocab_size": 300}, {}, "300 tokens"),
        (PLAIN, {"quantization_config": {"quant_method": "fp8"}}, {}, "packed"),
        (PLAIN, {}, {"fc.weight": torch.zeros(32, 3 * 16)}, "of 16 numbers"),
        (PLAIN, {}, {"hidden_norm.weight": None}, "hidden_norm"),
        (PLAIN, {}, {"mask_embedding": torch.zeros(32)}, "'mask_embedding'"),
        (PLAIN, {}, {"layers.3.input_layernorm.weight": torch.zeros(32)}, "layers.3"),
        (PLAIN, {}, {"layers.1.self_attn.sinks": torch.zeros(4)}, "sinks"),
        (SPECULATORS, {"aux_hidden_state_layer_ids": "drop"}, {}, "aux_hidden_state_layer_ids"),
        (SPECULATORS, {"transformer_layer_config": "drop"}, {}, "transformer_layer_config"),
    ],
)
def test_what_is_not_understood_is_named(
    target: Path, tmp_path: Path, form: Drafter, config: dict[str, Any], tensors: dict[str, Tensor | None], words: str
) -> None:
    with pytest.raises(EdgespecError) as error:
        opened(target, tmp_path / "drafter", form, config, **tensors)
    assert error.value.code in {"E_DRAFT_FORM", "E_HEAD_TARGET"}
    assert words in error.value.what


def test_a_missing_weight_is_named(target: Path, tmp_path: Path) -> None:
    draft = opened(target, tmp_path / "drafter", PLAIN, **{"layers.2.mlp.up_proj.weight": None})
    with pytest.raises(Exception, match=r"layers\.2\.mlp\.up_proj"):
        draft.skeleton(draft.checkpoint, dtype=torch.float32)


def test_keys_that_are_not_known_are_named(target: Path, tmp_path: Path) -> None:
    draft = opened(target, tmp_path / "drafter", PLAIN, {"new_key": 1})
    assert any("new_key" in note for note in draft.notes)
    assert any("guesses 4 tokens" in note and "after 2, 4, 7 layers" in note for note in draft.notes)


def test_a_bare_config_is_planned_like_the_whole_folder(target: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", Drafter(block=16))
    uses = []
    for _ in range(2):
        target_model = open_model(target)
        draft = open_draft(folder, target_model, is_planned=True)
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
        run_config = resolve_run_config(target_model, None, draft=draft, is_planned_only=True, **options)
        weights = pair_weights(target_model, draft, run_config)
        tree = TreeSettings(size=4)
        uses.append(
            device_memory(
                weights.target.skeleton, weights.draft.skeleton, tree=tree, run_config=run_config, budget_bytes=1 << 30
            )
        )
        (folder / "model.safetensors").unlink(missing_ok=True)
    assert uses[0] == {name: pytest.approx(size, rel=0.05) for name, size in uses[1].items()}  # tensors are aligned
    assert uses[0]["target: features"] > 0
