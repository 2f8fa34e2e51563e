"""Texts of a mixture are the same whether its experts come on demand, stream with their layers, or stay in memory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, MemoryLimits, TreeSettings
from edgespec.errors import EdgespecError
from edgespec.model.layer_kinds import chosen_experts
from edgespec.placement import memory
from edgespec.placement import place as placing
from edgespec.placement.memory import MIXTURE_ROWS_SHARE
from offload.experts.expert_placement import place_on_demand
from offload.placement import Placement
from tests.offload.experts.mixtures import MIXTURES, save_mixture
from tests.support.families import make_model, save_folder

TREE = TreeSettings(size=9)
ROOM = 2  # experts at a time: fewer than a layer's, whose rows ask for all


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit that leaves few experts in memory."""

    def place(*arguments: Any, **memory: Any) -> Placement:
        found = place_on_demand(*arguments, **memory)
        assert found.experts is not None
        return dataclasses.replace(found, experts=dataclasses.replace(found.experts, num_kept=ROOM))

    monkeypatch.setattr(placing, "place_on_demand", place)


def texts(target: Path, draft: Path, *, experts: str, resident: int | None, tree: TreeSettings) -> Sequence[Any]:
    """The tokens of three texts that share passes; prompts pass a layer in three chunks, and attention in parts."""
    limits = MemoryLimits(max_resident_layers=resident)
    prompts = [list(range(5)), list(range(60, 90)), [(7 * number) % 251 for number in range(100)]]
    with Engine.from_pretrained(
        target, draft=draft, limits=limits, context_tokens=160, parallel=3, tree=TREE, experts=experts
    ) as engine:
        assert (engine.placement.experts is not None) == (experts in {"auto", "cpu"} and resident == 0)
        engine.use_tree(tree)
        engine._loaded.target._chunk_rows, engine._loaded.target.layer_rows = 20, 50
        requests = [
            engine.request(prompt, max_new_tokens=12, seed=3, name=str(number), temperature=0.8)
            for number, prompt in enumerate(prompts)
        ]
        return sorted((place, result.token_ids) for place, result in engine.generate_many(requests))


PLACES = (("auto", TREE.plain()), ("stream", TREE), ("cpu", TREE))


@pytest.mark.parametrize("family", MIXTURES)
def test_texts_are_those_of_experts_in_memory(family: str, draft: Path, tmp_path: Path, little_room: None) -> None:
    """Through trees over experts on demand; and in one of three other ways, which families have in turn."""
    target = save_mixture(tmp_path / "target", family)
    experts, tree = PLACES[list(MIXTURES).index(family) % len(PLACES)]
    expected = texts(target, draft, experts="resident", resident=None, tree=TREE.plain())
    assert texts(target, draft, experts="auto", resident=0, tree=TREE) == expected
    assert texts(target, draft, experts=experts, resident=0, tree=tree) == expected


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_prompt_requests_each_expert_once(family: str, tmp_path: Path) -> None:
    """Where the memory allows it, its rows pass a mixture's layer together; in chunks each would be unpacked again."""
    config = MIXTURES[family]()
    config.max_position_embeddings = 2048
    target = save_folder(tmp_path, make_model(config))
    limits = MemoryLimits(max_resident_layers=0)
    asked = []
    for share in (MIXTURE_ROWS_SHARE, 1 << 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "MIXTURE_ROWS_SHARE", share)
            with Engine.from_pretrained(target, tree=TREE.plain(), limits=limits, context_tokens=1300) as engine:
                engine.generate([number % 251 for number in range(1200)], max_new_tokens=1)
                asked.append(engine._loaded.expert_counts.asked)
    num_mixtures = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    num_experts, _ = chosen_experts(config)
    experts = num_mixtures * (num_experts or 0)
    assert asked == [experts, 3 * experts]


def test_experts_that_are_to_be_resident_and_do_not_fit_are_one_error(tmp_path: Path) -> None:
    target = save_mixture(tmp_path, "qwen3-moe")
    limits = MemoryLimits(max_resident_layers=1)
    with pytest.raises(EdgespecError, match="1 of 3 layers") as caught:
        Engine.from_pretrained(target, tree=TREE.plain(), limits=limits, experts="resident")
    assert caught.value.code == "E_MEMORY"
    with pytest.raises(EdgespecError, match="`experts=some` is unknown"):
        Engine.from_pretrained(target, tree=TREE.plain(), experts="some")
