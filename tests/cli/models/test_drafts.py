"""`edgespec models --drafts TARGET`: what is here and fits, why the rest does not, and what is published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.cli.conftest import RunCli
from tests.edgespec.draft.dflash_drafter import Drafter, write_drafter
from tests.edgespec.draft.eagle3_head import Head, write_head
from tests.edgespec.draft.test_mtp_gguf import LAYER, cut
from tests.hub import Cache
from tests.offload.gguf.test_tiny_models import TINY
from tests.support.families import SMALL, make_model, save_folder


@pytest.fixture
def target(cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A target that is named as a published one, with a drafter, a smaller model and others beside it."""
    deep = LlamaConfig(**{**SMALL, "num_hidden_layers": 8}, num_key_value_heads=2)
    folder = save_folder(tmp_path / "models" / "Qwen3-8B", make_model(deep))
    shutil.copytree(pair_folders[1], tmp_path / "models" / "small")
    write_drafter(tmp_path / "models" / "block", Drafter())
    write_head(tmp_path / "models" / "wide", Head(target_width=48))
    return folder


def listed(run_cli: RunCli, *arguments: str) -> dict[str, Any]:
    outcome = run_cli([*arguments, "--json"], command="models").ended()
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def test_what_fits_comes_first_then_what_does_not_then_what_is_published(target: Path, run_cli: RunCli) -> None:
    beside = target.parent
    outcome = run_cli(["--drafts", str(target)], command="models").ended()
    first, second, third, *published = outcome.out.splitlines()
    assert first == f"{beside / 'block'}: a DFlash drafter, 0.1 MiB"
    assert second == f"{beside / 'small'}: a smaller model of the same tokens, 0.0 MiB"
    assert third.startswith(f"    not {beside / 'wide'}: ")
    assert third.endswith("is made for hidden states of 48 numbers, and the target has 32.")
    assert "published for Qwen3-8B: z-lab/Qwen3-8B-DFlash-b16, a DFlash drafter (https://github.com/z-lab/dflash)" in (
        published
    )
    assert all(line.startswith("published for Qwen3-8B: ") for line in published)


def test_a_published_draft_that_is_here_is_not_said_to_lack(target: Path, cache: Cache, run_cli: RunCli) -> None:
    name = "z-lab/Qwen3-8B-DFlash-b16"
    assert name in {one["name"] for one in listed(run_cli, "--drafts", str(target))["published"]}
    cache.put(name, target.parent / "block")
    found = listed(run_cli, "--drafts", str(target))
    assert name not in {one["name"] for one in found["published"]}
    here = next(one for one in found["drafts"] if one["name"] == name)
    assert (here["kind"], here["fits"], here["why_not"], here["is_beside"]) == ("dflash", True, None, False)


def test_a_target_by_its_name_in_the_cache_and_further_folders(
    target: Path, cache: Cache, pair_folders: tuple[Path, Path], run_cli: RunCli, tmp_path: Path
) -> None:
    cache.put("acme/Target-70B", pair_folders[0])
    cache.put("acme/Draft-1B", pair_folders[1])
    further = shutil.copytree(pair_folders[1], tmp_path / "further" / "one" / "draft")
    found = listed(run_cli, "--drafts", "acme/Target-70B", str(tmp_path / "further"))
    assert {one["name"] for one in found["drafts"] if one["fits"]} == {"acme/Draft-1B", str(further)}
    assert found["published"] == []


def test_of_a_target_that_is_not_here_the_published_are_known(cache: Cache, run_cli: RunCli) -> None:
    outcome = run_cli(["--drafts", "Qwen/Qwen3.6-27B"], command="models").ended()
    assert "z-lab/Qwen3.6-27B-DFlash" in outcome.out
    assert "is neither a folder here nor in the local cache" in outcome.err
    outcome = run_cli(["--drafts", "acme/Nobody-7B"], command="models")
    assert (outcome.code, outcome.out) == (4, "")


def test_a_draft_has_no_drafts_and_a_folder_without_a_model_none(target: Path, run_cli: RunCli) -> None:
    outcome = run_cli(["--drafts", str(target.parent / "block")], command="models").ended(2)
    assert "it drafts for it, and is no target" in outcome.err
    assert "has no model.safetensors" in run_cli(["--drafts", str(target.parent)], command="models").ended(4).err


def test_the_targets_own_layer_takes_the_place_of_files_that_have_it(
    cache: Cache, tmp_path: Path, run_cli: RunCli
) -> None:
    whole = shutil.copy(TINY / "qwen35-mtp.gguf", tmp_path / "Qwen3.6-27B-F32.gguf")
    (tmp_path / "without").mkdir()
    without = cut("qwen35-mtp", tmp_path / "without" / "Qwen3.6-27B-F32.gguf",
                  keep=lambda name: not name.startswith(LAYER), nextn_predict_layers=None, block_count=2)  # fmt: skip
    for path, own in ((whole, ["mtp"]), (without, [])):
        found = listed(run_cli, "--drafts", str(path))
        assert [one["name"] for one in found["drafts"] if one["fits"]] == own
        assert all(one["is_default"] == (one["name"] == "mtp") for one in found["drafts"])
        assert ("mtp" in {one["kind"] for one in found["published"]}) == (own == [])


def test_nothing_here_and_nothing_published_is_said(
    cache: Cache, pair_folders: tuple[Path, Path], tmp_path: Path, run_cli: RunCli
) -> None:
    alone = shutil.copytree(pair_folders[0], tmp_path / "alone" / "target")
    outcome = run_cli(["--drafts", str(alone)], command="models")
    assert (outcome.code, outcome.out) == (0, "")
    assert "edgespec train head makes a draft" in outcome.err


def test_a_draft_is_listed_with_its_targets_and_why_not_the_others(target: Path, run_cli: RunCli) -> None:
    found = listed(run_cli, str(target.parent))
    beside = target.parent
    by_name = {Path(one["name"]).name: one for one in found["models"]}
    block, wide = by_name.pop("block"), by_name.pop("wide")
    assert block["drafts_for"] == [str(target)]
    assert list(block["not_for"]) == [str(beside / "small")]
    assert wide["drafts_for"] == []
    assert set(wide["not_for"]) == {str(target), str(beside / "small")}
    assert all(not one["drafts_for"] and not one["not_for"] for one in by_name.values())
    lines = run_cli([str(beside)], command="models").out.splitlines()
    assert f"    drafts for {target}" in lines
    assert any(line.startswith(f"    not for {beside / 'small'}: '") for line in lines)
    assert any(line.startswith(f"    not for {target}") and "48" in line for line in lines)
