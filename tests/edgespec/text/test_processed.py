"""The built-in pair with penalties, bias and grammars: any trees give plain decoding's text, alone and together."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.errors import EdgespecError
from edgespec.model.target import Target
from edgespec.sampling.grammar import Grammar
from edgespec.sampling.matcher import GrammarMatcher
from edgespec.text.request import TextRequest
from edgespec.tree.policies import POLICIES

PROMPTS = ("def main(", "import ", "class Point:")
PLAIN = TreeSettings(policy="none")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "c"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 1.2, "frequency_penalty": 0.6},
    "bias": {"logit_bias": {" self": 4, "\n": -100}, "ignore_eos": True},
    "schema": {"json_schema": SCHEMA},
    "grammar and penalty": {"grammar": 'root ::= ("yes" | "no") (", " ("yes" | "no"))*\n', "frequency_penalty": 0.4},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    pytest.importorskip("llguidance")
    with Engine.from_pretrained(context_tokens=256, parallel=6, tree=TreeSettings(size=64)) as found:
        yield found


def requests_of(engine: Engine, *, temperature: float, count: int = 20, **more: Any) -> list[TextRequest]:
    """A text in each way."""
    return [
        engine.request(
            PROMPTS[number % 3], max_new_tokens=count, seed=7, name=name, temperature=temperature, **way, **more
        )
        for number, (name, way) in enumerate(WAYS.items())
    ]


def alone(engine: Engine, requests: list[TextRequest], tree: TreeSettings) -> list[tuple[int, ...]]:
    engine.use_tree(tree)
    return [engine.submit(request).result().token_ids for request in requests]


def together(engine: Engine, requests: list[TextRequest], tree: TreeSettings) -> list[tuple[int, ...]]:
    engine.use_tree(tree)
    found = {}
    for number, result in engine.generate_many(requests):
        assert not isinstance(result, Exception), result
        found[number] = result.token_ids
    return [found[number] for number in range(len(requests))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_policy_gives_plain_decodings_text(engine: Engine, temperature: float, tmp_path: Path) -> None:
    """At temperature 0 by any draw; above, by the text's noise: texts of other draws are compared elsewhere.

    Greedy texts do not read the noise: coupled trees have theirs above 0 alone, where there is another draw.
    """
    (tmp_path / "tree.json").write_text(json.dumps([[0], [1], [0, 0]]))
    requests = requests_of(engine, temperature=temperature, count=10)
    expected = alone(engine, requests, PLAIN)
    assert len(set(expected)) == len(WAYS)
    for name, policy in POLICIES.items():
        for draw in policy.draws:
            if (draw == "coupled") == (temperature > 0) or policy.draws == ("coupled",):
                budget: dict[str, Any] = {} if policy.budget is None else {policy.budget: 12}
                file = {"tree_file": tmp_path / "tree.json"} if policy.uses("tree_file") else {}
                tree = TreeSettings(policy=name, draw=draw, **budget, **file)
                assert together(engine, requests, tree) == expected, (name, draw)


@pytest.mark.parametrize("tree", [TreeSettings(policy="dyspec", size=12), TreeSettings(policy="eagle2", draw="chosen",
                                  size=12)], ids=["sampled", "chosen"])  # fmt: skip
def test_sampled_and_chosen_trees_keep_to_the_grammar_and_the_bias(engine: Engine, tree: TreeSettings) -> None:
    engine.use_tree(tree)
    for seed in range(3):
        made = engine.generate("x = ", max_new_tokens=80, seed=seed, temperature=1.0, json_schema=SCHEMA)
        if made.finish_reason == "stop":
            assert json.loads(made.text).keys() == {"name", "size"}
        one = engine.generate("x = ", max_new_tokens=12, seed=seed, temperature=1.0, grammar='root ::= "yes" | "no"\n')
        assert one.text in {"yes", "no"}
        assert one.finish_reason == "stop"
        text = engine.generate("x = ", max_new_tokens=12, seed=seed, temperature=1.0, **WAYS["bias"])
        assert "\n" not in [engine.pair.tokenizer.decode([token]) for token in text.token_ids]


def test_a_text_that_never_ends_has_its_length(engine: Engine) -> None:
    """A bias would have the end at once; it is never drawn."""
    engine.use_tree(TreeSettings(size=12))
    (end, *_) = engine.pair.stop_tokens
    ended = engine.generate("x = 1", max_new_tokens=9, temperature=0, logit_bias={end: 100})
    assert (ended.finish_reason, ended.token_ids) == ("stop", (end,))
    longer = engine.generate("x = 1", max_new_tokens=9, temperature=0, logit_bias={end: 100}, ignore_eos=True)
    assert (longer.finish_reason, len(longer.token_ids)) == ("length", 9)
    assert end not in longer.token_ids


def test_logprobs_end_where_a_stop_string_ends_the_text(engine: Engine) -> None:
    engine.use_tree(TreeSettings(size=24))
    result = engine.generate("def main(", max_new_tokens=40, temperature=0, stop=")", logprobs=0)
    assert result.finish_reason == "stop"
    assert [told.token for told in result.logprobs] == list(result.token_ids)


@pytest.mark.parametrize("way", WAYS)
def test_where_memory_runs_out_the_text_goes_on_with_what_it_counted(
    engine: Engine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches are begun again on prompt and text together: what is new must stay new."""
    asked = {"max_new_tokens": 24, "seed": 3, "temperature": 0.8, **WAYS[way]}
    engine.use_tree(PLAIN)
    expected = engine.generate("def main(", **asked).token_ids
    engine.use_tree(TreeSettings(size=24))
    read, calls = Target.read, 0

    def fails_twice(self: Target, parts: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in {2, 4}:
            raise torch.OutOfMemoryError("no more")
        return read(self, parts)

    monkeypatch.setattr(Target, "read", fails_twice)
    assert engine.generate("def main(", **asked).token_ids == expected
    assert calls > 4


@pytest.mark.parametrize("asks", ["the draft's root", "a node of the tree"])
def test_a_grammar_that_gives_up_ends_its_own_text_alone(
    engine: Engine, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.use_tree(TreeSettings(size=24))
    others = [request for request in requests_of(engine, temperature=0.8) if request.grammar is None]
    expected = [engine.submit(request).result().token_ids for request in others]
    right, calls = GrammarMatcher.allowed, 0

    def gives_up(self: GrammarMatcher, path: Any) -> Any:
        nonlocal calls
        calls += bool(path) == (asks == "a node of the tree")
        if calls >= 3:
            raise EdgespecError("E_GRAMMAR", "too complex.", "Simplify it.")
        return right(self, path)

    monkeypatch.setattr(GrammarMatcher, "allowed", gives_up)
    failing = engine.request("x = ", max_new_tokens=40, seed=1, json_schema=SCHEMA)
    found = dict(engine.generate_many([*others, failing]))
    error = found.pop(len(others))
    assert isinstance(error, EdgespecError)
    assert error.code == "E_GRAMMAR"
    assert [found[number].token_ids for number in range(len(others))] == expected


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_judged_with_their_own_penalties(engine: Engine, way: str) -> None:
    engine.use_tree(TreeSettings(size=24))
    for temperature in (0, 0.8):
        (verdict,) = engine.verify_lossless(["def main("], max_new_tokens=20, temperature=temperature, **WAYS[way])
        assert verdict.is_lossless
        assert verdict.from_target == ()


def test_a_conversation_keeps_its_penalties_from_turn_to_turn(engine: Engine) -> None:
    """An answer's own tokens are the prompt's in the next turn: for repetition they count, for presence they do not."""
    options: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": 12,
        "presence_penalty": 1.5,
        "repetition_penalty": 1.2,
    }
    answers = []
    for tree in (PLAIN, TreeSettings(size=24)):
        engine.use_tree(tree)
        chat = engine.chat(**options)
        chat.send("def add(a, b):")
        answers.append(chat.send("def sub(a, b):"))
    assert answers[0].token_ids == answers[1].token_ids
    assert engine.generate(chat.prompt_ids(chat.messages[:-1]), **options).token_ids == answers[1].token_ids


def test_tokens_are_named_by_id_or_by_text_and_others_are_refused(engine: Engine) -> None:
    (index,) = engine.pair.tokenizer.encode(" self")
    assert dict(engine.request("x", logit_bias={" self": 3, 5: -1}).sampling.logit_bias) == {index: 3, 5: -1}
    for bias, said in (
        ({engine.pair.vocab: 1}, f"has token {engine.pair.vocab}, and the model knows {engine.pair.vocab}"),
        ({"defghijk": 1}, "'defghijk', which is 5 tokens"),
        ({index: 1, " self": 2}, f"names one token twice: ' self' and {index}"),
    ):
        with pytest.raises(EdgespecError, match=said):
            engine.request("x", logit_bias=bias)
    for wrong, said in (({"logprobs": 21}, "logprobs=21"), ({"grammar": "a", "json_schema": {}}, "has one grammar"),
                        ({"json_schema": {}, "ignore_eos": True}, "must be able to end")):  # fmt: skip
        with pytest.raises(EdgespecError, match=said):
            engine.request("x", **wrong)


def test_grammars_may_be_given_in_four_forms(engine: Engine) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    forms: list[dict[str, Any]] = [
        {"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}, {"response_format": wrapped},
        {"grammar": Grammar(form="json_schema", text=json.dumps(SCHEMA))},
    ]  # fmt: skip
    found = {engine.request("x", seed=0, **form).grammar for form in forms}
    assert {None if grammar is None else grammar.grammar.text for grammar in found} == {json.dumps(SCHEMA)}
    assert engine.request("x", response_format={"type": "text"}).grammar is None
    assert engine.request("x", repetition_penalty=1.5).sampling.repetition_penalty == 1.5
    assert engine.request("x", {"repetition_penalty": 1.4}).sampling.repetition_penalty == 1.4
    assert isinstance(engine.request("x").sampling, SamplingSettings)
