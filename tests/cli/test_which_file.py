"""Which file of a folder counts: the one that transformers reads, and that is said."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.file_names import INDEX_NAME
from tests.cli.conftest import RunCli
from tests.offload.gguf.test_refused import TINY
from tests.support.families import FAMILIES, make_model

NOTE = "is read from model.safetensors, as transformers does"


@pytest.fixture
def both(pair_folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A folder of shards that another model's single file was saved into."""
    folder = shutil.copytree(pair_folders[0], tmp_path / "both")
    newer = make_model(FAMILIES["llama"](), seed=5, dtype=torch.bfloat16).state_dict()
    save_file({name: part.clone() for name, part in newer.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("has_shards", [True, False])
def test_a_single_file_comes_before_an_index_as_in_transformers(
    both: Path, run_cli: RunCli, *, has_shards: bool
) -> None:
    """Without its shards, the index is what save_pretrained leaves of an older model."""
    for shard in () if has_shards else both.glob("model-*"):
        shard.unlink()
    model = AutoModelForCausalLM.from_pretrained(both, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(both)("def main(", return_tensors="pt").input_ids
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=256)[0, ids.shape[1] :].tolist()
    plain = ["-p", "def main(", "--raw", "-m", str(both), "--policy", "none", "-n", "8", "--temp", "0"]
    found = run_cli([*plain, "--dtype", "float32", "--format", "jsonl"])
    assert json.loads(found.out)["token_ids"] == theirs
    assert NOTE in found.err


def test_it_is_said_of_drafts_in_estimates_and_in_the_list_of_models(
    both: Path, pair_folders: tuple[Path, Path], run_cli: RunCli
) -> None:
    as_draft = ["-m", str(pair_folders[0]), "-md", str(both)]
    assert NOTE in run_cli(["-p", "a", *as_draft, "-n", "2", "--dry-run"]).err
    assert NOTE in run_cli(as_draft, command="estimate").err
    (found,) = json.loads(run_cli([str(both), "--json"], command="models").out)["models"]
    assert NOTE in found["notes"][0]
    assert f"it {NOTE}" in run_cli([str(both)], command="models").out


def test_a_link_to_nowhere_is_no_single_file(both: Path, pair_folders: tuple[Path, Path], run_cli: RunCli) -> None:
    (both / "model.safetensors").unlink()
    (both / "model.safetensors").symlink_to(both / "gone")
    assert (both / INDEX_NAME).exists()
    plain = ["-p", "a", "--policy", "none", "-n", "4", "--temp", "0", "--format", "jsonl"]
    ours, whole = (run_cli([*plain, "-m", str(folder)]) for folder in (both, pair_folders[0]))
    assert json.loads(ours.out)["token_ids"] == json.loads(whole.out)["token_ids"]
    assert NOTE not in ours.err


def test_no_output_replaces_a_gguf_model_or_another_part_of_it(run_cli: RunCli, tmp_path: Path) -> None:
    content = (TINY / "llama.gguf").read_bytes()
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(content)
    for name, is_refused in {"m-00001-of-00002": True, "m-00002-of-00002": True, "other": False}.items():
        options = ["-m", str(tmp_path / "m-00001-of-00002.gguf"), "-o", str(tmp_path / f"{name}.gguf")]
        outcome = run_cli(["p.txt", *options], files={"p.txt": "a"})
        assert ("a file of the target and --output are one file" in outcome.err) == is_refused
        assert (tmp_path / f"{name}.gguf").read_bytes() == content
