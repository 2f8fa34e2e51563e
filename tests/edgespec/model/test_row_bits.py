"""One seed, one text, in bf16 on a CPU: a row has the bits of plain decoding in any tree and any company."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from edgespec import Engine, MemoryLimits
from edgespec.model.pass_rows import PassRows, by_length, next_rows
from tests.support.families import RECURRENT, VOCAB, make_model
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


@pytest.mark.parametrize("length", [256 + 1, 256 + 80, 256 + 81, 2 * 256 + 44])
@pytest.mark.parametrize("name", [None, "granitemoe-q8_0"])
def test_rows_of_a_prompt_have_the_same_bits_in_whatever_parts_and_company_it_is_read(
    name: str | None, length: int
) -> None:
    """What a part has goes by the clock. Few rows behind a part may pass natively; experts, unpacked, in many rows."""
    numbers = torch.Generator().manual_seed(length)
    with Engine.from_pretrained(
        None if name is None else TINY / f"{name}.gguf", draft="none", device="cpu", dtype="bfloat16",
        context_tokens=640, parallel=2, self_check=False,
    ) as engine:  # fmt: skip
        target = engine.target_model
        assert target.is_native == (name is None)
        ids = torch.randint(0, target.num_embeddings, (length,), generator=numbers)
        other = torch.randint(0, target.num_embeddings, (300,), generator=numbers)

        def read(part_rows: int, *, in_company: bool = False) -> Tensor:
            cache, found = target.new_text(), []
            cache.prompt_tokens = length
            for part in ids.split(part_rows):
                parts = [next_rows(cache, part)]
                if in_company:  # before it, and behind
                    before, behind = (next_rows(target.new_text(), ids) for ids in (other[:200], other))
                    parts = [before, *parts, behind]
                found.append(target.read(parts)[len(parts) // 2])
                cache.commit_next(part.tolist())
            return torch.cat(found)

        whole = read(length)
        for part_rows in (target.part_rows, 2 * target.part_rows):
            assert torch.equal(read(part_rows), whole)
        assert torch.equal(read(length, in_company=True), whole)


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, 80, (0, 0, 80)),
        (230, 60, (0, 0, 60)),
        (0, 81, (0, 81, 0)),
        (0, 300, (0, 256, 44)),
        (0, 600, (0, 600, 0)),
        (250, 300, (6, 256, 38)),
        (200, 120, (56, 0, 64)),
    ],
)
def test_few_rows_are_what_lies_between_fixed_places(start: int, count: int, expected: tuple[int, int, int]) -> None:
    """Up to 80 of them; the others are one run."""
    positions = torch.arange(start, start + count)
    part = PassRows(cache=SimpleNamespace(length=start), ids=positions, positions=positions)
    runs = by_length(part, 256, 80)
    assert tuple(0 if run is None else run.count for run in runs) == expected
    assert torch.equal(torch.cat([run.positions for run in runs if run is not None]), positions)
