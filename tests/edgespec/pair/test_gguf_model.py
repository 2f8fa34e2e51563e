"""A GGUF file is a target and a draft as a folder is: texts are those of its weights, in memory or streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.cli import run
from edgespec.errors import EdgespecError
from edgespec.pair.folder import fingerprint, open_architecture, open_model
from edgespec.pair.pair import open_pair
from offload.gguf.header import TextList, read_gguf
from tests.offload.gguf.files import write_gguf
from tests.offload.gguf.test_tiny_models import NAMES, TINY, weights
from tests.support.families import greedy_tokens

PROMPT, LENGTH = list(range(3, 15)), 12


FILES = (
    "llama-q8_0",
    "qwen3moe-q8_0",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "llama4",
    "llama4-q8_0",
    "lfm2moe",
)


@pytest.mark.parametrize("name", [name for name in FILES if name in NAMES])
def test_greedy_texts_are_transformers_own(name: str) -> None:
    file = TINY / f"{name}.gguf"
    model = AutoModelForCausalLM.from_config(open_model(file).config, dtype=torch.float32).eval()
    model.load_state_dict(weights(file))
    ends = sorted(open_pair(file, None).stop_tokens)
    theirs = greedy_tokens(model, PROMPT, LENGTH, eos_token_id=ends, pad_token_id=0)
    for draft, resident in ((None, None), (None, 0), (file, 0)):
        tree = TreeSettings(policy="none") if draft is None else TreeSettings(size=4)
        with Engine.from_pair(
            open_pair(file, draft), tree=tree, limits=MemoryLimits(max_resident_layers=resident), device="cpu",
            dtype="float32", context_tokens=64,
        ) as engine:  # fmt: skip
            result = engine.generate(PROMPT, max_new_tokens=LENGTH, sampling=SamplingSettings(temperature=0), seed=0)
        assert list(result.token_ids) == theirs


def test_files_that_differ_have_other_fingerprints(tmp_path: Path) -> None:
    content = bytearray((TINY / "llama.gguf").read_bytes())
    copy, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    copy.write_bytes(content)
    content[-1] ^= 1
    other.write_bytes(content)
    assert fingerprint(open_model(copy)) == fingerprint(open_model(TINY / "llama.gguf"))
    assert fingerprint(open_model(copy)) != fingerprint(open_model(other))


def with_settings(path: Path, **more: Any) -> Path:
    """A copy of the small file that states more."""
    header = read_gguf(TINY / "llama.gguf")
    settings = {key: found.read() if isinstance(found, TextList) else found for key, found in header.settings.items()}
    content = header.path.read_bytes()
    tensors = [
        (name, one.shape, one.block.number, content[one.offset : one.offset + one.num_bytes])
        for name, one in header.tensors.items()
    ]
    return write_gguf(path, {**settings, **more}, tensors)


def test_sampling_that_a_file_asks_for_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.mirostat": 2}
    file = with_settings(tmp_path / "a.gguf", **sampling)
    pair = open_pair(file, None)
    assert pair.default_sampling() == SamplingSettings(temperature=0.6, top_k=20, top_p=1.0, min_p=0.0)
    assert pair.notes == ("a.gguf asks for mirostat=2, which is not done here",)
    assert open_pair(TINY / "llama.gguf", None).default_sampling() == SamplingSettings()
    monkeypatch.setenv("EDGESPEC_MODEL", str(file))
    assert run(["config", "show"]) == 0
    assert "top_k = 20\n" in capsys.readouterr().out
    wrong = with_settings(tmp_path / "b.gguf", **{"general.sampling.temp": -1.0})
    with pytest.raises(EdgespecError, match=r"'.*b\.gguf' asks for sampling that makes no sense"):
        open_pair(wrong, None).default_sampling()


def cut(name: str, path: Path, *, kept: int) -> Path:
    """The head of a tiny model's file, with some bytes of its tensors."""
    header = read_gguf(TINY / f"{name}.gguf")
    start = min(tensor.offset for tensor in header.tensors.values())
    path.write_bytes(header.path.read_bytes()[: start + kept])
    return path


def test_a_header_alone_is_planned_and_not_run(tmp_path: Path) -> None:
    whole, head = open_model(TINY / "qwen2.gguf"), cut("qwen2", tmp_path / "head.gguf", kept=0)
    planned = open_architecture(head)
    assert planned.checkpoint.num_bytes == whole.checkpoint.num_bytes == planned.missing_bytes
    assert planned.config.to_dict() == whole.config.to_dict()
    assert "planned from its header" in planned.notes[0]
    assert (whole.missing_bytes, whole.notes) == (0, ())
    with pytest.raises(EdgespecError, match="is truncated: tensor") as caught:
        open_model(head)
    assert caught.value.code == "E_SHARD_TRUNCATED"


def test_a_header_whose_settings_are_cut_off_is_not_planned(tmp_path: Path) -> None:
    with pytest.raises(EdgespecError, match=r"is truncated before 'rope_freqs\.weight'"):
        open_architecture(cut("llama-3", tmp_path / "head.gguf", kept=0))
