"""Which tokens end a text: those of transformers' own generation config, and the tokenizer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig

from edgespec.errors import EdgespecError
from edgespec.pair.pair import open_pair
from edgespec.text.context import doubtful_ends
from tests.support.families import FAMILIES, make_model, save_folder


@pytest.fixture(scope="module")
def composite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a part for images, whose config.json has a text part."""
    return save_folder(tmp_path_factory.mktemp("composite") / "model", make_model(FAMILIES["gemma3-images"]()))


def stated(folder: Path, *, top: Any = None, text: Any = None, generation: dict[str, Any] | None = None) -> Path:
    """The folder, with these ends."""
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"], config["text_config"]["eos_token_id"] = top, text
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("top", "text", "generation", "stops"),
    [
        ([1, 106], 256, None, {1, 106, 256}),
        (7, None, None, {7, 256}),
        (None, [7, 8], {"do_sample": True}, {7, 8, 256}),
        (9, 7, {"eos_token_id": [1, 2]}, {1, 2, 256}),
        (9, 7, {"eos_token_id": None}, {256}),
    ],
)
def test_the_ends_of_a_composite_config_count_with_its_text_part_s(
    top: Any, text: Any, generation: dict[str, Any] | None, stops: set[int], composite: Path
) -> None:
    """None of transformers' own is missing; the tokenizer's is 256."""
    folder = stated(composite, top=top, text=text, generation=generation)
    found = open_pair(folder, None).stop_tokens
    assert found == stops
    if generation is not None and "eos_token_id" in generation:
        theirs = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        theirs = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id
    assert found >= {*(theirs if isinstance(theirs, list) else [theirs])} - {None}


@pytest.mark.parametrize("wrong", [257, -1, [256, -1], True, 2.0, "</s>", [None]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_end_that_is_none_of_the_model_s_tokens_is_refused_with_file_and_number(
    file: str, wrong: Any, composite: Path
) -> None:
    is_config = file == "config.json"
    folder = stated(composite, top=wrong if is_config else None, text=256, generation=None if is_config else {
        "eos_token_id": wrong})  # fmt: skip
    with pytest.raises(EdgespecError) as caught:
        open_pair(folder, None)
    assert caught.value.code == "E_CONFIG_INVALID"
    assert file in caught.value.what
    last = wrong[-1] if isinstance(wrong, list) else wrong
    assert is_config or str(last) in caught.value.what


def test_a_prompt_s_ends_are_in_doubt_where_a_tokenizer_put_them_twice_or_closed_the_text(
    pair_folders: tuple[Path, Path],
) -> None:
    pair = open_pair(pair_folders[0], None)
    pair.tokenizer.bos_token = pair.tokenizer.convert_ids_to_tokens(65)
    assert [doubt.split()[0] for doubt in doubtful_ends([65, 65, 3, 256], pair)] == ["begins", "ends"]
    assert doubtful_ends([65, 3, 65], pair) == doubtful_ends([], pair) == doubtful_ends([256], pair) == []
    pair.tokenizer.bos_token = None
    assert doubtful_ends([65, 65], pair) == []
