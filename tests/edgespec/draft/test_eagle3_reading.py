"""What an EAGLE-3 head's folder may say, what is refused by name, and where a head is listed and planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from edgespec import EdgespecError
from edgespec.pair.drafts import open_draft
from edgespec.pair.folder import open_model
from edgespec.pair.pair import open_pair
from edgespec.placement.memory import device_memory
from edgespec.placement.place import PairWeights
from edgespec.placement.run_config import resolve_run_config
from edgespec.placement.weights import weights_by_size
from edgespec.tree.settings import TreeSettings
from tests.edgespec.draft.eagle3_head import Head, config_of, tensors_of, write_head

PLAIN, SPECULATORS = Head(), Head(container="speculators")


def opened(
    target: Path, folder: Path, head: Head, config: dict[str, Any] | None = None, **tensors: Tensor | None
) -> Any:
    """The draft of a head's folder with other keys in its config, and other tensors; None takes one out."""
    write_head(folder, head)
    stated = config_of(head) | (config or {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stated.items() if value != "drop"}))
    kept = {name: tensor for name, tensor in (tensors_of(head) | tensors).items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return open_pair(target, folder).draft


def aux_states_of(draft: Any) -> tuple[int, ...]:
    return draft.skeleton(draft.checkpoint, dtype=torch.float32).model.fuse.aux_states.layers


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("head", "config", "layers"),
    [
        (PLAIN, {}, (2, 4, 5)),
        (PLAIN, {"eagle_config": {AUX: []}}, (2, 4, 5)),
        (PLAIN, {"eagle_config": {AUX: [3, 4, 8], "use_aux_hidden_state": True}}, (3, 4, 8)),
        (PLAIN, {"eagle_config": {AUX: [1, 4, 7]}}, (2, 5, 8)),
        (PLAIN, {"eagle_config": {AUX: [1, 4, 7]}, "edgespec_taps": [1, 4, 7]}, (1, 4, 7)),
        (SPECULATORS, {AUX: [1, 4, 7]}, (2, 5, 8)),
        (SPECULATORS, {AUX: [2, 4, 5]}, (2, 4, 5)),
    ],
)
def test_layers_are_those_that_the_folder_means(
    target: Path, tmp_path: Path, head: Head, config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert aux_states_of(opened(target, tmp_path / "head", head, config)) == layers


@pytest.mark.parametrize(
    ("head", "config", "tensors", "words"),
    [
        (SPECULATORS, {"norm_before_residual": "drop"}, {}, "norm_before_residual"),
        (SPECULATORS, {"transformer_layer_config": "drop"}, {}, "transformer_layer_config"),
        (PLAIN, {"hidden_size": 64}, {}, "hidden states of 64"),
        (PLAIN, {"target_hidden_size": 64}, {}, "hidden states of 64"),
        (PLAIN, {"vocab_size": 5000}, {}, "5000 tokens"),
        (PLAIN, {"eagle_config": {AUX: [2, 4, 9]}}, {}, r"\[2, 4, 9\].*8 layers"),
        (PLAIN, {"eagle_config": {AUX: [2, 4]}}, {}, "fc.weight"),
        (PLAIN, {"eagle_config": {AUX: "all"}}, {}, "no list"),
        (PLAIN, {"num_aux_hidden_states": 5}, {}, "does not say which"),
        (PLAIN, {"model_type": "gemma3_text"}, {}, "gemma3_text"),
        (PLAIN, {"hidden_act": "gelu"}, {}, "gelu"),
        (PLAIN, {"sliding_window": 128}, {}, "window"),
        (PLAIN, {"fc_norm": "yes"}, {}, "fc_norm"),
        (PLAIN, {"quantization_config": {"quant_method": "fp8"}}, {}, "packed"),
        (PLAIN, {}, {"d2t": None}, "d2t"),
        (PLAIN, {}, {"lm_head.weight": None}, "lm_head"),
        (PLAIN, {}, {"fc.weight": torch.zeros(32, 64)}, "fc.weight"),
        (PLAIN, {}, {"midlayer.extra.weight": torch.zeros(2)}, "midlayer.extra.weight"),
        (PLAIN, {}, {"layers.1.mlp.up_proj.weight": torch.zeros(2)}, "layers.1.mlp"),
        (PLAIN, {}, {"mystery": torch.zeros(2)}, "mystery"),
        (PLAIN, {}, {"midlayer.self_attn.q_norm.weight": torch.zeros(12)}, "q_norm"),
        (PLAIN, {}, {"midlayer.self_attn.q_proj.bias": torch.zeros(48)}, "q_proj.bias"),
        (PLAIN, {}, {"fc_norm.0.weight": torch.zeros(32)}, "fc_norm"),
        (PLAIN, {}, {"layers.0.hidden_norm.weight": torch.zeros(32)}, "one weight"),
        (PLAIN, {}, {"midlayer.hidden_norm.weight": None}, "hidden_norm"),
        (Head(width=24), {}, {}, "embed_tokens.weight"),
        (Head(use_aux=False, width=24, target_width=32, owns_embedding=True), {}, {}, "last hidden state"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    target: Path, tmp_path: Path, head: Head, config: dict[str, Any], tensors: dict[str, Any], words: str
) -> None:
    with pytest.raises(EdgespecError, match=words):
        weights_by_size(opened(target, tmp_path / "head", head, config, **tensors), dtype=torch.float32, quant=None)


def test_a_map_of_ids_in_the_place_of_offsets_is_refused(target: Path, tmp_path: Path) -> None:
    ids = tensors_of(PLAIN)["d2t"] + torch.arange(100)
    with pytest.raises(EdgespecError, match="d2t"):
        opened(target, tmp_path / "head", PLAIN, d2t=ids)


def test_keys_that_are_not_known_are_named_and_others_are_not(target: Path, tmp_path: Path) -> None:
    assert len(opened(target, tmp_path / "head", PLAIN, {"use_cache": True, "pretraining_tp": 1}).notes) == 1
    odd = opened(target, tmp_path / "odd", PLAIN, {"new_trick": 3})
    assert any("new_trick" in note for note in odd.notes)


def test_a_head_that_names_another_target_says_so_once(target: Path, tmp_path: Path) -> None:
    own = opened(target, tmp_path / "own", SPECULATORS)
    assert not any("made for" in note for note in own.notes)
    verifier = {"speculators_config": {"verifier": {"name_or_path": "meta-llama/Llama-9"}}}
    other = opened(target, tmp_path / "other", SPECULATORS, verifier)
    assert [note for note in other.notes if "meta-llama/Llama-9" in note]


@pytest.mark.parametrize("head", [PLAIN, SPECULATORS, Head(draft_vocab=257, owns_head=False)], ids=str)
def test_a_bare_config_is_planned_as_the_head_itself(target: Path, tmp_path: Path, head: Head) -> None:
    folder, bare = write_head(tmp_path / "head", head), tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = open_model(target)
    run_config = resolve_run_config(model, 256, context_tokens=128, dtype="float32")
    uses = []
    for draft in (open_draft(folder, model), open_draft(bare, model, is_planned=True)):
        weights = PairWeights(
            target=weights_by_size(model, dtype=torch.float32, quant=None),
            draft=weights_by_size(draft, dtype=torch.float32, quant=None),
        )
        uses.append(
            device_memory(weights.target.skeleton, weights.draft.skeleton, tree=TreeSettings(size=8),
                        run_config=run_config, budget_bytes=1 << 30)
        )  # fmt: skip
    weights_bytes = [found.pop("draft: weights") for found in uses]
    assert weights_bytes[0] == pytest.approx(weights_bytes[1], abs=1024)  # where a file has gaps is not known
    assert uses[0] == uses[1]
    assert uses[0]["target: features"] > 0
    assert uses[0]["target: states between layers"] > 3 * 128 * 32 * 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"no archive"),
        lambda path: path.write_bytes(path.read_bytes()[:-400]),
        lambda path: torch.save({"fc.weight": print}, path),
        lambda path: torch.save([torch.zeros(2)], path),
        lambda path: torch.save({"fc.weight": torch.zeros(3, 2).T}, path),
    ],
)
def test_a_damaged_torch_file_is_refused(target: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = write_head(tmp_path / "head", PLAIN, is_torch_file=True)
    damage(folder / "pytorch_model.bin")
    with pytest.raises(EdgespecError, match=r"pytorch_model\.bin"):
        open_pair(target, folder)
