"""What is kept in the format and is no model is refused by what it is."""

from pathlib import Path
from typing import Any

import pytest

from offload.errors import CheckpointError
from offload.gguf.header import read_gguf
from offload.gguf.kinds import bytes_by_type, check_is_model, recipe
from tests.offload.gguf.files import write_gguf
from tests.offload.gguf.test_refused import TINY

WEIGHT = ("token_embd.weight", (2, 32), 0, bytes(256))
OTHERS: dict[str, tuple[dict[str, Any], list[Any], str, str]] = {
    "a projector": ({"general.architecture": "clip"}, [WEIGHT], "E_MODEL_NOT_FOUND", "projector"),
    "a projector by type": ({"general.type": "mmproj"}, [WEIGHT], "E_MODEL_NOT_FOUND", "projector"),
    "an importance matrix": ({"general.type": "imatrix"}, [WEIGHT], "E_MODEL_NOT_FOUND", "importance matrix"),
    "an adapter": ({"general.architecture": "llama", "general.type": "adapter"}, [WEIGHT], "E_ADAPTER", "adapter"),
    "an adapter of old": ({"adapter.type": "lora"}, [WEIGHT], "E_ADAPTER", "adapter"),
    "an adapter by its tensors": (
        {"general.architecture": "llama"}, [("blk.0.q.weight.lora_a", (2, 32), 0, bytes(256))], "E_ADAPTER", "LoRA",
    ),
    "a control vector": ({"general.architecture": "controlvector"}, [WEIGHT], "E_MODEL_NOT_FOUND", "control vector"),
    "a vocabulary": ({"general.architecture": "llama"}, [], "E_MODEL_NOT_FOUND", "vocabulary alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_model_is_refused_by_what_it_is(name: str, tmp_path: Path) -> None:
    settings, tensors, code, what = OTHERS[name]
    with pytest.raises(CheckpointError, match=what) as caught:
        check_is_model(read_gguf(write_gguf(tmp_path / "a.gguf", settings, tensors)))
    assert caught.value.code == code


def test_a_model_is_one_and_says_its_types() -> None:
    header = read_gguf(TINY / "llama-q8_0.gguf")
    check_is_model(header)
    found = bytes_by_type(header)
    assert list(found) == ["Q8_0", "F32"]
    assert sum(found.values()) == sum(tensor.num_bytes for tensor in header.tensors.values())
    assert recipe(header) == "Q8_0"


def test_a_recipe_that_is_not_stated_is_the_type_of_most_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"general.architecture": "llama", "general.file_type": 1024}, [WEIGHT])
    assert recipe(read_gguf(path)) == "F32"
