"""The trial before a model's first picture: families pass that are read rightly, and a wrong reading is noticed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

pytest.importorskip("PIL")
pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4", reason="a newer transformers has them")

from edgespec.errors import EdgespecError
from edgespec.model import sight_check
from edgespec.model.seeing import see
from edgespec.model.seen_prompt import SeenPrompt
from edgespec.model.sight_check import check_seeing
from tests.support.tiny_pictures import SEEING, seeing_prompt


@pytest.mark.parametrize("family", SEEING)
def test_families_that_are_read_rightly_pass(family: str) -> None:
    of = SEEING[family]()
    check_seeing(of.model.config, seeing_prompt(of, (1, 2)))


SIZES_OF_PICTURES = {
    "image_size", "patch_size", "spatial_merge_size", "temporal_patch_size", "window_size", "num_position_embeddings",
}  # fmt: skip
OF_PROCESSOR = {"mm_tokens_per_image", "scale_factor", "spatial_merge_size", "downsample_ratio", "image_seq_length"}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3", "smolvlm", "mistral3", "internvl"])
def test_models_of_published_sizes_have_a_narrow_copy_that_passes(family: str) -> None:
    """The family's default widths and depths, with the picture sizes of the tiny model's processor."""
    of = SEEING[family]()
    tiny: Any = of.model.config
    whole: Any = AutoConfig.for_model(tiny.model_type)
    for name, value in vars(tiny).items():
        if name.endswith(("token_id", "token_index")) or name in OF_PROCESSOR:
            setattr(whole, name, value)
    for name in SIZES_OF_PICTURES & vars(tiny.vision_config).keys():
        setattr(whole.vision_config, name, getattr(tiny.vision_config, name))
    check_seeing(whole, seeing_prompt(of, (1, 2)))


def _on_all_rows(seen: SeenPrompt) -> SeenPrompt:
    features = tuple(
        torch.zeros(seen.num_rows, layer.shape[1]).index_copy(0, seen.deepstacked.nonzero()[:, 0], layer) + 0.1
        for layer in seen.deepstack
    )
    return replace(seen, deepstacked=torch.ones_like(seen.deepstacked), deepstack=features)


WRONG: dict[str, tuple[str, Callable[[SeenPrompt], SeenPrompt]]] = {
    "a shift that is off by one": ("qwen3_vl", lambda seen: replace(seen, shift=seen.shift + 1)),
    "no axes": ("qwen2_5_vl", lambda seen: replace(seen, rotated=None)),
    "deepstack rows on all rows": ("qwen3_vl", _on_all_rows),
    "no deepstack rows": ("qwen3_vl", lambda seen: replace(seen, deepstacked=None, deepstack=())),
    "no blocks": ("gemma3", lambda seen: replace(seen, blocks=None)),
    "blocks in all layers": ("gemma4", lambda seen: replace(seen, blocks_only_in_windows=False)),
    "inputs a layer of words": ("gemma4_e", lambda seen: replace(seen, per_layer=torch.zeros_like(seen.per_layer))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_refused_by_name(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changed = WRONG[wrong]
    of = SEEING[family]()

    def wrongly(*arguments: Any) -> SeenPrompt:
        return changed(see(*arguments))

    monkeypatch.setattr(sight_check, "see", wrongly)
    with pytest.raises(
        EdgespecError, match=f"type '{of.model.config.model_type}' are not read: .* hidden states are off"
    ):
        check_seeing(of.model.config, seeing_prompt(of, (1, 2)))


def test_blocks_that_no_rule_knows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further family whose rows see each other is refused, and needs no entry in a list."""
    monkeypatch.setattr("edgespec.model.seeing.has_blocks", lambda _config: False)
    of = SEEING["gemma3"]()
    with pytest.raises(EdgespecError, match="hidden states are off"):
        check_seeing(of.model.config, seeing_prompt(of, (1, 2)))
