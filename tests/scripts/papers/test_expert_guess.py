"""Experts read ahead by a guess, for a tiny mixture: the texts are the same, and the perfect guess is right."""

from collections import deque
from pathlib import Path

from edgespec import Engine, MemoryLimits, TreeSettings
from scripts.papers.expert_guess import WAYS, Guessing
from tests.offload.experts.mixtures import save_mixture


def test_guesses_change_no_text_and_the_perfect_one_is_asked_for(tmp_path: Path) -> None:
    target = save_mixture(tmp_path, "qwen3-moe")
    known: deque[list[int]] = deque()
    texts, guesses = [], []
    for way in WAYS:  # the first notes what the last knows
        limits = MemoryLimits(max_resident_layers=0)
        with Engine.from_pretrained(target, tree=TreeSettings(policy="none"), limits=limits) as engine:
            guesses.append(Guessing(engine.target_model.model, way, known))
            texts.append(engine.generate(list(range(9)), max_new_tokens=6, seed=1).token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert [guess.guessed > 0 for guess in guesses] == [False, True, True]
    assert guesses[2].useful == guesses[2].guessed
    assert not known
