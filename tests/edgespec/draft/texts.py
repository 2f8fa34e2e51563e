"""What texts with a published draft must be: plain decoding's, in company and after a text that was cancelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec import Engine, TreeSettings
from edgespec.pair.pair import open_pair
from edgespec.text.request import TextRequest

PROMPT = "def read(path):\n    return "
GREEDY_AND_WARM: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_new_tokens": 16},
    {"temperature": 0.8, "max_new_tokens": 16, "seed": 3},
)
# Whose draft grows in every step: beside looked up text, the clock may leave it out
DRAFTED = TreeSettings(size=12, lookup=False)
POLICIES = [
    replace(tree, lookup=False)
    for tree in (
        TreeSettings(policy="adaptive", size=12),
        TreeSettings(policy="dyspec", size=12),
        TreeSettings(policy="opt-tree", size=12),
        TreeSettings(policy="eagle2", size=12),
        TreeSettings(policy="c2t", size=12),
        TreeSettings(policy="sequoia", size=12),
        TreeSettings(policy="specinfer", branching=(3, 2, 1)),
        TreeSettings(policy="mcsd", branching=(3, 2, 1)),
        TreeSettings(policy="chain", draft_tokens=4),
    )
]


def name_of(tree: TreeSettings) -> str:
    """The name of trees in a test's id."""
    return f"{tree.policy}-{tree.draw or 'own'}"


def open_engine(target: Path, draft: Path | None, **options: Any) -> Engine:
    settings = {"context_tokens": 160, "self_check": False, "draft_check": False, "dtype": "float32", **options}
    return Engine.from_pair(open_pair(target, draft), **settings)


def requests_of(engine: Engine) -> list[TextRequest]:
    """Four texts of several lengths, greedy and warm in turn."""
    return [
        engine.request(PROMPT[number:], temperature=0.8 * (number % 2), max_new_tokens=12 + number, seed=number)
        for number in range(4)
    ]


def check_company(target: Path, draft: Path, **options: Any) -> None:
    """Texts are what they are alone, and without a draft; each takes the steps that it takes alone."""
    with open_engine(target, None) as engine:
        plain = [engine.submit(request).result() for request in requests_of(engine)]
    with open_engine(target, draft, tree=DRAFTED, parallel=4, **options) as engine:
        requests = requests_of(engine)
        alone = [engine.submit(request).result() for request in requests]
        together = dict(engine.generate_many(requests))
    for number, expected in enumerate(alone):
        found = together[number]
        assert not isinstance(found, Exception)
        assert found.token_ids == expected.token_ids == plain[number].token_ids
        assert [step.path for step in found.steps] == [step.path for step in expected.steps]


def check_after_cancel(target: Path, draft: Path, **others: Any) -> None:
    """A turn begins on rows that both models have: what is drafted does not depend on how they came to be."""
    first, second = PROMPT * 3, PROMPT * 2 + "def write(path):"
    options: dict[str, Any] = {"tree": DRAFTED, "context_tokens": 256, **others}
    with open_engine(target, draft, **options) as engine:
        handle = engine.submit(engine.request(first, max_new_tokens=40, temperature=0.0))
        for _ in zip(range(3), handle, strict=False):
            pass
        handle.cancel()
        engine.generate(first, max_new_tokens=9, temperature=0.0)
        found = engine.generate(second, max_new_tokens=12, temperature=0.0)
    with open_engine(target, draft, **options) as engine:
        expected = engine.generate(second, max_new_tokens=12, temperature=0.0)
    assert found.token_ids == expected.token_ids
    assert [step.path for step in found.steps] == [step.path for step in expected.steps]
