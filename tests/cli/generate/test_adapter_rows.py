"""Rows choose among the run's adapters: each text is the one of its own, and results know theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edgespec.cli.prompts.rows import PromptRow, parse_row, with_adapter_of_model
from edgespec.errors import EdgespecError
from tests.cli.conftest import RunCli
from tests.support.adapters import with_adapters, write_adapter
from tests.support.families import greedy_tokens

PROMPT = "def main("
NEW = 8
ROWS: dict[str, tuple[dict[str, Any], tuple[tuple[str, float], ...]]] = {  # what a row has -> its adapters
    "default": ({}, (("one", 1.0),)),
    "two": ({"adapter": "two"}, (("two", 1.0),)),
    "none": ({"adapter": None}, ()),
    "both": ({"adapters": ["two", "one"]}, (("two", 1.0), ("one", 1.0))),
    "scaled": ({"adapter": {"two": 0.5}}, (("two", 0.5),)),
    "empty": ({"adapter": []}, ()),
    "one": ({"options": {"adapter": "one", "temperature": 0}}, (("one", 1.0),)),
}


@pytest.fixture(scope="module")
def adapters(pair_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    room = tmp_path_factory.mktemp("adapters")
    model: Any = AutoModelForCausalLM.from_pretrained(pair_folders[0], dtype=torch.float32)
    ends = ["q_proj", "up_proj", "down_proj"]
    return model, {name: write_adapter(room / name, model, ends, seed=seed) for seed, name in enumerate(("one", "two"))}


def arguments(pair: tuple[Path, Path], adapters: dict[str, Path], *rest: str) -> list[str]:
    return ["rows.jsonl", "-m", str(pair[0]), "-md", str(pair[1]), "--lora", str(adapters["one"]),
            "--lora", f"{adapters['two']}:0", "-n", str(NEW), "--temp", "0", "--dtype", "float32", "--device", "cpu",
            "--ctx-size", "96", "--ignore-eos", "--no-self-check", "-np", "8", "-o", "out.jsonl", *rest]  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)}


def test_each_row_has_the_text_of_its_adapters(
    pair_folders: tuple[Path, Path], adapters: tuple[Any, dict[str, Path]], run_cli: RunCli, tmp_path: Path
) -> None:
    """In one run, whatever the rows beside it have; a batch's model may name one as a server's does."""
    model, places = adapters
    rows = [{"id": name, "prompt": PROMPT, **own} for name, (own, _) in ROWS.items()]
    body = {"model": "edgespec:two", "prompt": PROMPT, "max_tokens": NEW}
    rows.append({"custom_id": "batch", "url": "/v1/completions", "method": "POST", "body": body})
    assert "not applied" not in run_cli(arguments(pair_folders, places), files=lines(rows)).ended().err
    path = tmp_path / "cwd" / "out.jsonl"
    records = {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}
    tokenizer = AutoTokenizer.from_pretrained(pair_folders[0])
    uses = {**{name: use for name, (_, use) in ROWS.items()}, "batch": (("two", 1.0),)}
    texts = {}
    for name, use in uses.items():
        wanted = with_adapters(model, *((places[one], scale) for one, scale in use))
        texts[name] = tokenizer.decode(greedy_tokens(wanted, tokenizer.encode(PROMPT), NEW))
        assert records[name]["text"] == texts[name], name
    assert len(set(texts.values())) == 5
    assert records["scaled"]["row_settings"]["adapter"] == [["two", 0.5]]
    assert records["none"]["row_settings"]["adapter"] == []

    assert run_cli([*arguments(pair_folders, places), "--resume"]).code == 0
    swapped = run_cli([*arguments(pair_folders, {**places, "two": Path(f"two={places['one']}")}), "--resume"])
    assert swapped.code == 2, "another adapter under a name that only rows choose"
    assert "adapters" in swapped.err
    rows[1]["adapter"] = "one"
    assert "adapter" in run_cli([*arguments(pair_folders, places), "--resume"], files=lines(rows)).ended(2).err
    rows[1]["adapter"] = "two"
    body["model"] = "edgespec:one"
    assert "adapter" in run_cli([*arguments(pair_folders, places), "--resume"], files=lines(rows)).ended(2).err


WRONG: dict[str, tuple[Any, str]] = {
    "no such name": ("three", "line 2: there is no adapter 'three'"),
    "twice": (["one", "one"], "line 2: the adapter 'one' is chosen twice"),
    "a number": (5, "line 2: adapter 5"),
    "a scale that is none": ({"one": "much"}, "line 2: adapter"),
}


@pytest.mark.parametrize("of", WRONG)
def test_a_choice_that_is_none_is_refused_with_its_row(
    of: str, pair_folders: tuple[Path, Path], adapters: tuple[Any, dict[str, Path]], run_cli: RunCli
) -> None:
    value, words = WRONG[of]
    rows = [{"prompt": PROMPT, "adapter": "one"}, {"prompt": PROMPT, "adapter": value}]
    assert words in run_cli(arguments(pair_folders, adapters[1]), files=lines(rows)).ended(2).err


def row_of(**fields: Any) -> PromptRow:
    return parse_row({"id": "a", "prompt": PROMPT, **fields}, "line 1")


def test_a_models_name_chooses_only_where_it_names_an_adapter() -> None:
    """And nothing where the row chooses itself; of two names the longer."""
    names = ("two", "b:two")
    assert with_adapter_of_model(row_of(model="base:two"), names).settings.adapter == ("two",)
    assert with_adapter_of_model(row_of(model="a:b:two"), names).settings.adapter == ("b:two",)
    for same in (row_of(model="base:three"), row_of(model="two"), row_of(), row_of(model="base:two", adapter=None)):
        assert with_adapter_of_model(same, names) is same
    assert with_adapter_of_model(row_of(model="base:three"), names).ignored_keys == {"model"}
    with pytest.raises(EdgespecError, match="both"):
        row_of(adapter="one", adapters=["two"])
