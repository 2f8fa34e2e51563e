"""Special tokens of answers: in texts where they are asked for, and in the turns that follow in any case."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import RunCli, jsonl
from tests.support.families import make_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}\n{% endfor %}[a]"
MARK = "@"


@pytest.fixture
def options(pair_folders: tuple[Path, Path], tmp_path: Path) -> list[str]:
    """A run whose answers are special tokens."""
    folder, tokenizer = tmp_path / "model", make_tokenizer()
    shutil.copytree(pair_folders[0], folder)
    mark = tokenizer.convert_tokens_to_ids(MARK)
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    out = str(tmp_path / "out.jsonl")
    return ["p.jsonl", "-m", str(folder), "-n", "3", "--temp", "0", "--logit-bias", f"{mark}=100", "-o", out]


def test_flag_and_row_say_what_becomes_of_them(run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    rows = [
        {"id": "run", "prompt": "a"},
        {"id": "keeps", "prompt": "a", "skip_special_tokens": False},
        {"id": "drops", "prompt": "a", "skip_special_tokens": True},
    ]
    files = jsonl(rows)
    for flags, text in (([], ""), (["--special-tokens", "keep", "--overwrite"], MARK * 3)):
        assert run_cli([*options, *flags], files=files).code == 0
        found = {r["id"]: r["text"] for r in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
        assert found == {"run": text, "keeps": MARK * 3, "drops": ""}
    assert "skip_special_tokens false there, default here" in run_cli([*options, "--resume"]).ended(2).err
    wrong = run_cli(options, files={"p.jsonl": '{"prompt": "a", "skip_special_tokens": "no"}'}).ended(2)
    assert "line 1: skip_special_tokens 'no' is not true or false" in wrong.err


@pytest.mark.parametrize("flags", [[], ["--special-tokens", "keep"]])
def test_the_next_turn_is_given_them(flags: list[str], run_cli: RunCli, options: list[str], tmp_path: Path) -> None:
    files = {"p.jsonl": json.dumps({"turns": ["a", "b"]})}
    assert run_cli([*options, *flags], files=files).code == 0
    (record,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    expected = [len("[u]a\n[a]"), len(f"[u]a\n[a]{MARK * 3}\n[u]b\n[a]")]
    assert [turn["usage"]["prompt_tokens"] for turn in record["per_turn"]] == expected
