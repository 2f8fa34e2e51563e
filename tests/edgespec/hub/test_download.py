"""What `online` brings of a repository with GGUF files: the one that is meant, with its parts."""

import os
import subprocess
import sys
from pathlib import Path

from tests.hub import serve

TRIED = """
import sys
from edgespec.errors import EdgespecError
from edgespec.hub.names import resolve_model
for name in sys.argv[1:]:
    try:
        print(resolve_model(name, online=True).name)
    except EdgespecError as error:
        print(error.what)
"""
FILES = (
    "README.md", "config.json", "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf",
    "Q8_0/m-Q8_0-00002-of-00002.gguf",
)  # fmt: skip


def online(folder: Path, files: tuple[str, ...], *names: str) -> tuple[list[str], list[str]]:
    """What is said of each name, and the files that are there then."""
    with serve("owner/tiny", dict.fromkeys(files, b"0123456789")) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
        outcome = subprocess.run(
            [sys.executable, "-c", TRIED, *names], capture_output=True, text=True, check=False, env=environment
        )
    assert outcome.returncode == 0, outcome.stderr
    snapshots = next(folder.glob("hub/models--owner--tiny/snapshots/*"), folder / "none")
    there = [path.relative_to(snapshots).as_posix() for path in snapshots.rglob("*") if path.is_file()]
    return outcome.stdout.splitlines(), sorted(there)


def test_a_type_brings_its_file_alone_with_all_parts(tmp_path: Path) -> None:
    said, there = online(tmp_path, FILES, "owner/tiny:Q8_0", "owner/tiny:Q6_K")
    assert said == [
        "m-Q8_0-00001-of-00002.gguf",
        "'owner/tiny' has GGUF models, and none of type 'Q6_K': "
        "Q8_0/m-Q8_0-00001-of-00002.gguf (0.0 GiB), m-Q4_K_M.gguf (0.0 GiB).",
    ]
    assert there == list(FILES[4:])


def test_a_repository_with_one_needs_no_type_and_safetensors_come_first(tmp_path: Path) -> None:
    assert online(tmp_path / "a", FILES[:4], "owner/tiny") == (["m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"])
    said, there = online(tmp_path / "b", ("m-Q4_K_M.gguf", "m-Q8_0.gguf"), "owner/tiny")
    assert said[0].startswith("'owner/tiny' has GGUF models, and 2: m-Q4_K_M.gguf (0.0 GiB), ")
    assert there == []
    said, there = online(tmp_path / "c", (*FILES[:3], "model.safetensors"), "owner/tiny")
    assert there == ["config.json", "model.safetensors"]
