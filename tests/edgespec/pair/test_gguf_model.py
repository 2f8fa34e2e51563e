"""A GGUF file is a target and a draft as a folder is: texts are those of its weights, in memory or streamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.pair.folder import fingerprint, open_model
from edgespec.pair.pair import open_pair
from tests.offload.gguf.test_tiny_models import TINY, weights

PROMPT, LENGTH = list(range(3, 15)), 12


@pytest.mark.parametrize("name", ["llama-q8_0", "qwen3moe-q8_0", "gemma3"])
def test_greedy_texts_are_transformers_own(name: str) -> None:
    file = TINY / f"{name}.gguf"
    model = AutoModelForCausalLM.from_config(open_model(file).config, dtype=torch.float32).eval()
    model.load_state_dict(weights(file))
    ids = torch.tensor([PROMPT])
    ends = sorted(open_pair(file, None).stop_tokens)
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LENGTH, eos_token_id=ends,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
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
