"""Weights that are written over while an engine has them in use: one error, and no text of another model."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from edgespec import Engine, TreeSettings
from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair

PROMPT = [5, 80, 7, 33]


def write_over(folder: Path, scratch: Path) -> dict[Path, bytes]:
    """Another model's weights in place, as `cp` does it, and what was there before."""
    before = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    for path in before:
        changed = {name: tensor.roll(1, 0) for name, tensor in load_file(path).items()}
        save_file(changed, scratch, metadata={"format": "pt"})
        path.write_bytes(scratch.read_bytes())
    return before


@pytest.mark.parametrize("role", ["target", "draft"])
def test_weights_that_are_written_over_between_two_texts_end_the_second(
    role: str, pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in pair_folders]
    tree = TreeSettings(size=9, lookup=False)  # the draft is read in every step, whatever the clock says
    with Engine.from_pair(open_pair(*folders), tree=tree, dtype="bfloat16") as engine:
        assert engine.placement.num_resident == engine.placement.num_layers
        first = engine.generate(PROMPT, max_new_tokens=8, temperature=0)
        content = write_over(tmp_path / role, tmp_path / "new")
        with pytest.raises(EdgespecError) as caught:
            engine.generate(PROMPT, max_new_tokens=8, temperature=0)
        assert caught.value.code == "E_FILE_CHANGED"
        for path, before in content.items():
            path.write_bytes(before)
        assert engine.generate(PROMPT, max_new_tokens=8, temperature=0).token_ids == first.token_ids
