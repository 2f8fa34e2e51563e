"""What a GGUF file says of sampling is what a generation_config.json would say."""

from pathlib import Path
from typing import Any

import pytest

from edgespec.pair.generation_config import undone_note
from offload.gguf.header import read_gguf
from offload.gguf.settings import generation_fields
from tests.offload.gguf.files import write_gguf


def fields(path: Path, **stated: Any) -> dict[str, Any]:
    settings = {f"general.sampling.{name}": value for name, value in stated.items()}
    return generation_fields(read_gguf(write_gguf(path / "a.gguf", settings, [])))


def test_samplers_have_their_names(tmp_path: Path) -> None:
    assert fields(tmp_path, temp=0.6, top_k=20, top_p=0.95, min_p=0.05, penalty_repeat=1.1) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "do_sample": True,
    }  # fmt: skip
    assert fields(tmp_path) == {}
    assert fields(tmp_path, temp=0.0, top_k=20)["do_sample"] is False
    assert "do_sample" not in fields(tmp_path, penalty_repeat=1.1)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"mirostat": 2, "mirostat_tau": 5.0}, "a.gguf asks for mirostat=2, mirostat_tau=5.0"),
        ({"mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0.0, "xtc_threshold": 0.1}, None),
        ({"xtc_probability": 0.5}, "xtc_probability=0.5"),
        ({"penalty_last_n": 64}, None),
        ({"penalty_last_n": 64, "penalty_repeat": 1.1}, "penalty_last_n=64"),
        ({"sequence": "kmx"}, "sequence="),
        ({"temp": 0.7, "top_k": 3}, None),
    ],
)
def test_what_is_not_done_is_said(stated: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    note = undone_note(fields(tmp_path, **stated), tmp_path / "a.gguf")
    assert (note is None) == (said is None)
    assert said is None or said in str(note)


def test_tokens_that_never_come_are_those_of_the_file(tmp_path: Path) -> None:
    settings = {"tokenizer.ggml.suppress_tokens": [3, 4], "tokenizer.ggml.eos_token_id": 2}
    found = generation_fields(read_gguf(write_gguf(tmp_path / "a.gguf", settings, [])))
    assert found == {"suppress_tokens": [3, 4], "eos_token_id": [2]}
