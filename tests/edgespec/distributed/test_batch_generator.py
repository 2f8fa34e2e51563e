"""A table's batches come back with their texts, those of the same requests alone, and errors as a column."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from edgespec.distributed import BatchGenerator
from edgespec.engine import Engine
from edgespec.errors import EdgespecError

PROMPTS = ["def main(", "import os", "", "y" * 300, "x = "]


def test_a_batch_has_texts_and_errors(pair_folders: tuple[Path, Path]) -> None:
    target, draft = pair_folders
    generate = BatchGenerator(
        target, draft=draft, id_column="id", options={"dtype": "float32"}, max_new_tokens=8, temperature=0.8, seed=3
    )
    batch = {"id": list("abcde"), "prompt": PROMPTS, "kept": range(5)}
    done = generate(batch)
    assert list(done) == ["id", "prompt", "kept", "text", "finish_reason", "num_tokens", "error"]
    assert done["prompt"] is PROMPTS
    assert [error and error.partition(":")[0] for error in done["error"]] == [
        None, None, "E_PROMPT_EMPTY", "E_CONTEXT", None,
    ]  # fmt: skip
    assert [done["text"][place] for place in (2, 3)] == [None, None]
    with Engine.from_pretrained(target, draft=draft, dtype="float32") as engine:
        for place in (0, 1, 4):
            alone = engine.generate(PROMPTS[place], max_new_tokens=8, temperature=0.8, seed=3, name=batch["id"][place])
            assert (done["text"][place], done["num_tokens"][place]) == (alone.text, len(alone.token_ids))
    assert generate({name: list(column)[::-1] for name, column in batch.items()})["text"] == done["text"][::-1]


def test_a_tokenizer_in_the_place_of_the_targets_counts(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Its chat template is the one that messages go through."""
    messages = np.array([{"role": "user", "content": "x"}])
    other = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(pair_folders[0])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} = {% endfor %}"
    tokenizer.save_pretrained(other)
    options = {"dtype": "float32", "tokenizer": other}
    done = BatchGenerator(pair_folders[0], options=options, max_new_tokens=8)({"prompt": [messages, "x = "]})
    assert done["error"] == [None, None]
    assert done["text"][0] == done["text"][1] != ""
    without = BatchGenerator(pair_folders[0], options={"dtype": "float32"}, max_new_tokens=8)({"prompt": [messages]})
    assert without["error"][0].startswith("E_CHAT_TEMPLATE")


def test_a_row_that_is_no_prompt_fails_alone(pair_folders: tuple[Path, Path]) -> None:
    """Tables have null, NaN, numbers and halves of characters where a text is missing."""
    generate = BatchGenerator(pair_folders[0], id_column="id", options={"dtype": "float32"}, max_new_tokens=2)
    odd = [None, float("nan"), np.float64("nan"), "\ud800", 5, ["a"], [None], b"x"]
    prompts = ["x = ", *odd, "import os", np.array([{"role": "user", "content": "x"}])]
    done = generate({"id": range(len(prompts)), "prompt": prompts})
    codes = [error and error.partition(":")[0] for error in done["error"]]
    assert codes == [None, *["E_PROMPT_INVALID"] * len(odd), None, "E_CHAT_TEMPLATE"]
    assert [text is None for text in done["text"]] == [error is not None for error in done["error"]]
    names = ["a", None, float("nan"), "\ud800", "b"]
    done = generate({"id": names, "prompt": ["x = "] * len(names)})
    codes = [error and error.partition(":")[0] for error in done["error"]]
    assert codes == [None, "E_PROMPT_INVALID", "E_PROMPT_INVALID", "E_SETTING", None]


def test_a_column_that_is_not_there_is_named(pair_folders: tuple[Path, Path]) -> None:
    with pytest.raises(EdgespecError, match=r"no column 'prompt', only text\..*prompt_column"):
        BatchGenerator(pair_folders[0])({"text": ["x"]})
