"""One seed, one text, in bf16 on a CPU: a row has the bits of plain decoding in any tree and any company."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgespec import Engine, MemoryLimits
from edgespec.model.pass_rows import next_rows
from tests.conftest import RECURRENT, VOCAB, make_model
from tests.support.row_bits import let_states_last, num_with_other_bits

KINDS = ["lfm2", "qwen3-next", "falcon-h1", "mamba2"]
TINY = Path(__file__).parents[2] / "offload/gguf/tiny"
TEXTS, PROMPT, ROWS = 24, 5, 5  # together more rows than are multiplied sooner with unpacked weights


@pytest.mark.parametrize("family", KINDS)
def test_a_row_has_the_same_bits_in_any_tree_and_in_what_follows(family: str) -> None:
    """Where a state is kept."""
    model = make_model(RECURRENT[family](), dtype=torch.bfloat16)
    let_states_last(model)
    assert num_with_other_bits(model, vocab=VOCAB - 1, tokens=16) == 0


@pytest.mark.parametrize(
    "name", ["llama-q8_0", "qwen3moe-q8_0", "granitemoe-q8_0", "deepseek2-q8_0", "llama4-q8_0", "qwen3next-q8_0"]
)
def test_rows_of_streamed_blocks_have_their_bits_beside_those_of_many_texts_and_a_long_prompt(name: str) -> None:
    """A processor with units for bf16 unpacks such weights for the rows of a long prompt, and for those alone."""
    numbers = torch.Generator().manual_seed(0)
    with Engine.from_pretrained(
        TINY / f"{name}.gguf", draft="none", device="cpu", dtype="bfloat16", context_tokens=256, parallel=TEXTS + 1,
        limits=MemoryLimits(max_resident_layers=0), self_check=False,
    ) as engine:  # fmt: skip
        target = engine.target_model
        ids = torch.randint(0, target.num_embeddings, (TEXTS, PROMPT + ROWS), generator=numbers)
        long = torch.randint(0, target.num_embeddings, (100,), generator=numbers)

        def read(texts: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
            caches = [target.new_text() for _ in texts]
            for cache, text in zip(caches, texts, strict=True):
                target.read([next_rows(cache, text[:PROMPT])])
                cache.commit_next(text[:PROMPT].tolist())
            parts = [next_rows(cache, text[PROMPT:]) for cache, text in zip(caches, texts, strict=True)]
            hidden = torch.cat(target.read([*parts, *(next_rows(target.new_text(), other) for other in others)]))
            return hidden, target.logits(hidden)

        alone = read(ids[:1])
        for company in (read(ids), read(ids[:1], long)):
            assert all(torch.equal(one, other[:ROWS]) for one, other in zip(alone, company, strict=True))
