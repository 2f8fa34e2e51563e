"""Texts of recurrent targets and drafts are those of plain decoding, also where they go on from rows that were kept."""

from pathlib import Path

import pytest

from edgespec.config import MemoryLimits, SamplingSettings
from edgespec.engine import Engine
from edgespec.tree.settings import TreeSettings
from tests.edgespec.model.reader import KINDS
from tests.support.families import RECURRENT, make_model, save_folder

PROMPT = [7 * number % 256 for number in range(50)]
NUM_TOKENS = 22  # the prompt's pass yields one, and three passes over chains of six yield seven each


def open_engine(folder: Path, tree: TreeSettings, *, streams: bool = False) -> Engine:
    """The target is its own draft: as one that has learnt the text, it has long paths accepted."""
    own = None if tree.policy == "none" else folder
    limits = MemoryLimits(max_resident_layers=0) if streams else None
    return Engine.from_pretrained(folder, draft=own, limits=limits, context_tokens=512, parallel=4, tree=tree)


@pytest.mark.parametrize("family", RECURRENT)
def test_long_paths_are_accepted_and_the_text_is_that_of_plain_decoding(family: str, tmp_path: Path) -> None:
    """Texts in company, warm ones among them, for one family of each kind of layer; a greedy text of the others."""
    folder = save_folder(tmp_path, make_model(RECURRENT[family]()))
    with open_engine(folder, TreeSettings(policy="none")) as engine:
        requests = [
            engine.request(PROMPT[: 50 - number], max_new_tokens=NUM_TOKENS, seed=number, temperature=temperature)
            for number, temperature in enumerate((0.0, 0.8) if family in KINDS else (0.0,))
        ]
        if family in KINDS:  # samples of one prompt: the second begins on rows of the first
            requests += [
                engine.request(PROMPT, max_new_tokens=NUM_TOKENS, seed=number, temperature=1.0) for number in (8, 9)
            ]
        expected = [result.token_ids for _, result in sorted(engine.generate_many(requests), key=lambda each: each[0])]
    with open_engine(folder, TreeSettings(policy="chain", draft_tokens=6, lookup=False), streams=True) as engine:
        results = [result for _, result in sorted(engine.generate_many(requests), key=lambda each: each[0])]
    assert [result.token_ids for result in results] == expected
    assert (results[0].tokens_per_pass or 0) > 6  # at temperature 0


@pytest.mark.parametrize(("family", "policy"), [*((family, "adaptive") for family in KINDS[1::2]), (KINDS[0], "none")])
def test_turns_go_on_from_what_states_reach_and_read_the_rest(family: str, policy: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, make_model(RECURRENT[family]()))
    plain = TreeSettings(policy="none")
    with (
        open_engine(folder, plain if policy == "none" else TreeSettings(size=9)) as engine,
        open_engine(folder, plain) as fresh,
    ):
        # More tokens than a state lags behind its rows
        chat = engine.chat(raw=True, sampling=SamplingSettings(temperature=0.0), max_new_tokens=20)

        def check(num_cached: int | None = None) -> None:
            *before, answer = chat.messages
            prompt = chat.prompt_ids(tuple(before))
            assert answer.token_ids == fresh.generate(prompt, temperature=0.0, max_new_tokens=20).token_ids
            assert chat.last is not None
            if num_cached is not None:
                assert chat.last.steps[0].num_cached >= num_cached

        chat.send("class Parser:\n    def __init__(self, text: str) -> None:")
        check()
        chat.send("and another method, please, that is longer than the first one was")
        check(70)
        list(chat.regenerate())
        check(70)
        list(chat.edit("no: a function"))
        check()
        chat.undo()
        chat.send("def main() -> None:")
        check()
