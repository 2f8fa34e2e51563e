"""What is asked of a text: whose word counts, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from edgespec.chat.prompt_ids import prompt_ids
from edgespec.config import SamplingSettings
from edgespec.errors import EdgespecError
from edgespec.text.request import TextRequest, config_values, text_request
from edgespec.text.token_ids import PIECE_CHARACTERS
from tests.support.families import make_tokenizer

OWN = SamplingSettings(temperature=0.8, top_p=0.95)


def asked(config: Any = None, **options: Any) -> TextRequest:
    pair: Any = SimpleNamespace(
        tokenizer=make_tokenizer(), vocab=257, stop_tokens=frozenset({256}), default_sampling=lambda: OWN,
        default_options=dict, target=SimpleNamespace(adapters=()),
    )  # fmt: skip
    return text_request([1, 2], pair=pair, max_context=100, config=config, options=options)


def test_single_options_count_above_the_config_and_that_above_the_models_own() -> None:
    config = GenerationConfig(max_new_tokens=7, do_sample=True, temperature=0.5, top_k=9, stop_strings=["x"])
    assert asked().sampling == OWN
    assert asked(config).sampling == SamplingSettings(temperature=0.5, top_p=0.95, top_k=9)
    assert asked(config, temperature=0.1).sampling == SamplingSettings(temperature=0.1, top_p=0.95, top_k=9)
    assert asked(config, sampling=SamplingSettings()).sampling == SamplingSettings()
    assert asked(config, sampling=SamplingSettings(), top_k=3).sampling == SamplingSettings(top_k=3)
    assert (asked(config).max_new_tokens, asked(config, max_new_tokens=3).max_new_tokens) == (7, 3)
    assert (asked(config).stop.strings, asked(config, stop="y").stop.strings) == (("x",), ("y",))
    assert asked({"seed": 4}).seed == 4
    assert (asked().name, asked(name="row 3").name) == ("0", "row 3")
    assert (asked().max_new_tokens, asked().limited_by) == (98, "context")
    assert asked(max_new_tokens=None, seed=None, sampling=None).sampling == OWN


def test_do_sample_means_what_it_means_in_transformers() -> None:
    assert asked(do_sample=False).sampling.temperature == 0
    assert asked(sampling=SamplingSettings(), do_sample=True).sampling.temperature == 1
    assert asked(do_sample=True).sampling.temperature == 0.8


def test_what_would_not_be_honoured_is_refused() -> None:
    with pytest.raises(EdgespecError, match="num_beams"):
        asked(GenerationConfig(num_beams=4))
    with pytest.raises(EdgespecError, match="temprature"):
        asked({"temprature": 1})
    with pytest.raises(TypeError, match="temprature"):
        asked(temprature=1)
    for options in ({"seed": -1}, {"seed": 2**63}, {"max_new_tokens": 0}, {"temperature": -1.0}):
        with pytest.raises(EdgespecError):
            asked(**options)
    assert config_values(GenerationConfig(eos_token_id=3, pad_token_id=4)) == {"eos_token_id": 3}


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": "5"}, {"max_new_tokens": 2.5}, {"max_new_tokens": True}, {"stop": 5}, {"stop": [5]},
        {"stop": {"a": 1}}, {"top_k": 2.5}, {"top_k": "5"}, {"json_schema": [1]}, {"json_schema": 5},
        {"response_format": 5}, {"grammar": 5}, {"seed": "5"}, {"seed": 1.5}, {"seed": 10**400}, {"name": 5},
        {"name": "\ud800"}, {"logprobs": "3"}, {"do_sample": "x"}, {"sampling": 5},
    ],
)  # fmt: skip
def test_an_option_of_the_wrong_kind_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(EdgespecError, match=next(iter(options))) as caught:
        asked(**options)
    assert caught.value.code == "E_SETTING"


@pytest.mark.parametrize("config", [5, ["a"], {"top_k": "5"}, {5: 1}, {"temperature": [1]}])
def test_a_generation_config_of_the_wrong_kind_is_refused(config: object) -> None:
    with pytest.raises(EdgespecError) as caught:
        asked(config)
    assert caught.value.code == "E_SETTING"


def test_whole_floats_are_numbers_of_tokens_and_of_ranks() -> None:
    found = asked({"top_k": 50.0}, max_new_tokens=5.0)
    assert (found.sampling.top_k, found.max_new_tokens, type(found.max_new_tokens)) == (50, 5, int)


def test_a_schema_that_json_has_no_form_for_is_refused() -> None:
    with pytest.raises(EdgespecError) as caught:
        asked(json_schema={"a": {1}})
    assert caught.value.code == "E_GRAMMAR"


@pytest.mark.parametrize("ids", [[1, -1], [1, 257]])
def test_a_prompt_of_tokens_that_the_model_lacks_is_refused(ids: list[int]) -> None:
    pair: Any = SimpleNamespace(vocab=257)
    with pytest.raises(EdgespecError, match=f"token id {ids[1]}, and the model knows 257") as caught:
        text_request(ids, pair=pair, max_context=100, config=None, options={})
    assert caught.value.code == "E_PROMPT_INVALID"


@pytest.mark.parametrize("prompt", [5, None, float("nan"), "\ud800", ["a"], [1.5], [True], [None], b"ab", {"a": 1}])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(EdgespecError) as caught:
        prompt_ids(make_tokenizer(), prompt)
    assert caught.value.code == "E_PROMPT_INVALID"


def test_half_a_surrogate_pair_in_a_message_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    with pytest.raises(EdgespecError, match="half a surrogate pair"):
        prompt_ids(tokenizer, [{"role": "user", "content": "\ud800"}])


def test_a_tokenizer_that_fails_is_one_error() -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = "many"
    with pytest.raises(EdgespecError) as caught:
        prompt_ids(tokenizer, "ab")
    assert caught.value.code == "E_TOKENIZER"


def test_a_prompt_far_too_long_is_refused_without_reading_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = make_tokenizer(), []
    encode = tokenizer.encode

    def noted(text: str, **options: Any) -> Any:
        read.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", noted)
    with pytest.raises(EdgespecError, match="more than 200 tokens, and the context holds 100") as caught:
        prompt_ids(tokenizer, "a" * 10_000_000, max_tokens=100)
    assert caught.value.code == "E_CONTEXT"
    assert sum(read) == PIECE_CHARACTERS
    text = "ab" * PIECE_CHARACTERS
    assert prompt_ids(tokenizer, text, max_tokens=len(text)) == encode(text)


def test_prompts_are_texts_ids_or_messages() -> None:
    tokenizer = make_tokenizer()
    assert prompt_ids(tokenizer, "ab") == tokenizer.encode("ab")
    assert prompt_ids(tokenizer, (3, 4)) == [3, 4]
    with pytest.raises(EdgespecError, match="is no prompt"):
        prompt_ids(tokenizer, [3, {"role": "user", "content": "x"}])
    with pytest.raises(EdgespecError, match="no chat template"):
        prompt_ids(tokenizer, [{"role": "user", "content": "x"}])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    assert prompt_ids(tokenizer, [{"role": "user", "content": "x"}]) == tokenizer.encode("x|")
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert prompt_ids(tokenizer, [{"role": "user", "content": parts}]) == tokenizer.encode("x\ny|")
    with pytest.raises(EdgespecError, match="a part of type 'image_url', and only text and images are read"):
        prompt_ids(tokenizer, [{"role": "user", "content": [{"type": "image_url"}]}])
    tokenizer.chat_template = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}|"
        "{% endif %}{% endfor %}{% endfor %}"
    )  # as models that see have it: it would say nothing of a plain text
    assert prompt_ids(tokenizer, [{"role": "user", "content": "x"}]) == tokenizer.encode("x|")
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(EdgespecError, match="template fails"):
        prompt_ids(tokenizer, [{"role": "user", "content": "x"}])
