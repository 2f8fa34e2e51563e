"""A prompt's beginning on disk: texts are the same with and without, and no file of anything else is used."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import FalconConfig, LlamaConfig

from edgespec import Engine, TreeSettings
from edgespec.errors import EdgespecError
from edgespec.model.text_cache import TextCache
from edgespec.pair.pair import open_pair
from edgespec.prefix_cache.prompt_cache import HEADER, PromptCache
from tests.offload.gguf.test_tiny_models import TINY
from tests.support.families import FAMILIES, RECURRENT, SMALL, make_model, save_folder

SYSTEM = [(7 * number) % 250 for number in range(40)]  # longer than the sliding windows
PROMPTS = [[*SYSTEM, 3, 4, 5], [*SYSTEM, 9, 8], [*SYSTEM, 3, 1]]
READERS = {
    **{name: FAMILIES[name] for name in ("llama", "mistral-window", "gemma2", "qwen2-window", "opt")},
    "falcon": lambda: FalconConfig(**{**SMALL, "num_attention_heads": 4}, alibi=False),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "seed": 5}


def target_of(folder: Path, family: str) -> Path:
    return save_folder(folder / family, make_model(READERS[family]()))


def open_engine(target: Path, draft: Path | None, **options: Any) -> Engine:
    tree = TreeSettings(size=9) if draft else TreeSettings(policy="none")
    return Engine.from_pair(open_pair(target, draft), tree=tree, context_tokens=128, **options)


def texts(
    engine: Engine, path: Path | None, prompts: Sequence[list[int]] = PROMPTS
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The texts at two temperatures, and how many tokens of each prompt were read."""
    if path is not None:
        cache = PromptCache(path, engine.pair, engine.run_config)
        cache.keep_beginning(prompts)
        engine.prefix_cache.prompt_cache = cache
    found, num_read = [], []
    for prompt in prompts:
        for temperature in (0.0, 0.9):
            num_read.append(0)

            def count(_done: int, total: int) -> None:
                num_read[-1] = total

            found.append(engine.generate(prompt, temperature=temperature, on_prefill=count, **OPTIONS).token_ids)
    return found, num_read


def contents(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[HEADER])
        return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118


@pytest.mark.parametrize("family", READERS)
def test_texts_are_the_same_with_and_without_and_read_only_what_is_new(
    family: str, draft: Path, tmp_path: Path
) -> None:
    target, path = target_of(tmp_path, family), tmp_path / "prompt.safetensors"
    with open_engine(target, draft) as engine:
        expected, _ = texts(engine, None)
    for run in range(2):
        with open_engine(target, draft) as engine:
            found, num_read = texts(engine, path)
        assert found == expected
        assert num_read[1:] == [3, 2, 2, 2, 2], "the rest of each prompt"
        assert num_read[0] == (43 if run == 0 else 3)
    tensors, header = contents(path)
    assert header["ids"]["target"] == SYSTEM
    assert header["ids"]["draft"] == SYSTEM
    assert {name.split(".")[0] for name in tensors} == {"target", "draft"}


def logits_behind(engine: Engine, path: Path, prompt: list[int]) -> list[torch.Tensor]:
    """The target's and the draft's logits [vocab] behind a prompt that begins on the file's rows."""
    cache = PromptCache(path, engine.pair, engine.run_config)
    caches = cache.begin(prompt, engine.target_model, engine.draft_model, ())
    found = []
    for model, text in ((engine.target_model, caches.target), (engine.draft_model, caches.draft)):
        found.append(model.read_text(text, torch.tensor(prompt[len(text.ids) :])))
    return found


@pytest.mark.parametrize("family", READERS)
def test_rows_are_those_that_reading_gives(family: str, draft: Path, tmp_path: Path) -> None:
    target, path = target_of(tmp_path, family), tmp_path / "prompt.safetensors"
    prompt = PROMPTS[1]
    with open_engine(target, draft) as engine:
        texts(engine, path)
        expected = [
            model.read_text(model.new_text(), torch.tensor(prompt))
            for model in (engine.target_model, engine.draft_model)
            if model is not None
        ]
        torch.testing.assert_close(logits_behind(engine, path, prompt), expected, rtol=1e-4, atol=1e-4)


def changed_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model", "is of 'llama'"),
        ("rotation", "is of 'llama'"),
        ("dtype", "made with `dtype=float32`, and this is `dtype=bfloat16`"),
        ("quant", "made with `quant=none`, and this is `quant=nf4`"),
        ("cut", "cannot be read"),
        ("bytes", "is damaged"),
        ("ids", "is damaged"),
        ("tokens", "is of schema"),
        ("folder", "is a folder"),
    ],
)
def test_a_file_of_anything_else_is_refused_before_weights_are_read(
    change: str, message: str, draft: Path, tmp_path: Path
) -> None:
    target, path = target_of(tmp_path, "llama"), tmp_path / "prompt.safetensors"
    with open_engine(target, draft) as engine:
        texts(engine, path, PROMPTS[:1])
    options: dict[str, Any] = {}
    if change == "model":
        save_folder(target, make_model(READERS["llama"](), seed=9))
    elif change == "rotation":
        changed_config(target, rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    elif change in ("dtype", "quant"):
        options = {"dtype": "bfloat16"} if change == "dtype" else {"quant": "nf4"}
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif change == "bytes":
        content = bytearray(path.read_bytes())
        content[-7] ^= 1
        path.write_bytes(content)
    elif change == "ids":
        tensors, header = contents(path)
        ids = {**header["ids"], "target": header["ids"]["target"][::-1]}
        save_file(tensors, path, metadata={HEADER: json.dumps(header | {"ids": ids})})
    elif change == "tokens":
        tensors, header = contents(path)
        save_file(tensors, path, metadata={HEADER: json.dumps(header | {"schema": "edgespec.prompt/0"})})
        message = "is no prompt cache of schema"
    else:
        path.unlink()
        path.mkdir()
    before = path.read_bytes() if path.is_file() else b""
    with open_engine(target, draft, **options) as engine, pytest.raises(EdgespecError) as caught:
        PromptCache(path, engine.pair, engine.run_config)
    assert caught.value.code == "E_PROMPT_CACHE"
    assert message in caught.value.what
    assert (path.read_bytes() if path.is_file() else b"") == before, "and it stays as it is"


@pytest.mark.parametrize("words", [(None, "none"), ("none", None)])
def test_rows_of_published_weights_in_a_kernels_form_are_not_those_without_one(
    words: tuple[str | None, str | None], tmp_path: Path
) -> None:
    path, prompt = tmp_path / "prompt.safetensors", [number % 60 for number in range(40)]
    with open_engine(TINY / "llama-q8_0.gguf", None, quant=words[0], dtype="bfloat16") as engine:
        texts(engine, path, [prompt])
    names = tuple(f"`quant={word or 'repacked'}`" for word in words)
    wrong = pytest.raises(EdgespecError, match=f"made with {names[0]}, and this is {names[1]}")
    with open_engine(TINY / "llama-q8_0.gguf", None, quant=words[1], dtype="bfloat16") as engine, wrong:
        PromptCache(path, engine.pair, engine.run_config)


def test_a_rotation_that_depends_on_the_whole_text_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = save_folder(tmp_path / "dynamic", make_model(LlamaConfig(**SMALL, rope_parameters=rope)))
    with open_engine(target, None) as engine, pytest.raises(EdgespecError, match="depend on the length"):
        PromptCache(tmp_path / "prompt.safetensors", engine.pair, engine.run_config)


def test_another_drafts_rows_are_not_used_and_replaced(draft: Path, tmp_path: Path) -> None:
    target, path = target_of(tmp_path, "llama"), tmp_path / "prompt.safetensors"
    other = save_folder(tmp_path / "other", make_model(FAMILIES["qwen2"](), seed=4))
    with open_engine(target, None) as engine:
        expected, _ = texts(engine, path)
    assert contents(path)[1]["ids"]["draft"] == []
    for folder in (draft, other):
        with open_engine(target, folder) as engine:
            found, num_read = texts(engine, path)
        assert found == expected, "a draft decides on nothing"
        assert num_read[0] == 3, "the target's rows are used"
        header = contents(path)[1]
        assert header["ids"]["draft"] == SYSTEM
        assert header["draft"]["name"] == folder.name


def test_the_longest_common_beginning_is_used_and_only_longer_ones_are_written(draft: Path, tmp_path: Path) -> None:
    target, path = target_of(tmp_path, "llama"), tmp_path / "prompt.safetensors"

    def run(*prompts: list[int]) -> tuple[int, list[int]]:
        with open_engine(target, draft) as engine:
            _, num_read = texts(engine, path, prompts)
        return num_read[0], contents(path)[1]["ids"]["target"]

    assert run(*PROMPTS) == (43, SYSTEM)
    assert run([*SYSTEM, 1, 2, 3]) == (3, [*SYSTEM, 1, 2]), "it goes on where the file ends"
    assert run([*SYSTEM, 9, 9, 9]) == (3, [*SYSTEM, 1, 2]), "and stays where it goes on otherwise"
    assert run([*SYSTEM[:20], 9]) == (1, [*SYSTEM, 1, 2])
    assert run([5] * 30) == (30, [5] * 29), "with nothing in common it is replaced"
    assert run([6, 7, 8]) == (3, [5] * 29), "too short to keep"


def test_a_cut_write_leaves_the_old_file_and_the_run_goes_on(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, path = target_of(tmp_path, "llama"), tmp_path / "prompt.safetensors"
    with open_engine(target, draft) as engine:
        texts(engine, path)
    before = path.read_bytes()

    def full(_tensors: Any, partial: Path, **_named: Any) -> None:
        partial.write_bytes(before[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgespec.prefix_cache.prompt_cache.save_file", full)
    with open_engine(target, draft) as engine:
        found, _ = texts(engine, path, [[*SYSTEM, 1, 2, 3]])
    assert all(len(text) == OPTIONS["max_new_tokens"] for text in found)
    assert "cannot be written" in caplog.text
    assert path.read_bytes() == before
    assert list(tmp_path.glob("*.partial")) == []


def test_a_file_that_goes_away_in_a_run_is_no_longer_used(
    draft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, path = target_of(tmp_path, "llama"), tmp_path / "prompt.safetensors"
    with open_engine(target, draft) as engine:
        expected, _ = texts(engine, path)
    with open_engine(target, draft) as engine:
        engine.prefix_cache.prompt_cache = PromptCache(path, engine.pair, engine.run_config)
        shutil.move(path, tmp_path / "elsewhere")
        found = [engine.generate(PROMPTS[0], temperature=0.0, **OPTIONS).token_ids]
    assert found == expected[:1]
    assert "no longer used" in caplog.text


def test_features_that_a_head_reads_are_kept_too() -> None:
    cache, other = TextCache(1, keeps_hidden=True), TextCache(1, keeps_hidden=True)
    rows, features = torch.randn(1, 2, 5, 4), torch.randn(5, 3)
    cache.layers[0].append(rows, rows + 1)
    cache.write_hidden(0, features)
    cache.commit_next([1, 2, 3, 4])
    other.fill(cache.tensors().get, list(cache.ids))
    assert torch.equal(other.features_before(0, 5), cache.features_before(0, 5))
    keys, values = other.layers[0].append(rows[:, :, 4:], rows[:, :, 4:] + 1)
    assert torch.equal(keys, rows)
    assert torch.equal(values, rows + 1)


def test_a_recurrent_state_is_refused(tmp_path: Path) -> None:
    target = save_folder(tmp_path / "recurrent", make_model(RECURRENT["lfm2"]()))
    with open_engine(target, None) as engine, pytest.raises(EdgespecError, match="has recurrent layers"):
        PromptCache(tmp_path / "prompt.safetensors", engine.pair, engine.run_config)
