"""Entries of log-probabilities in a plain completion say where their tokens begin, also those within a character."""

import pytest
from transformers import AutoTokenizer

from edgespec.pair.pair import DEMO_FOLDER
from edgespec.sampling.logprobs import TokenLogprob
from edgespec.text.logprob_entries import TokenPlaces, completion_logprobs, logprob_fields, prompt_fields

TEXTS = ("s = 'héé€'  # x", "你好世界朋友们 = 1", "\U0001f600\U0001f44d\U0001f389\U0001f680\U0001f4a1 = 2", "x")


@pytest.mark.parametrize("text", TEXTS)
def test_parts_of_a_character_begin_where_it_does(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    ids = tokenizer.encode(text)
    logprobs = [TokenLogprob(token=token, logprob=-1.0, top=()) for token in ids]
    entries = logprob_fields(tokenizer, logprobs)
    ends = [sum(len(entry["bytes"]) for entry in entries[:count]) for count in range(len(ids))]
    expected = [len(text.encode()[:end].decode(errors="ignore")) for end in ends]
    assert completion_logprobs(entries)["text_offset"] == expected
    places = TokenPlaces(5)
    parts = [completion_logprobs([entry], places=places)["text_offset"] for entry in entries]
    assert parts == [[5 + place] for place in expected]
    of_prompt = [*prompt_fields(tokenizer, ids[0], logprobs[1:]), *entries]
    both = completion_logprobs(of_prompt, prompt=text, num_prompt=len(ids))["text_offset"]
    assert both == [*expected, *(len(text) + place for place in expected)]
