"""A budget of thought: kept to the token, closed by the model's own words, and the same through trees."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from edgespec import Engine, TreeSettings
from edgespec.chat.tools import Toolset
from edgespec.errors import EdgespecError
from edgespec.text.results import GenerationResult

ASKED: Sequence[Any] = [{"role": "user", "content": "def main("}]
HEAD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OPENED = HEAD + "<assistant><think>{{ '\\n' }}{# '\\n</think>\\n\\n' #}"
SELF_OPENED = HEAD + "<assistant>{# '<think>\\n' '\\n</think>\\n\\n' #}"
CLOSE = "\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(
        dtype="float32", self_check=False, context_tokens=512, tree=TreeSettings(size=8)
    ) as found:
        yield found


def written(engine: Engine, template: str, tree: TreeSettings | None = None, **options: Any) -> GenerationResult:
    """A text by these trees, from a prompt that was read anew."""
    engine.pair.tokenizer.chat_template = template
    engine.use_tree(tree)
    engine.forget()
    return engine.generate(ASKED, **({"max_new_tokens": 160, "seed": 3} | options))


@pytest.mark.parametrize(("schema", "temperature"), [(None, 0.0), (SCHEMA, 0.8)], ids=["any answer", "schema"])
@pytest.mark.parametrize("budget", [0, 1, 8, 23])
def test_a_thought_has_as_many_tokens_as_it_may_and_then_the_answer_comes(
    engine: Engine, budget: int, schema: Any, temperature: float
) -> None:
    options = {"temperature": temperature, "reasoning_budget": budget} | ({"json_schema": schema} if schema else {})
    through = written(engine, OPENED, **options)
    assert through.token_ids == written(engine, OPENED, TreeSettings(policy="none"), **options).token_ids
    tokenizer = engine.pair.tokenizer
    close = tokenizer.encode(CLOSE, add_special_tokens=False)
    assert list(through.token_ids[budget : budget + len(close)]) == close
    free = {"temperature": temperature} | ({"json_schema": schema} if schema else {})
    unbounded = written(engine, OPENED, **free)
    assert through.token_ids[:budget] == unbounded.token_ids[:budget], "until it is spent, the thought is the free one"
    assert through.text.count("</think>") == 1
    toolset, prompt = Toolset(ends_with_words=schema is not None), engine.encode(ASKED)
    assert toolset.num_thought(engine.pair, prompt, through.token_ids) == budget
    if schema:
        message = Toolset(ends_with_words=True).message(tokenizer, engine.encode(ASKED), through.text)
        assert json.loads(message["content"])["a"] in ("x", "y")


def test_a_thought_that_the_model_begins_is_bounded_from_its_mark_on(engine: Engine) -> None:
    forced = 'start: "<think>" /(?s:.*)/'
    result = written(engine, SELF_OPENED, temperature=0.0, reasoning_budget=5, grammar=forced)
    # The grammar of the answer is behind an optional thought: this one begins with the mark as well
    tokenizer = engine.pair.tokenizer
    opened = len(tokenizer.encode("<think>", add_special_tokens=False))
    close = tokenizer.encode(CLOSE, add_special_tokens=False)
    assert list(result.token_ids[opened + 5 : opened + 5 + len(close)]) == close


def test_words_of_an_answer_are_no_thought(engine: Engine) -> None:
    said = 'start: "I wrote <think> and more of it than six tokens are"'
    result = written(engine, SELF_OPENED, temperature=0.0, reasoning_budget=0, grammar=said)
    assert result.text.endswith("more of it than six tokens are")


def test_a_message_stands_before_the_closing_words(engine: Engine) -> None:
    result = written(engine, OPENED, temperature=0.0, reasoning_budget=4, reasoning_budget_message=" That will do.")
    thought = engine.pair.tokenizer.decode(list(result.token_ids[:4]))
    assert result.text.startswith(f"{thought} That will do.{CLOSE}")


@pytest.mark.parametrize(
    ("prompt", "template", "options", "named"),
    [
        (ASKED, HEAD, {"reasoning_budget": 5}, "knows of no thoughts"),
        ("def main(", OPENED, {"reasoning_budget": 5}, "is a text"),
        (ASKED, OPENED, {"reasoning_budget": -2}, "-2"),
        (ASKED, OPENED, {"reasoning_budget_message": "Stop."}, "needs `reasoning_budget`"),
    ],
)
def test_a_budget_that_bounds_nothing_is_refused(
    engine: Engine, prompt: Any, template: str, options: Any, named: str
) -> None:
    engine.pair.tokenizer.chat_template = template
    with pytest.raises(EdgespecError, match=named):
        engine.request(prompt, **options)


def test_no_bound_is_the_models_own_affair(engine: Engine) -> None:
    assert written(engine, OPENED, temperature=0.0, reasoning_budget=-1).token_ids == (
        written(engine, OPENED, temperature=0.0).token_ids
    )


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        (OPENED, ["(H", "m", ".)", "\n</think>\n\n", "Yes"]),
        (OPENED, ["(H", "m)", "</think>", "(no thought)"]),
        (OPENED, ["(\n\n)", "\n</think>\n\n", "Yes"]),
        (OPENED, ["\n</think>\n\n", "Yes"]),
        (OPENED, ["(H", "m.", "\n)"]),  # cut
        (SELF_OPENED, ["<think>", "(\nH", "m)", "\n</think>", "\n\nYes"]),
        (SELF_OPENED, ["Yes"]),
        (HEAD + "{# <|channel|> #}", ["<|channel|>analysis<|message|>", "(Hm)", "<|end|><|start|>assistant",
                                      "<|channel|>analysis<|message|>", "(Oh)", "<|end|><|start|>assistant",
                                      "<|channel|>final<|message|>Yes"]),
    ],
)  # fmt: skip
def test_tokens_of_thought_are_those_that_were_written(engine: Engine, template: str, pieces: list[str]) -> None:
    """Each letter is a token of its own here, which no tokenizer writes; those of what is thought stand in brackets."""
    tokenizer = engine.pair.tokenizer
    tokenizer.chat_template = template
    letters = [letter for piece in pieces for letter in piece.replace("(", "").replace(")", "")]
    tokens = [token for letter in letters for token in tokenizer.encode(letter, add_special_tokens=False)]
    thought = sum(len(part.partition(")")[0]) for part in "".join(pieces).split("(")[1:] if part != "no thought)")
    stop = sorted(engine.pair.stop_tokens)[:1]
    assert Toolset().num_thought(engine.pair, engine.encode(ASKED), [*tokens, *stop]) == thought


def test_a_token_of_a_character_that_is_cut_counts(engine: Engine) -> None:
    tokenizer = engine.pair.tokenizer
    tokenizer.chat_template = OPENED
    tokens = tokenizer.encode("\U0001f9e0", add_special_tokens=False)
    assert len(tokens) > 1
    for number in range(1, len(tokens) + 1):
        assert Toolset().num_thought(engine.pair, engine.encode(ASKED), tokens[:number]) == number
    close = tokenizer.encode(CLOSE, add_special_tokens=False)
    assert Toolset().num_thought(engine.pair, engine.encode(ASKED), [*tokens, *close]) == len(tokens)
