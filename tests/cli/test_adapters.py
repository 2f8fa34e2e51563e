"""--lora reaches the texts, the plan and the records: results with other adapters, or scales, are not gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgespec.cli.chat.recent import models_of
from tests.cli.conftest import RunCli
from tests.support.adapters import with_adapters, write_adapter
from tests.support.families import greedy_tokens

PROMPT = "def main("
NEW = 8


@pytest.fixture(scope="module")
def adapters(pair_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    room = tmp_path_factory.mktemp("adapters")
    model: Any = AutoModelForCausalLM.from_pretrained(pair_folders[0], dtype=torch.float32)
    one, two = (
        write_adapter(room / name, model, ["q_proj", "up_proj", "down_proj"], seed=seed)
        for seed, name in enumerate(("one", "two"))
    )
    return model, one, two


def arguments(pair: tuple[Path, Path], *lora: str, output: str = "out.jsonl") -> list[str]:
    given = [word for spec in lora for word in ("--lora", spec)]
    return ["rows.jsonl", "-m", str(pair[0]), "-md", str(pair[1]), *given, "-n", str(NEW), "--temp", "0",
            "--dtype", "float32", "--device", "cpu", "--ctx-size", "96", "--ignore-eos", "--no-self-check",
            "-o", output]  # fmt: skip


def test_texts_are_the_adapted_models_and_results_are_of_their_adapters(
    pair_folders: tuple[Path, Path], adapters: tuple[Any, Path, Path], run_cli: RunCli, tmp_path: Path
) -> None:
    model, one, two = adapters
    rows = {"rows.jsonl": json.dumps({"prompt": PROMPT}) + "\n"}
    found = run_cli([*arguments(pair_folders, str(one), f"{two}:0.5"), "-v"], files=rows).ended()
    assert "target: adapters" in found.err
    (record,) = map(json.loads, (tmp_path / "cwd" / "out.jsonl").read_text().splitlines())
    tokenizer = AutoTokenizer.from_pretrained(pair_folders[0])
    ids = greedy_tokens(with_adapters(model, (one, 1.0), (two, 0.5)), tokenizer.encode(PROMPT), NEW)
    assert record["text"] == tokenizer.decode(ids)
    assert record["text"] != tokenizer.decode(greedy_tokens(model, tokenizer.encode(PROMPT), NEW))
    run_cli([*arguments(pair_folders, str(one), f"{two}:0.5"), "--resume"]).ended()
    for other in ((str(one), str(two)), (str(one),), ()):
        refused = run_cli([*arguments(pair_folders, *other), "--resume"]).ended(2)
        assert "target" in refused.err or "adapters" in refused.err


WRONG = {
    "none there": ("/nowhere/at/all:2", "there is no adapter '/nowhere/at/all'"),
    "a model's folder": ("TARGET", "adapter_config.json"),
}


@pytest.mark.parametrize("of", WRONG)
def test_what_is_no_adapter_is_refused(of: str, pair_folders: tuple[Path, Path], run_cli: RunCli) -> None:
    given, words = WRONG[of]
    spec = str(pair_folders[0]) if given == "TARGET" else given
    found = run_cli(arguments(pair_folders, spec), files={"rows.jsonl": json.dumps({"prompt": PROMPT}) + "\n"})
    assert found.code != 0
    assert words in found.err


def test_a_chat_is_gone_on_with_its_adapters(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    content = {"model": str(pair_folders[0]), "draft_model": None, "adapters": [["one", "/somewhere/one", 0.5]]}
    path.write_text(json.dumps(content))
    (found,) = models_of(path).adapters
    assert (found.name, found.path, found.scale) == ("one", Path("/somewhere/one"), 0.5)
