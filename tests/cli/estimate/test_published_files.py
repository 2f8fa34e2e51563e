"""Files that others have published are planned from their headers, with the layer that they hold as the draft."""

from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.pair.drafts import planned_draft
from edgespec.pair.folder import open_architecture
from edgespec.placement.weights import weights_by_size
from tests.support.published_headers import Published, glm_air, qwen36_27b, write_header


@pytest.mark.parametrize(
    ("published", "num_tensors", "billions", "layer_billions"),
    [(qwen36_27b, 866, 26.9, 0.425), (glm_air, 803, 106.9, 2.375)],
    ids=["Qwen3.6-27B", "GLM-4.5-Air"],
)
def test_a_published_file_is_planned_with_its_own_layer(
    published: Callable[[], Published], num_tensors: int, billions: float, layer_billions: float, tmp_path: Path
) -> None:
    """The numbers of tensors are those that llama.cpp prints of the published files."""
    import torch

    path = write_header(tmp_path / "model.gguf", published())
    target, layer = planned_draft(None, open_architecture(path))
    assert len(published().shapes) == num_tensors
    assert any("is planned from its header" in note for note in target.notes)
    assert layer is not None
    sizes = [weights_by_size(one, dtype=torch.bfloat16, quant=None).num_parameters / 1e9 for one in (target, layer)]
    assert sizes == pytest.approx([billions, layer_billions], rel=0.01)
