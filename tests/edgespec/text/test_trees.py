"""The trees of texts: where those that tune themselves begin."""

import math
from collections.abc import Sequence

import pytest
import torch

from edgespec import Engine
from edgespec.config import MemoryLimits, SamplingSettings
from edgespec.draft.language_model import LanguageModelDrafter
from edgespec.pair.pair import DEMO_FOLDER, open_pair
from edgespec.placement.pair_setup import set_up
from edgespec.placement.run_config import RunConfig
from edgespec.text import trees
from edgespec.text.trees import READ_TOKENS, Trees
from offload.layouts import int4_orders


def first_size(quant: str | None, dtype: torch.dtype, limits: MemoryLimits) -> int:
    run_config = RunConfig(
        limits=limits, device=torch.device("cpu"), dtype=dtype, quant=quant, context_tokens=64, prompt_tokens=32
    )
    tuner = Trees(set_up(open_pair(DEMO_FOLDER / "target", DEMO_FOLDER / "draft"), run_config)).tuner
    return tuner.choice(SamplingSettings(temperature=0)).limits.size


@pytest.mark.skipif(int4_orders.kernel_order() is None, reason="torch has no kernel here")
def test_trees_begin_small_where_each_row_adds_to_a_pass_from_the_first_on() -> None:
    """Those of weights that are multiplied packed do, unless a pass waits for layers."""
    limits = MemoryLimits()
    assert first_size("int4", torch.bfloat16, limits) == 4
    assert first_size(None, torch.bfloat16, limits) == first_size("nf4", torch.float32, limits) == 8
    assert first_size("int4", torch.bfloat16, MemoryLimits(max_resident_layers=2)) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_texts_of_trees_are_plain_decodings_where_kernels_multiply_packed_weights(dtype: torch.dtype) -> None:
    """Rows of a tree, of a prompt and of a single token have the same bits."""
    with Engine.from_pretrained(quant="int4", dtype=dtype, context_tokens=128) as engine:
        for temperature in (0.0, 0.8):
            (verdict,) = engine.verify_lossless(["def main("], max_new_tokens=24, temperature=temperature, seed=3)
            assert verdict.from_plain is None, temperature


@pytest.mark.parametrize(("quick_s", "expected"), [(math.inf, READ_TOKENS), (0.0, READ_TOKENS[:1])])
def test_what_a_draft_takes_to_read_is_timed_on_a_long_text_where_a_short_one_takes_little(
    quick_s: float, expected: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of few rows is no measure of one over all that sixteen texts have written."""
    begun, begin = list[int](), LanguageModelDrafter.begin

    def note(self: LanguageModelDrafter, ids: Sequence[int]) -> None:
        begun.append(len(ids) - 2)
        begin(self, ids)

    monkeypatch.setattr(LanguageModelDrafter, "begin", note)
    monkeypatch.setattr(trees, "QUICK_S", quick_s)
    with Engine.from_pretrained(context_tokens=64):
        assert begun == [0, *expected]
