"""Which GGUF file is meant by a folder, and by a name of Hugging Face's cache with a type."""

import shutil
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError
from edgespec.hub.gguf_models import files_of, split_tag
from edgespec.hub.names import resolve_model, short_name
from tests.hub import Cache
from tests.offload.gguf.files import write_gguf
from tests.offload.gguf.test_refused import TINY


def put(folder: Path, *names: str, source: str = "llama-q8_0") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TINY / f"{source}.gguf", folder / name)
    return folder


def projector(path: Path) -> None:
    write_gguf(path, {"general.architecture": "clip"}, [("v.weight", (2, 32), 0, bytes(256))])


def test_a_folder_that_holds_one_means_it(tmp_path: Path) -> None:
    folder = put(tmp_path / "a", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert resolve_model(str(folder)) == folder / "m-00001-of-00002.gguf"
    assert set(files_of(folder / "m-00002-of-00002.gguf")) == set(folder.iterdir())
    projector(folder / "mmproj-F16.gguf")
    assert resolve_model(str(folder)) == folder / "m-00001-of-00002.gguf"
    for path in folder.glob("m-*"):
        path.unlink()
    assert resolve_model(str(folder)).name == "mmproj-F16.gguf"  # refused by what it is, where it is opened
    projector(folder / "mmproj-Q8_0.gguf")
    with pytest.raises(EdgespecError, match="none of them is a model"):
        resolve_model(str(folder))


def test_several_are_listed_with_type_and_size_and_a_type_chooses(tmp_path: Path) -> None:
    folder = put(tmp_path / "a", "m.Q4_K_M.gguf", "m.Q4_K_S.gguf", "m-UD-IQ4_XS.gguf", "m_f16.gguf")
    put(folder, "plain.gguf", source="llama")
    with pytest.raises(EdgespecError) as caught:
        resolve_model(str(folder))
    assert caught.value.code == "E_MODEL_NOT_FOUND"
    assert "m.Q4_K_M.gguf (Q8_0, 0.0 MiB), " in caught.value.what
    assert "plain.gguf (F32, 0.1 MiB)" in caught.value.what
    for tag, name in {"q4_k_m": "m.Q4_K_M", "Q4_K_S": "m.Q4_K_S", "IQ4_XS": "m-UD-IQ4_XS", "F16": "m_f16",
                      "F32": "plain"}.items():  # fmt: skip
        assert resolve_model(f"{folder}:{tag}") == folder / f"{name}.gguf"
    for tag, found in {"Q4_K": "none of type 'Q4_K'", "Q4_XS": "none of type", "Q8_0": "4 GGUF models of type"}.items():
        with pytest.raises(EdgespecError, match=found):
            resolve_model(f"{folder}:{tag}")
    with pytest.raises(EdgespecError, match="which has one type"):
        resolve_model(f"{folder / 'plain.gguf'}:F32")


def test_one_that_is_damaged_is_listed_as_that(tmp_path: Path) -> None:
    folder = put(tmp_path / "a", "whole.gguf")
    (folder / "cut.gguf").write_bytes((folder / "whole.gguf").read_bytes()[:-40])
    with pytest.raises(EdgespecError, match=r"cut\.gguf \(not readable: E_SHARD_TRUNCATED"):
        resolve_model(str(folder))


def test_safetensors_beside_them_come_first(tmp_path: Path) -> None:
    folder = put(tmp_path / "a", "m.Q8_0.gguf")
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)) == folder
    assert resolve_model(f"{folder}:Q8_0") == folder / "m.Q8_0.gguf"


def test_a_name_of_the_cache_means_its_file(cache: Cache, tmp_path: Path) -> None:
    snapshot = cache.put("acme/One-GGUF", put(tmp_path / "one", "m.Q8_0.gguf"))
    assert resolve_model("acme/One-GGUF") == snapshot / "m.Q8_0.gguf"
    assert resolve_model(str(snapshot.parents[1])) == snapshot / "m.Q8_0.gguf"
    several = put(tmp_path / "two", "Q8_0/m-00001-of-00002.gguf", "Q8_0/m-00002-of-00002.gguf", "BF16/m.gguf")
    snapshot = cache.put("acme/Two-GGUF", several, ref="v2")
    assert resolve_model("acme/Two-GGUF:q8_0", revision="v2") == snapshot / "Q8_0/m-00001-of-00002.gguf"
    named = {"alias": "acme/Two-GGUF:BF16"}
    assert resolve_model("alias", revision="v2", aliases=named) == snapshot / "BF16/m.gguf"
    assert resolve_model("alias:Q8_0", revision="v2", aliases=named).parent == snapshot / "Q8_0"
    with pytest.raises(EdgespecError, match="none of type 'Q4_0'"):
        resolve_model("alias:Q4_0", revision="v2", aliases=named)
    assert resolve_model("here:Q8_0", aliases={"here": str(several / "BF16")}) == several / "BF16/m.gguf"
    with pytest.raises(EdgespecError, match="which has one type: 'Q8_0' cannot be chosen"):
        resolve_model("file:Q8_0", aliases={"file": str(several / "BF16/m.gguf")})
    with pytest.raises(EdgespecError, match=r"BF16/m.gguf \(Q8_0"):
        resolve_model("acme/Two-GGUF", revision="v2")
    with pytest.raises(EdgespecError, match=r"hf download acme/None --include '\*Q4_0\*.gguf', or"):
        resolve_model("acme/None:Q4_0")
    with pytest.raises(EdgespecError, match="does not apply to the file"):
        resolve_model(str(snapshot / "BF16/m.gguf"), revision="v2")


def test_what_is_no_type_stays_a_name() -> None:
    assert split_tag("C:/models") == ("C:/models", None)
    assert split_tag("C:models") == ("C:models", None)
    assert split_tag("acme/x:Q4_0") == ("acme/x", "Q4_0")
    assert split_tag("acme/x:") == ("acme/x:", None)


def test_a_file_is_known_by_its_first_bytes_where_its_name_says_nothing(tmp_path: Path) -> None:
    folder = put(tmp_path, "sha256-0")
    assert resolve_model(str(folder / "sha256-0")) == folder / "sha256-0"
    assert short_name(folder / "sha256-0") == "sha256-0"
    (folder / "other").write_bytes(b"GGML")
    with pytest.raises(EdgespecError, match="is a file, not a model's folder"):
        resolve_model(str(folder / "other"))
