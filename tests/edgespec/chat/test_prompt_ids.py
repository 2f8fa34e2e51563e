"""What is a prompt in Python: whatever holds the token ids of one text, as tokenizers and tensors have them."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BatchEncoding

from edgespec import EdgespecError, Engine
from edgespec.chat.prompt_ids import prompt_ids
from edgespec.text.token_ids import token_ids
from tests.support.families import make_tokenizer

IDS = [69, 70, 71, 8]
FORMS: dict[str, Callable[[], Any]] = {
    "a tuple": lambda: tuple(IDS),
    "a range": lambda: range(69, 72),
    "an array": lambda: array("i", IDS),
    "a deque": lambda: deque(IDS),
    "a tensor [n]": lambda: torch.tensor(IDS),
    "a tensor [1, n]": lambda: torch.tensor([IDS], dtype=torch.int32),
    "a numpy array": lambda: np.array(IDS, dtype=np.uint16),
    "a numpy array [1, n]": lambda: np.array([IDS]),
    "a list of numpy numbers": lambda: list(np.array(IDS)),
    "a list of tensors": lambda: list(torch.tensor(IDS)),
    "a list of one tensor": lambda: [torch.tensor(IDS)],
    "a list of one list": lambda: [IDS],
    "a tokenizer's encoding": lambda: BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1, 1]}),
    "an encoding of tensors": lambda: BatchEncoding({"input_ids": [IDS]}, tensor_type="pt"),
    "a dict": lambda: {"input_ids": IDS},
    "an object": lambda: SimpleNamespace(input_ids=torch.tensor([IDS])),
    "a padded encoding": lambda: {"input_ids": [[256, *IDS]], "attention_mask": torch.tensor([[0, 1, 1, 1, 1]])},
}
SEVERAL: dict[str, Any] = {
    "texts": ["def main(", "import "],
    "lists": [[1, 2], [3]],
    "a tensor": torch.tensor([[1, 2], [3, 4]]),
    "an encoding": BatchEncoding({"input_ids": [[1, 2], [3]]}),
    "conversations": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
}
NO_PROMPTS: dict[str, Any] = {
    "bytes": b"ab",
    "a memoryview": memoryview(b"ab"),
    "truths": torch.tensor([True, False]),
    "numpy truths": [np.True_],
    "fractions": torch.tensor([[1.0, 2.0]]),
    "a tensor of one number": torch.tensor(5),
    "a tensor without numbers": torch.empty(3, dtype=torch.long, device="meta"),
    "no ids": {"input_ids": None},
    "a set": {1, 2},
    "one message": {"role": "user", "content": "a"},
    "a mask of another length": {"input_ids": [1, 2], "attention_mask": [1]},
}


@pytest.fixture(scope="module")
def engine(pair_folders: tuple[Path, Path]) -> Iterator[Engine]:
    with Engine.from_pretrained(pair_folders[0], draft=pair_folders[1], dtype="float32") as found:
        yield found


@pytest.mark.parametrize("form", FORMS)
def test_whatever_holds_the_ids_of_one_text_is_that_text(form: str) -> None:
    found = prompt_ids(make_tokenizer(), FORMS[form]())
    assert found == (IDS[:3] if form == "a range" else IDS)
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize("what", SEVERAL)
def test_several_prompts_are_refused_with_the_way_to_run_them(what: str) -> None:
    with pytest.raises(EdgespecError, match="is a list of 2 prompts") as caught:
        prompt_ids(make_tokenizer(), SEVERAL[what])
    assert (caught.value.code, "generate_many" in caught.value.fix) == ("E_PROMPT_INVALID", True)


@pytest.mark.parametrize("what", NO_PROMPTS)
def test_what_holds_no_ids_is_refused(what: str) -> None:
    with pytest.raises(EdgespecError) as caught:
        prompt_ids(make_tokenizer(), NO_PROMPTS[what])
    assert caught.value.code == "E_PROMPT_INVALID"


@pytest.mark.parametrize("message", [{"content": "hi"}, {"role": None, "content": "hi"}, {"text": "hi"}])
def test_a_message_without_a_role_is_named(message: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}|{% endfor %}"
    with pytest.raises(EdgespecError, match='message 2 has no "role"'):
        prompt_ids(tokenizer, [{"role": "user", "content": "x"}, message])


def test_ids_in_any_form_are_continued_as_transformers_continues_them(
    engine: Engine, pair_folders: tuple[Path, Path]
) -> None:
    """Padding by the attention mask stays where it stands, and changes no token."""
    model = AutoModelForCausalLM.from_pretrained(pair_folders[0], dtype=torch.float32)
    ids, mask = torch.tensor([[256, 256, *IDS]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    plain = model.generate(torch.tensor([IDS]), max_new_tokens=8, do_sample=False)
    padded = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert padded[0, 2:].tolist() == plain[0].tolist()
    for form in (IDS, [IDS], np.array([IDS]), torch.tensor(IDS), torch.tensor([IDS]), {"input_ids": IDS}):
        assert engine.generate_ids(form, max_new_tokens=8, temperature=0).tolist() == plain.tolist()
    encoding = BatchEncoding({"input_ids": ids, "attention_mask": mask})
    assert engine.generate_ids(encoding, max_new_tokens=8, temperature=0).tolist() == padded.tolist()


def test_a_streamer_hears_nothing_of_ids_that_are_refused(engine: Engine) -> None:
    heard: list[Any] = []
    streamer: Any = SimpleNamespace(put=heard.append, end=lambda: heard.append("end"))
    for wrong in ([5, 257], [5, -1], [5, 10**30], []):
        with pytest.raises(EdgespecError):
            engine.generate_ids(wrong, streamer=streamer)
    assert heard == []
    assert token_ids([5, 257]) == [5, 257]
