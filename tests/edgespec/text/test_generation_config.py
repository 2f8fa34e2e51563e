"""What a generation config asks for is done as transformers does it, or refused, or named; nothing is dropped."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from edgespec import EdgespecError, Engine, TreeSettings
from edgespec.pair.pair import open_pair

PROMPT = [69, 70, 71, 8]
COUNT = 12


@pytest.fixture(scope="module")
def engine(pair_folders: tuple[Path, Path]) -> Iterator[Engine]:
    tree = TreeSettings(size=64)
    with Engine.from_pretrained(pair_folders[0], draft=pair_folders[1], dtype="float32", tree=tree) as found:
        yield found


@pytest.fixture(scope="module")
def model(pair_folders: tuple[Path, Path]) -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(pair_folders[0], dtype=torch.float32)
    return found


@pytest.fixture(scope="module")
def greedy(model: PreTrainedModel) -> list[int]:
    return expected(model, max_new_tokens=COUNT)


def expected(model: PreTrainedModel, **config: Any) -> list[int]:
    """The new tokens of transformers' own."""
    found = model.generate(torch.tensor([PROMPT]), GenerationConfig(do_sample=False, pad_token_id=256, **config))
    return found[0, len(PROMPT) :].tolist()


def configs(greedy: list[int]) -> dict[str, dict[str, Any]]:
    """Configs that change the greedy text, by its own tokens."""
    end = greedy[3]
    count = {"max_new_tokens": COUNT}
    return {
        "eos_token_id": {"eos_token_id": end, **count},
        "several": {"eos_token_id": [end, greedy[5]], **count},
        "max_length": {"max_length": len(PROMPT) + 5},
        "max_length and max_new_tokens": {"max_length": 5, "max_new_tokens": 3},
        "min_new_tokens": {"eos_token_id": end, "min_new_tokens": 7, **count},
        "min_length": {"eos_token_id": end, "min_length": len(PROMPT) + 6, **count},
        "min_new_tokens above min_length": {"eos_token_id": end, "min_new_tokens": 4, "min_length": 20, **count},
        "suppress_tokens": {"suppress_tokens": [end, greedy[0]], **count},
    }


@pytest.mark.parametrize("name", configs([0] * COUNT))
def test_a_config_gives_the_text_of_transformers(
    name: str, engine: Engine, model: PreTrainedModel, greedy: list[int]
) -> None:
    config = configs(greedy)[name]
    wanted = expected(model, **config)
    assert wanted != greedy
    asked = {"do_sample": False, **config}
    assert list(engine.generate(PROMPT, GenerationConfig(**asked)).token_ids) == wanted
    assert list(engine.generate(PROMPT, asked).token_ids) == wanted
    if "max_length" not in config:
        assert list(engine.generate(PROMPT, temperature=0, **config).token_ids) == wanted


def test_texts_with_a_least_length_are_those_of_plain_decoding_through_any_trees(
    engine: Engine, greedy: list[int]
) -> None:
    options: dict[str, Any] = {
        "eos_token_id": sorted(set(range(0, 257, 3)) | {greedy[3]}), "min_new_tokens": 9, "suppress_tokens": [7, 90],
        "max_new_tokens": 24, "temperature": 0.9, "seed": 3,
    }  # fmt: skip
    texts = set()
    for policy in ("none", "adaptive", "opt-tree", "eagle2"):
        engine.use_tree(TreeSettings(policy=policy, **({} if policy == "none" else {"size": 8, "draw": "coupled"})))
        texts.add(engine.generate(PROMPT, **options).token_ids)
        engine.use_tree(None)
    (text,) = texts
    assert 9 <= len(text) < 24
    assert all(verdict.is_lossless for verdict in engine.verify_lossless([PROMPT], **options))


def test_the_token_that_a_config_ends_a_text_with_is_no_part_of_it(engine: Engine, greedy: list[int]) -> None:
    decode = engine.pair.tokenizer.decode
    result = engine.generate(PROMPT, {"eos_token_id": greedy[3]}, temperature=0, max_new_tokens=COUNT)
    assert (result.finish_reason, result.text) == ("stop", decode(result.token_ids[:-1]))


@pytest.mark.parametrize(
    "config",
    [
        {"forced_bos_token_id": 0}, {"forced_eos_token_id": 5}, {"bad_words_ids": [[5]]}, {"max_time": 3.0},
        {"no_repeat_ngram_size": 2}, {"guidance_scale": 1.5}, {"begin_suppress_tokens": [5]},
        {"exponential_decay_length_penalty": [5, 1.1]}, {"output_scores": True}, {"typical_p": 0.5},
        {"sequence_bias": [[[5], 1.0]]},
        {"eos_token_id": 257}, {"eos_token_id": [1, -1]}, {"eos_token_id": "5"}, {"suppress_tokens": [-1]},
        {"suppress_tokens": 5}, {"max_length": 4}, {"max_length": "9"}, {"min_new_tokens": -1}, {"min_length": 0.5},
    ],
)  # fmt: skip
def test_what_is_not_done_or_makes_no_sense_is_refused_by_its_name(config: dict[str, Any], engine: Engine) -> None:
    is_refused_by_transformers = config == {"suppress_tokens": 5}
    for given in (config, *([] if is_refused_by_transformers else [GenerationConfig(**config)])):
        with pytest.raises(EdgespecError, match=next(iter(config))) as caught:
            engine.generate(PROMPT, given)
        assert caught.value.code == "E_SETTING"


def test_what_changes_no_text_is_taken(engine: Engine, greedy: list[int]) -> None:
    neutral = {
        "num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "length_penalty": 1.0, "use_cache": False,
        "cache_implementation": "static", "bad_words_ids": None, "suppress_tokens": [], "min_length": 0,
        "pad_token_id": 3, "num_assistant_tokens": 5, "output_scores": False, "_from_model_config": True,
    }  # fmt: skip
    assert list(engine.generate(PROMPT, neutral, temperature=0, max_new_tokens=COUNT).token_ids) == greedy


def own_config(target: Path, folder: Path, **values: Any) -> Path:
    copied = shutil.copytree(target, folder)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, **values}))
    return copied


def test_the_folders_own_config_counts_and_what_is_not_done_of_it_is_named(
    pair_folders: tuple[Path, Path], tmp_path: Path, model: PreTrainedModel, greedy: list[int]
) -> None:
    folder = own_config(
        pair_folders[0], tmp_path / "own", suppress_tokens=greedy[:2], min_new_tokens=2, num_beams=1, max_length=99,
        bad_words_ids=[[5]], forced_eos_token_id=0, no_repeat_ngram_size=0, max_new_tokens=77,
    )  # fmt: skip
    with Engine.from_pretrained(folder, dtype="float32") as engine:
        assert engine.pair.notes == (
            "generation_config.json asks for bad_words_ids=[[5]], forced_eos_token_id=0, max_new_tokens=77, "
            "which is not done here",
        )
        wanted = expected(model, suppress_tokens=greedy[:2], max_new_tokens=COUNT)
        assert list(engine.generate(PROMPT, temperature=0, max_new_tokens=COUNT).token_ids) == wanted != greedy
        free = engine.generate(PROMPT, temperature=0, max_new_tokens=COUNT, suppress_tokens=[])
        assert list(free.token_ids) == greedy


@pytest.mark.parametrize("values", [{"suppress_tokens": [257]}, {"suppress_tokens": "x"}, {"min_new_tokens": "two"}])
def test_a_folders_own_config_that_makes_no_sense_is_refused_before_weights_are_read(
    values: dict[str, Any], pair_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(EdgespecError, match=r"generation_config\.json") as caught:
        open_pair(own_config(pair_folders[0], tmp_path / "own", **values), None)
    assert caught.value.code == "E_CONFIG_INVALID"
