"""The memory of text that is looked up: in the plan where trees have it, with the corpus, and beside a card in RAM."""

import pytest

from edgespec.config import MemoryLimits
from edgespec.draft.lookup import lookup_bytes
from edgespec.placement.plan import placement_for
from edgespec.tree.settings import TreeSettings

GIB = 1 << 30
USE = "text that is looked up"
SHAPE = {"context_tokens": 1000, "parallel": 4, "corpus_tokens": 5000}


def test_the_plan_counts_the_texts_and_the_corpus_where_trees_have_them() -> None:
    tree = TreeSettings(size=8)
    placement = placement_for(tree=tree, device="cpu", **SHAPE)
    assert placement.device_bytes[USE] == lookup_bytes(4000, num_texts=4, corpus_tokens=5000) > 4 << 20
    assert USE in placement.table()
    assert USE not in placement_for(tree=tree.plain(), device="cpu", **SHAPE).device_bytes
    assert USE not in placement_for(tree=TreeSettings(size=8, lookup=False), device="cpu", **SHAPE).device_bytes


@pytest.mark.parametrize("card_gib", [1, 8])
def test_beside_a_card_it_is_in_ram(card_gib: int) -> None:
    limits = MemoryLimits(max_gpu_bytes=card_gib * GIB, gpu_margin_bytes=0)
    placement = placement_for(tree=TreeSettings(size=8), device="cuda", limits=limits, **SHAPE)
    assert USE not in placement.device_bytes
    assert USE in placement.host_bytes
