"""Rows are read whatever packs them and however they come; what is no text is refused by its name."""

import bz2
import datetime
import gzip
import json
import lzma
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.prompts.read import read_prompts
from edgespec.errors import EdgespecError
from tests.cli.conftest import RunCli

ROWS = [{"id": "a", "prompt": "def main("}, {"id": "b", "prompt": "grüß\u2028dich", "temperature": 0.5}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
PROMPTS = [row["prompt"] for row in ROWS]


def read(folder: Path, name: str, data: bytes | str, **options: Any) -> list[str]:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return [row.prompt for row in read_prompts(str(path), **{"lines": False, **options})]


@pytest.mark.parametrize("name", ["p.txt", "p", "p.jsonlines", "p.jl", "p.jsonl (1)", "p.json", "p.JSONL"])
def test_text_whose_every_line_is_a_json_object_is_rows(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, name, JSONL) == PROMPTS
    assert read(tmp_path, name, JSONL.replace("\n", "\r\n\r\n")) == PROMPTS


@pytest.mark.parametrize("name", ["p.txt", "p", "p.jsonl"])
def test_a_json_array_of_objects_is_rows(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, name, json.dumps(ROWS, indent=1)) == PROMPTS


def test_a_wrong_line_below_rows_makes_no_prompt_of_them(tmp_path: Path) -> None:
    for wrong in (JSONL[:-9], JSONL + "Traceback", "\n" + JSONL + "{}\n"):
        with pytest.raises(EdgespecError, match=r"line [234]") as caught:
            read(tmp_path, "p.txt", wrong)
        assert "--input-format text" in caught.value.fix


def test_a_key_that_comes_twice_is_no_row(tmp_path: Path) -> None:
    for name in ("p.jsonl", "p.txt"):
        with pytest.raises(EdgespecError, match=r"line 1 is not JSON \(it has the key 'prompt' twice"):
            read(tmp_path, name, '{"prompt": "a", "prompt": "b"}')


@pytest.mark.parametrize("text", ['{"a": 1}\nand text', "[1, 2]", '{"a":\n', "{}}", '["a", "b"]', "[]", "{", '"a"'])
def test_other_text_stays_one_prompt(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, "p.txt", text) == [text.removesuffix("\n")]


def test_the_form_may_be_named_and_what_the_content_decided_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    assert read(tmp_path, "p.txt", JSONL, input_format="text", say=said.append) == [JSONL.removesuffix("\n")]
    assert read(tmp_path, "p.txt", JSONL, input_format="jsonl", say=said.append) == PROMPTS
    assert read(tmp_path, "p.jsonl", JSONL, say=said.append) == PROMPTS
    assert said == []
    assert read(tmp_path, "p.txt", JSONL, say=said.append) == PROMPTS
    assert read(tmp_path, "p.txt", JSONL, lines=True, say=said.append) == JSONL.split("\n")[:2]
    assert [line.partition("' ")[2] for line in said] == [
        "holds a JSON object a line, and is read as rows; --input-format text does not",
        "holds a JSON object a line: --lines makes each line a text, --input-format jsonl reads rows",
    ]
    with pytest.raises(EdgespecError, match="has none of") as caught:
        read(tmp_path, "p.txt", '{"text": "a"}')
    assert "--input-format text" in caught.value.fix


def test_rows_come_through_a_pipe(run_cli: RunCli) -> None:
    outcome = run_cli(["-", "--dry-run"], stdin=JSONL).ended()
    assert "prompts: 2 rows, single prompts" in outcome.err
    assert "'-' holds a JSON object a line, and is read as rows" in outcome.err


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_packed_files_are_unpacked(suffix: str, pack: Any, tmp_path: Path) -> None:
    packed = pack(JSONL.encode())
    assert read(tmp_path, f"p.jsonl{suffix}", packed) == read(tmp_path, "p", packed) == PROMPTS
    assert read(tmp_path, f"p.txt{suffix}", pack(b"one\n\ntwo\n")) == ["one\n\ntwo"]
    assert read(tmp_path, "p", pack(packed)) == PROMPTS
    for damaged in (packed[:-6], packed[:12] + b"\x00\x01" + packed[14:]):
        with pytest.raises(EdgespecError, match=f"cannot be unpacked as {suffix}"):
            read(tmp_path, f"p.jsonl{suffix}", damaged)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_byte_order_mark_says_the_encoding(encoding: str, tmp_path: Path) -> None:
    assert read(tmp_path, "p.jsonl", JSONL.encode(encoding)) == PROMPTS
    assert read(tmp_path, "p.txt", "grüß".encode(encoding)) == ["grüß"]
    big = b"\xfe\xff" + JSONL.encode("utf-16-be")
    assert read(tmp_path, "p.jsonl", big) == PROMPTS


def test_marks_of_joined_files_are_left_out(tmp_path: Path) -> None:
    other = JSONL.replace('"a"', '"c"').replace('"b"', '"d"')
    assert read(tmp_path, "p.jsonl", f"\ufeff{JSONL}\ufeff{other}") == PROMPTS * 2
    assert read(tmp_path, "p.jsonl", JSONL.replace("\n", "\r")) == PROMPTS


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("def main(".encode("utf-16-le"), "NUL characters"),
        ("grüß".encode("cp1252"), "not UTF-8"),
        (b"\xff\xfea", "not UTF-16"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "packed by zstd"),
        (b"PK\x03\x04\x14\x00", "a zip archive"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"GGUF\x03\x00\x00\x00", "a GGUF model"),
        (b"ARROW1\0\0", "an Arrow file"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(data: bytes, named: str, tmp_path: Path) -> None:
    for name in ("p.jsonl", "p.txt", "p"):
        with pytest.raises(EdgespecError, match=named) as caught:
            read(tmp_path, name, data)
        assert caught.value.code == "E_PROMPT_INVALID"


def test_tables_are_rows_by_the_names_of_their_first_line(tmp_path: Path) -> None:
    table = '\ufeffid,prompt,temperature,stop,level\n1,"a, b\nc",0.5,7,\n2,42,,,x\n'
    for name, content in (("p.csv", table), ("p.tsv", table.replace("a, b", "a; b").replace(",", "\t"))):
        (tmp_path / name).write_text(content, encoding="utf-8")
        first, second = read_prompts(str(tmp_path / name), lines=False)
        assert (first.id, first.prompt.replace(";", ",")) == ("1", "a, b\nc")
        assert first.settings.set_values() == {"temperature": 0.5, "stop": ("7",)}
        assert (second.id, second.prompt, second.settings.set_values(), second.meta) == ("2", "42", {}, {"level": "x"})
    for content, named in (
        ("question,answer\na,b\n", "has no column"),
        ("id,prompt\na,b,c\n", "row 1 of '.*' has 3 columns"),
        ('id,prompt\na,"b\n', "is no table"),
        ("id,prompt\n", "holds no prompt"),
        ("prompt,id,prompt\na,1,b\n", "names a column twice"),
        ("", "holds no prompt"),
    ):
        with pytest.raises(EdgespecError, match=named):
            read(tmp_path, "q.csv", content)
    assert read(tmp_path, "q.csv", 'id;"prompt"\n1;a, b\n') == ["a, b"]
    assert read(tmp_path, "q.csv", "id\tprompt\n1\ta\n".encode("utf-16")) == ["a"]
    assert read(tmp_path, "q.csv", f"prompt\n{'x' * 200_000}\n") == ["x" * 200_000]
    assert read(tmp_path, "q.csv", "def f(a, b):\n", input_format="text") == ["def f(a, b):"]


def test_parquet_without_its_library_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("p.parquet", "p"):
        with pytest.raises(EdgespecError, match="a Parquet file, and needs") as caught:
            read(tmp_path, name, b"PAR1\x15\xff")
        assert "pip install 'edgespec[parquet]'" in caught.value.fix


def test_rows_of_parquet_lack_what_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [{"prompt": None, "messages": [{"role": "user", "content": "x", "tool_calls": None}]}]
    pyarrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    pyarrow.parquet = parquet
    parquet.read_table = lambda _file: SimpleNamespace(to_pylist=lambda: rows)
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    (row,) = read_prompts(str(tmp_path / "p.parquet"), lines=False)
    assert row.messages == ({"role": "user", "content": "x"},)
    rows[:] = [{"prompt": "x", "when": datetime.date(2026, 1, 2)}]
    with pytest.raises(EdgespecError, match="row 1 holds what cannot be written"):
        read_prompts(str(tmp_path / "p.parquet"), lines=False)


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS[::-1]), tmp_path / "p.parquet")
    found = read_prompts(str(tmp_path / "p.parquet"), lines=False)
    assert [row.prompt for row in found] == PROMPTS[::-1]
    assert found[0].settings.set_values() == {"temperature": 0.5}
    (tmp_path / "p.parquet").write_bytes((tmp_path / "p.parquet").read_bytes()[:-9])
    with pytest.raises(EdgespecError, match="damaged, or no Parquet file"):
        read_prompts(str(tmp_path / "p.parquet"), lines=False)


def test_dash_is_stdout_for_results(run_cli: RunCli) -> None:
    outcome = run_cli(["p.jsonl", "-n", "2", "-o", "-"], files={"p.jsonl": JSONL}).ended()
    assert [json.loads(line)["id"] for line in sorted(outcome.out.splitlines())] == ["a", "b"]
    assert not Path("-").exists()
    outcome = run_cli(["p.jsonl", "-o", "-", "--resume"], files={"p.jsonl": JSONL})
    assert (outcome.code, "--resume is about an output file" in outcome.err) == (2, True)


def test_the_form_is_for_sources_and_one_alone(run_cli: RunCli) -> None:
    for flags, named in (
        (["-p", "x", "--input-format", "jsonl"], "--input-format jsonl is for files"),
        (["-p", "x", "--lines"], "--lines is for files"),
        (["p.txt", "--lines", "--input-format", "csv"], "--lines is --input-format lines"),
        (["p.txt", "--input-format", "yaml"], "yaml"),
    ):
        outcome = run_cli(flags, files={"p.txt": "x"})
        assert (outcome.code, named in outcome.err) == (2, True), outcome.err
