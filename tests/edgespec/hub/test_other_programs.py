"""Models of llama.cpp, LM Studio and Ollama are found where those keep them, by those programs' names, read only."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.doctor.checks import check_other_programs
from edgespec.errors import EdgespecError
from edgespec.hub import other_programs
from edgespec.hub.names import resolve_model, short_name
from edgespec.hub.ollama import ADAPTER, MODEL
from edgespec.hub.other_programs import llama_cpp_folder, lm_studio_folders, ollama_folders
from edgespec.hub.places import program_places
from tests.hub import Cache
from tests.offload.gguf.test_refused import TINY

CONTENT = (TINY / "llama.gguf").read_bytes()
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def pull(folder: Path, place: str, *, content: bytes = CONTENT, more: tuple[dict[str, Any], ...] = ()) -> Path:
    """Ollama's folder with one more model."""
    blob = folder / "blobs" / f"sha256-{DIGEST}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    manifest = folder / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layer = {"mediaType": MODEL, "digest": f"sha256:{DIGEST}", "size": len(CONTENT)}
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "0" * 64, "size": 1}
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [template, layer, *more]}))
    return blob


@pytest.fixture
def folder(cache: Cache) -> Path:
    home = other_programs.home_folder()
    assert home is not None
    return home / ".ollama/models"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("registry.ollama.ai/library/qwen3/latest", "ollama:qwen3"),
        ("registry.ollama.ai/library/qwen3/latest", "ollama:qwen3:latest"),
        ("registry.ollama.ai/library/qwen3/0.6b", "ollama:qwen3:0.6b"),
        ("registry.ollama.ai/me/own/v1", "ollama:me/own:v1"),
        ("hf.co/acme/One-GGUF/Q4_K_M", "ollama:hf.co/acme/One-GGUF:Q4_K_M"),
        ("localhost:5000/a/b/c", "ollama:localhost:5000/a/b:c"),
    ],
)
def test_a_name_means_the_models_layer_of_its_manifest(place: str, name: str, folder: Path) -> None:
    if ":" in place and sys.platform == "win32":
        pytest.skip("no name of a folder there")
    draft = {"mediaType": "application/vnd.ollama.image.projector", "digest": "sha256:" + "1" * 64, "size": 1}
    blob = pull(folder, place, more=(draft,))
    assert resolve_model(name) == blob
    assert resolve_model("mine", aliases={"mine": name}) == blob
    assert resolve_model(short_name(blob)) == blob
    assert short_name(blob) in {name, f"{name}:latest"}
    with pytest.raises(EdgespecError, match="does not apply to the file"):
        resolve_model(name, revision="v2")


@pytest.mark.parametrize("sign", ["-", ":"])
def test_blobs_of_older_versions_have_a_colon(sign: str, folder: Path) -> None:
    blob = pull(folder, "registry.ollama.ai/library/a/latest")
    there = blob.rename(blob.with_name(f"sha256{sign}{DIGEST}"))
    assert resolve_model("ollama:a") == there


BESIDE = {"mediaType": ADAPTER, "digest": f"sha256:{DIGEST}", "size": len(CONTENT)}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "an adapter": ({"more": (BESIDE,)}, "E_ADAPTER", "with an adapter"),
    "two models": ({"more": ({"mediaType": MODEL},)}, "E_MODEL_NOT_FOUND", "has 2 GGUF files"),
    "a part of a download": ({"content": CONTENT[:-9]}, "E_SHARD_TRUNCATED", f"of {len(CONTENT)}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_ollama_would_run_in_another_way_is_refused(name: str, folder: Path) -> None:
    changes, code, what = WRONG[name]
    pull(folder, "registry.ollama.ai/library/a/latest", **changes)
    with pytest.raises(EdgespecError, match=what) as caught:
        resolve_model("ollama:a")
    assert caught.value.code == code
    if code == "E_ADAPTER":
        assert str(folder / "blobs" / f"sha256-{DIGEST}") in caught.value.fix


@pytest.mark.parametrize(
    ("layers", "code", "what"),
    [
        ([{"mediaType": MODEL, "digest": "sha256:../../../../etc/passwd"}], "E_CONFIG_INVALID", "none of SHA-256"),
        ([{"mediaType": MODEL, "digest": "sha256:" + "2" * 64}], "E_SHARD_MISSING", "is missing"),
        ([], "E_MODEL_NOT_FOUND", "has no GGUF file"),
        ("text", "E_CONFIG_INVALID", "no list"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(layers: Any, code: str, what: str, folder: Path) -> None:
    pull(folder, "registry.ollama.ai/library/a/latest")
    (folder / "manifests/registry.ollama.ai/library/a/latest").write_text(json.dumps({"layers": layers}))
    with pytest.raises(EdgespecError, match=what) as caught:
        resolve_model("ollama:a")
    assert caught.value.code == code
    (folder / "manifests/registry.ollama.ai/library/a/latest").write_text("{")
    with pytest.raises(EdgespecError, match="no manifest of Ollama's"):
        resolve_model("ollama:a")


@pytest.mark.parametrize("name", ["ollama:", "ollama:../x", "ollama:a:b:c", "ollama:a/../../b", "ollama:/etc/passwd"])
def test_what_can_be_no_name_is_none(name: str, folder: Path) -> None:
    with pytest.raises(EdgespecError, match=r"is no name of Ollama's|is not among Ollama's models"):
        resolve_model(name)


def test_names_near_one_that_is_not_there_are_told(folder: Path) -> None:
    pull(folder, "registry.ollama.ai/library/qwen3/8b")
    with pytest.raises(EdgespecError, match=r"there are ollama:qwen3:8b\. ollama pull qwen3:4b"):
        resolve_model("ollama:qwen3:4b")


def test_all_are_listed_and_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blob = pull(folder, "registry.ollama.ai/library/a/latest")
    llama, studio = llama_cpp_folder(), next(lm_studio_folders())
    assert llama is not None
    for path in (llama / "acme_m.gguf", studio / "acme/m/m.gguf"):
        path.parent.mkdir(parents=True)
        path.write_bytes(CONTENT)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    listed = dict(program_places())
    assert listed == {
        str(llama / "acme_m.gguf"): llama / "acme_m.gguf",
        str(studio / "acme/m/m.gguf"): studio / "acme/m/m.gguf",
        "ollama:a:latest": folder / "manifests/registry.ollama.ai/library/a/latest",
    }
    check = check_other_programs()
    assert f"llama.cpp: 1 in {llama}" in check.text
    assert f"Ollama: 1 in {folder}" in check.text
    assert sum(place["bytes"] for place in check.facts["places"]) == 3 * blob.stat().st_size
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_folders_are_those_of_the_programs_own_rules(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr(sys, "platform", "linux")
    assert llama_cpp_folder() == home / ".cache/llama.cpp"
    assert list(ollama_folders()) == [home / ".ollama/models", tmp_path / "system-ollama"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert llama_cpp_folder() == tmp_path / "xdg/llama.cpp"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert llama_cpp_folder() == home / "Library/Caches/llama.cpp"
    assert list(ollama_folders()) == [home / ".ollama/models"]
    monkeypatch.setattr(sys, "platform", "win32")
    assert llama_cpp_folder() is None
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert llama_cpp_folder() == tmp_path / "local/llama.cpp"
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "own"))
    assert llama_cpp_folder() == tmp_path / "own"
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    assert next(ollama_folders()) == tmp_path / "ollama"
    assert list(lm_studio_folders()) == [home / ".lmstudio/models", home / ".cache/lm-studio/models"]
    (home / ".lmstudio").mkdir(parents=True)
    (home / ".lmstudio/settings.json").write_text(json.dumps({"downloadsFolder": str(tmp_path / "large")}))
    assert next(lm_studio_folders()) == tmp_path / "large"
    (home / ".lmstudio/settings.json").write_text("[]")
    assert next(lm_studio_folders()) == home / ".lmstudio/models"
    monkeypatch.setattr(other_programs, "home_folder", lambda: None)
    assert list(lm_studio_folders()) == []
