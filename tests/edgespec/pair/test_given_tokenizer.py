"""A tokenizer in the place of a model's own has to have its tokens; folders and GGUF files go with each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.cli import run
from edgespec.errors import EdgespecError
from edgespec.pair.folder import open_model
from edgespec.pair.gguf_tokenizer import open_gguf_tokenizer
from edgespec.pair.pair import check_vocabularies, open_pair
from tests.offload.gguf.test_tiny_models import TINY, weights

FILE = TINY / "llama.gguf"
PROMPT = "the theatre"
BEGIN = 259  # the id of "<|begin|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the small file as a folder, with its tokenizer."""
    path = tmp_path_factory.mktemp("folder") / "model"
    config = open_model(FILE).config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights(FILE))
    model.save_pretrained(path)
    open_gguf_tokenizer(FILE).save_pretrained(path)
    return path


@pytest.fixture
def unread(tmp_path: Path) -> Path:
    """The file, whose texts are split in a way that nobody knows."""
    path = tmp_path / "unread.gguf"
    path.write_bytes(FILE.read_bytes().replace(b"gpt-2", b"gpt-X"))
    return path


def with_tokenizer(folder: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A folder with the tokenizer alone, changed."""
    path.mkdir()
    for file in folder.glob("*token*"):
        shutil.copy(file, path)
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    change(content)
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("is_file", [True, False], ids=["folder drafts", "file drafts"])
def test_a_folder_and_a_file_go_together(is_file: bool, folder: Path) -> None:
    target, draft = (FILE, folder) if is_file else (folder, FILE)
    pair = open_pair(target, draft)
    assert not pair.unshared
    texts = []
    for tree in (TreeSettings(policy="none"), TreeSettings(size=4)):
        with Engine.from_pair(pair, tree=tree, device="cpu", dtype="float32", context_tokens=64) as engine:
            greedy = SamplingSettings(temperature=0)
            texts.append(engine.generate(PROMPT, max_new_tokens=12, sampling=greedy, seed=0).token_ids)
    assert texts[0] == texts[1]


def test_other_tokens_do_not_go_together(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.copy(with_tokenizer(folder, tmp_path / "swapped", swap) / "tokenizer.json", other)
    for target, draft in ((FILE, other), (other, FILE)):
        with pytest.raises(EdgespecError, match="the draft's token ids differ") as caught:
            open_pair(target, draft)
        assert caught.value.code == "E_TOKENIZER_MISMATCH"


def test_files_may_name_an_added_token_otherwise(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(FILE.read_bytes().replace(b"<|begin|>", b"<|BEGIN|>"))
    assert open_pair(FILE, other).unshared == open_pair(other, FILE).unshared == {BEGIN}


def swap(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def more(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab |= {f"more {number}": max(vocab.values()) + 1 + number for number in range(400)}


@pytest.mark.parametrize(
    ("change", "said"),
    [(swap, "has other ids than '.*llama.gguf': '[ab]' is"), (more, "has 661 tokens, and '.*' has 261")],
)
def test_a_tokenizer_of_other_tokens_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, folder: Path, tmp_path: Path
) -> None:
    given = with_tokenizer(folder, tmp_path / "given", change)
    for check in (lambda: open_pair(FILE, None, given), lambda: check_vocabularies(open_model(FILE), None, given)):
        with pytest.raises(EdgespecError, match=said) as caught:
            check()
        assert caught.value.code == "E_TOKENIZER"


def test_a_tokenizer_counts_above_the_files(folder: Path, unread: Path) -> None:
    """Of a file that splits texts in an unknown way, too, and of a draft of its kind."""
    assert open_pair(FILE, None, folder).tokenizer.name_or_path == str(folder)
    with pytest.raises(EdgespecError, match="splits texts like 'gpt-X'"):
        open_pair(unread, None)
    pair = open_pair(unread, unread, folder)
    assert pair.tokenizer(PROMPT)["input_ids"] == open_gguf_tokenizer(FILE)(PROMPT)["input_ids"]
    assert not pair.unshared
    with Engine.from_pretrained(unread, tokenizer=str(folder), dtype="float32", device="cpu") as engine:
        assert engine.pair.tokenizer.name_or_path == str(folder)


def test_a_tokenizer_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EdgespecError, match=r"there is no tokenizer '.*nowhere'"):
        open_pair(FILE, None, tmp_path / "nowhere")
    assert run(["estimate", "-m", str(FILE), "--tokenizer", str(tmp_path / "nowhere")]) != 0
    assert "there is no tokenizer" in capsys.readouterr().err
    head = ["train", "head", "-m", str(FILE), "--data", str(FILE.parent), "-o", str(tmp_path / "head")]
    assert run([*head, "--tokenizer", str(tmp_path / "nowhere")]) != 0
    assert "there is no tokenizer" in capsys.readouterr().err
    assert run(["estimate", "--tokenizer", str(tmp_path)]) == 2
    assert "--tokenizer belongs to a target" in capsys.readouterr().err


def test_a_file_that_cannot_be_split_says_the_way_out(unread: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", str(unread), "-p", PROMPT, "--dry-run"]) != 0
    said = capsys.readouterr().err
    assert "'gpt2' that splits texts like 'gpt-X', which is not read" in said
    assert "own tokenizer with --tokenizer, or" in said
