"""Values of the wrong kind and JSON without end are one clear error, whoever reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edgespec import EdgespecError, MemoryLimits, SamplingSettings, TreeSettings
from edgespec.chat.session_file import read_session
from edgespec.cli.generate.resume import read_results
from edgespec.cli.prompts.read import read_prompts
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.stop_model import StopModel
from edgespec.pair.folder import open_model, read_json
from edgespec.sampling.grammar import json_schema_grammar
from edgespec.train.feature_files import FeatureRun, read_run
from edgespec.train.record_files import RecordsHeader, load_records, save_records
from edgespec.tree.shapes import read_shape
from edgespec.validation import checked, parse_json
from tests.conftest import make_tokenizer

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: SamplingSettings(top_k=2.5), "top_k=2.5"),  # type: ignore[arg-type]
        (lambda: SamplingSettings(top_k=True), "top_k=True"),
        (lambda: SamplingSettings(top_k=10**5000), "top_k=int too long"),
        (lambda: SamplingSettings(temperature="hot"), "temperature='hot'"),  # type: ignore[arg-type]
        (lambda: SamplingSettings(logit_bias=5), "logit_bias=5"),  # type: ignore[arg-type]
        (lambda: SamplingSettings(logit_bias={5: 10**400}), "logit_bias={5: 1000"),
        (lambda: SamplingSettings(logit_bias={"\ud800": 1}), r"logit_bias={'\ud800'"),
        (lambda: SamplingSettings(ignore_eos="yes"), "ignore_eos='yes'"),  # type: ignore[arg-type]
        (lambda: TreeSettings(size="5"), "size='5'"),  # type: ignore[arg-type]
        (lambda: TreeSettings(depth=None), "depth=None"),  # type: ignore[arg-type]
        (lambda: TreeSettings(policy=["a"]), "policy=['a']"),  # type: ignore[arg-type]
        (lambda: TreeSettings(draw=[1]), "draw=[1]"),  # type: ignore[arg-type]
        (lambda: TreeSettings(policy="mcsd", fork=(2,)), "fork=(2,)"),  # type: ignore[arg-type]
        (lambda: MemoryLimits(max_cpu_bytes="5GB"), "max_cpu_bytes='5GB'"),  # type: ignore[arg-type]
        (lambda: MemoryLimits(max_cpu_bytes=float("nan")), "max_cpu_bytes=nan"),  # type: ignore[arg-type]
    ],
)
def test_a_setting_of_the_wrong_kind_is_named_with_its_value(make: Callable[[], object], setting: str) -> None:
    with pytest.raises(EdgespecError) as caught:
        make()
    assert caught.value.code == "E_SETTING"
    assert f"`{setting}" in caught.value.what
    assert caught.value.fix.startswith("Give ")


def test_a_whole_float_is_a_whole_number_and_lists_are_tuples() -> None:
    sampling = SamplingSettings(top_k=50.0, temperature=np.float32(0.5), logit_bias={np.int64(5): 1})  # type: ignore[arg-type]
    assert (sampling.top_k, type(sampling.top_k), sampling.logit_bias) == (50, int, ((5, 1),))
    assert type(sampling.temperature) is float
    tree = TreeSettings(policy="mcsd", branching=[2, 2])  # type: ignore[arg-type]
    assert (tree.branching, tree.num_nodes) == ((2, 2), 6)
    assert TreeSettings(policy="static", tree_file="medusa").num_nodes == 63  # type: ignore[arg-type]
    with pytest.raises(EdgespecError, match="Give a text or a list"):
        checked("stop", 5, str | Sequence[str])


def test_json_is_all_that_comes_out() -> None:
    assert parse_json(b'{"a": [1, NaN]}')["a"][0] == 1
    for text in (DEEP, "{", '{"a":' * 5000, b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            parse_json(text)
    with pytest.raises(ValueError, match="NaN"):
        parse_json("NaN", is_strict=True)


def with_header(path: Path, header: str) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())


def deep_session(folder: Path) -> object:
    (folder / "s.json").write_text(DEEP)
    return read_session(folder / "s.json", make_tokenizer())


def deep_shape(folder: Path) -> object:
    (folder / "t.json").write_text(DEEP)
    return read_shape(folder / "t.json")


def deep_acceptance(folder: Path) -> object:
    (folder / "a.json").write_text(DEEP)
    return AcceptanceModel.load(folder / "a.json")


def deep_run(folder: Path) -> object:
    (folder / "run.json").write_text(DEEP)
    return read_run(folder)


def deep_records(folder: Path) -> object:
    save_file({"rank": torch.zeros(1)}, folder / "part-00001.safetensors", metadata={"edgespec": DEEP})
    return load_records(folder)


def deep_stop_model(folder: Path) -> object:
    save_file({"mean": torch.zeros(1)}, folder / "stop", metadata={"edgespec": DEEP})
    return StopModel.load(folder / "stop")


def deep_config(folder: Path) -> object:
    (folder / "config.json").write_text(DEEP)
    return read_json(folder / "config.json")


def deep_header(folder: Path) -> object:
    with_header(folder / "model.safetensors", DEEP)
    return open_model(folder)


def deep_index(folder: Path) -> object:
    (folder / "model.safetensors.index.json").write_text(DEEP)
    return open_model(folder)


def deep_prompts(folder: Path) -> object:
    (folder / "p.jsonl").write_text(DEEP)
    return read_prompts(str(folder / "p.jsonl"), lines=False)


def deep_results(folder: Path) -> object:
    (folder / "o.jsonl").write_text(DEEP + "\n{}\n")
    return read_results(folder / "o.jsonl", "jsonl")


DEEP_FILES = (
    deep_session, deep_shape, deep_acceptance, deep_run, deep_records, deep_stop_model, deep_config, deep_header,
    deep_index, deep_prompts, deep_results, lambda _folder: json_schema_grammar(DEEP),
)  # fmt: skip


@pytest.mark.parametrize("read", DEEP_FILES)
def test_lists_in_lists_without_end_are_one_error_of_each_reader(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(EdgespecError) as caught:
        read(tmp_path)
    assert caught.value.code != "E_FILE_NOT_FOUND"


@pytest.mark.parametrize(("name", "value"), [("prompt", "x"), ("target", ["a"]), ("temperature", None), ("tokens", {})])
def test_records_with_a_header_of_the_wrong_kind_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    header = RecordsHeader(
        target="big", draft="small", prompt=3, tree="opt-tree", draw="chosen", temperature=0.6, draft_temperature=0.6,
        num_trees=1, tokens=2.5,
    )  # fmt: skip
    path = save_records(tmp_path, {"rank": torch.zeros(2)}, header)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    written = json.loads(content[8 : 8 + length])
    written["__metadata__"]["edgespec"] = json.dumps(json.loads(written["__metadata__"]["edgespec"]) | {name: value})
    changed = json.dumps(written).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    with pytest.raises(EdgespecError, match=name) as caught:
        load_records(tmp_path)
    assert caught.value.code == "E_RECORDS"


def test_a_note_of_features_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    note = dict.fromkeys(FeatureRun.__dataclass_fields__, "x") | {"schema": "edgespec.features/1"}
    (tmp_path / "run.json").write_text(json.dumps(note))
    with pytest.raises(EdgespecError, match="hidden_size") as caught:
        read_run(tmp_path)
    assert caught.value.code == "E_FEATURES"
