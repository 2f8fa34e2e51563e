"""Files that others have published are planned from their headers, with the layer that they hold as the draft."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from edgespec.pair.drafts import planned_draft
from edgespec.pair.folder import open_architecture
from edgespec.placement import acceptance
from edgespec.placement.weights import weights_by_size
from edgespec.tuning.draft_memory import LearnedRate
from offload.placement import GIB
from tests.cli.conftest import RunCli
from tests.support.published_headers import Published, glm_air, indexed, qwen36_27b, write_header


@pytest.mark.parametrize(
    ("published", "num_tensors", "billions", "layer_billions"),
    [(qwen36_27b, 866, 26.9, 0.425), (glm_air, 803, 106.9, 2.375)],
    ids=["Qwen3.6-27B", "GLM-4.5-Air"],
)
def test_a_published_file_is_planned_with_its_own_layer(
    published: Callable[[], Published], num_tensors: int, billions: float, layer_billions: float, tmp_path: Path
) -> None:
    """The numbers of tensors are those that llama.cpp prints of the published files."""
    path = write_header(tmp_path / "model.gguf", published())
    target, layer = planned_draft(None, open_architecture(path))
    assert len(published().shapes) == num_tensors
    assert any("is planned from its header" in note for note in target.notes)
    assert layer is not None
    sizes = [weights_by_size(one, dtype=torch.bfloat16, quant=None).num_parameters / 1e9 for one in (target, layer)]
    assert sizes == pytest.approx([billions, layer_billions], rel=0.01)


@pytest.mark.parametrize(
    ("architecture", "model_type", "billions"),
    [("deepseek32", "deepseek_v32", 11.6), ("glm-dsa", "glm_moe_dsa", 9.9)],
)
def test_layers_of_indexed_families_are_planned_at_the_sizes_that_are_published(
    architecture: str, model_type: str, billions: float, tmp_path: Path
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    path = write_header(tmp_path / "model.gguf", indexed(architecture, model_type))
    _, layer = planned_draft(None, open_architecture(path))
    assert layer is not None
    size = weights_by_size(layer, dtype=torch.bfloat16, quant=None).num_parameters / 1e9
    assert size == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("published", "card", "learned", "drafts"),
    [
        (glm_air, "rtx-4070-ti-super", None, True),  # where half of the first guesses would be too few
        (glm_air, "rtx-4070-ti-super", 0.5, False),
        (qwen36_27b, "rtx-4070-ti-super", 0.5, True),
    ],
)
def test_the_plan_the_line_about_the_layer_and_the_table_of_drafts_agree(
    published: Callable[[], Published], card: str, learned: float | None, drafts: bool, run_cli: RunCli,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the acceptance that is published of such layers, or that earlier runs have learned of this one."""
    rate = None if learned is None else LearnedRate(rate=learned, num_trees=99)
    monkeypatch.setattr(acceptance, "learned_rate", lambda *_: rate)
    path = write_header(tmp_path / "model.gguf", published())
    limits = ["--max-cpu-mem", "96GiB", "--ctx-size", "2048"]
    outcome = run_cli([str(path), "--hardware", card, *limits], command="estimate")
    assert outcome.code == 0
    assert ("layer drafts: " in outcome.err) == drafts
    assert ("draft: mtp (" in outcome.out) == drafts
    assert f"most tokens a second: -md {'mtp' if drafts else 'none'}" in outcome.out


def test_what_a_draft_borrows_is_said_where_it_is_unpacked_and_counts_as_its_own(
    run_cli: RunCli, tmp_path: Path
) -> None:
    """Table and head of 248,320 tokens, 5,120 numbers each in bf16: several times what the layer itself has."""
    path, num_bytes = write_header(tmp_path / "model.gguf", qwen36_27b()), 2 * 248_320 * 5_120 * 2
    arguments = [str(path), "--hardware", "rtx-4090", "--max-cpu-mem", "96GiB", "--json", "-md"]
    alone, with_layer = (run_cli([*arguments, draft], command="estimate") for draft in ("none", "mtp"))
    assert "borrows" not in alone.err
    assert f"borrows the target's embeddings and head, which are unpacked whole for it: {num_bytes / GIB:.3f} GiB" in (
        with_layer.err
    )
    both = [json.loads(outcome.out)["device_bytes"] for outcome in (alone, with_layer)]
    name = "target: embeddings, norms, head"
    assert both[1][name] - both[0][name] == num_bytes
    (drafts,) = (json.loads(run_cli([*arguments, "none,mtp"], command="estimate").out)["drafts"],)
    assert [one["bytes"] for one in drafts] == [0, num_bytes + both[1]["draft: weights"]]
