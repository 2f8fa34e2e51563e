"""A published checkpoint runs in the order of the CPU's kernels without a setting, and as it is where that fails."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgespec import Engine, TreeSettings
from offload.layouts.int4 import Int4
from offload.layouts.int4_orders import kernel_order
from offload.layouts.known import kernel_of
from offload.layouts.nf4_cpu import Nf4Cpu, kernel_is_there
from tests.offload.formats import definitions
from tests.offload.formats.bitsandbytes_checkpoints import published as publish_bitsandbytes
from tests.offload.formats.definitions import PUBLISHED
from tests.offload.formats.published_checkpoints import WHOLE_BLOCKS, publish
from tests.offload.streaming import CPU, skeleton_of, streamed_logits, unlimited_placement
from tests.support.families import make_model, save_folder

NUM_MATRICES = 7 * WHOLE_BLOCKS.num_hidden_layers
PROMPT, NUM_TOKENS = "def main(", 24
LARGEST_ERROR = 0.1  # of a logarithm of a probability, by rounding to bf16
needs_int4 = pytest.mark.skipif(kernel_order() is None, reason="torch has no such kernel for this processor")
needs_nf4 = pytest.mark.skipif(not kernel_is_there(), reason="bitsandbytes has no such kernel for this processor")


def published(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(definitions, "GROUP", 32)
    save_folder(folder, make_model(WHOLE_BLOCKS, dtype=torch.bfloat16))
    publish_bitsandbytes(folder, form) if form.startswith("nf4") else publish(folder, PUBLISHED[form])
    return folder


def opened(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, tree=TreeSettings(policy="none"), context_tokens=96, device="cpu", **options)


def drawn(folder: Path, **options: Any) -> tuple[list[int], Tensor]:
    """A text at temperature 1: its ids, and what each token's logarithm of the probability was."""
    with opened(folder, **options) as engine:
        found = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=3, logprobs=0)
        return list(found.token_ids), torch.tensor([token.logprob for token in found.logprobs])


def expected_logprobs(folder: Path, text: list[int]) -> Tensor:
    """Those of the same tokens in float32, with the weights that were published."""
    skeleton = skeleton_of(folder)
    with opened(folder, quant="none") as engine:
        prompt = engine.encode(PROMPT)
    logits = streamed_logits(skeleton, unlimited_placement(skeleton), ids=[*prompt, *text])[0]
    before = logits[len(prompt) - 1 : -1].log_softmax(-1)  # [tokens, vocab]
    return before.gather(-1, torch.tensor(text)[:, None])[:, 0]


@pytest.mark.parametrize(
    "form",
    [
        *(pytest.param(form, marks=needs_int4) for form in ("awq", "gptq", "gptq-act-order", "compressed-int4-zeros")),
        pytest.param("nf4-nested", marks=needs_nf4),
    ],
)
def test_its_text_is_that_of_the_published_weights_and_nothing_is_unpacked(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = published(tmp_path / "model", form, monkeypatch)
    kind = Nf4Cpu if form.startswith("nf4") else Int4
    kernel_of(kind(), (64, 64), torch.bfloat16, CPU)  # which is timed once, beside unpacking
    own, num_products = kind.multiply_packed, []
    monkeypatch.setattr(kind, "multiply_packed", lambda *about: num_products.append(1) or own(*about))
    monkeypatch.setattr(kind, "unpack", lambda *_: pytest.fail("a weight was unpacked"))
    all_products = NUM_MATRICES * NUM_TOKENS
    for options, products in (({}, all_products), ({"quant": "none", "dtype": "bfloat16"}, 0)):
        num_products.clear()
        text, logprobs = drawn(folder, **options)
        assert len(num_products) >= products
        assert bool(num_products) == bool(products)
        assert len(set(text)) > NUM_TOKENS // 3
        torch.testing.assert_close(logprobs, expected_logprobs(folder, text), rtol=0, atol=LARGEST_ERROR)


@needs_int4
def test_it_is_read_as_it_is_published_where_the_cache_has_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = published(tmp_path / "model", "awq", monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with opened(folder) as engine:
        assert (engine.run_config.quant, engine.run_config.dtype) == ("repacked", torch.bfloat16)
    assert "packed weights are used as they are published, which is slower" in caplog.text
    text, logprobs = drawn(folder)
    torch.testing.assert_close(logprobs, expected_logprobs(folder, text), rtol=0, atol=LARGEST_ERROR)
