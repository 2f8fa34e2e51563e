"""Values of the wrong kind and JSON without end are one clear error, whoever reads them."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

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
from tests.support.damage import written
from tests.support.families import make_tokenizer

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: SamplingSettings(top_k=2.5), "top_k=2.5"),
        (lambda: SamplingSettings(top_k=True), "top_k=True"),
        (lambda: SamplingSettings(top_k=10**5000), "top_k=int too long"),
        (lambda: SamplingSettings(temperature="hot"), "temperature='hot'"),
        (lambda: SamplingSettings(logit_bias=5), "logit_bias=5"),
        (lambda: SamplingSettings(logit_bias={5: 10**400}), "logit_bias={5: 1000"),
        (lambda: SamplingSettings(logit_bias={"\ud800": 1}), r"logit_bias={'\ud800'"),
        (lambda: SamplingSettings(ignore_eos="yes"), "ignore_eos='yes'"),
        (lambda: TreeSettings(size="5"), "size='5'"),
        (lambda: TreeSettings(depth=None), "depth=None"),
        (lambda: TreeSettings(policy=["a"]), "policy=['a']"),
        (lambda: TreeSettings(draw=[1]), "draw=[1]"),
        (lambda: TreeSettings(policy="mcsd", fork=(2,)), "fork=(2,)"),
        (lambda: MemoryLimits(max_cpu_bytes="5GB"), "max_cpu_bytes='5GB'"),
        (lambda: MemoryLimits(max_cpu_bytes=float("nan")), "max_cpu_bytes=nan"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_named_with_its_value(make: Callable[[], object], setting: str) -> None:
    with pytest.raises(EdgespecError) as caught:
        make()
    assert caught.value.code == "E_SETTING"
    assert f"`{setting}" in caught.value.what
    assert caught.value.fix.startswith("Give ")


def test_a_whole_float_is_a_whole_number_and_lists_are_tuples() -> None:
    sampling = SamplingSettings(top_k=50.0, temperature=np.float32(0.5), logit_bias={np.int64(5): 1})
    assert (sampling.top_k, type(sampling.top_k), sampling.logit_bias) == (50, int, ((5, 1),))
    assert type(sampling.temperature) is float
    tree = TreeSettings(policy="mcsd", branching=[2, 2])
    assert (tree.branching, tree.num_nodes) == ((2, 2), 6)
    assert TreeSettings(policy="static", tree_file="medusa").num_nodes == 63
    with pytest.raises(EdgespecError, match="Give a text or a list"):
        checked("stop", 5, str | Sequence[str])


def test_json_is_all_that_comes_out() -> None:
    assert parse_json(b'{"a": [1, NaN]}')["a"][0] == 1
    for text in (DEEP, "{", '{"a":' * 5000, b"\xff"):
        with pytest.raises(ValueError, match=r".+"):
            parse_json(text)
    with pytest.raises(ValueError, match="NaN"):
        parse_json("NaN", is_strict=True)


HEADER = struct.pack("<Q", len(DEEP)) + DEEP.encode()
DEEP_NOTE = {"edgespec": DEEP}
DEEP_FILES: tuple[tuple[str, str | bytes, Callable[[Path], object]], ...] = (
    ("s.json", DEEP, lambda path: read_session(path, make_tokenizer())),
    ("t.json", DEEP, read_shape),
    ("a.json", DEEP, AcceptanceModel.load),
    ("run.json", DEEP, lambda path: read_run(path.parent)),
    ("part-00001.safetensors", save({"rank": torch.zeros(1)}, DEEP_NOTE), lambda path: load_records(path.parent)),
    ("stop", save({"mean": torch.zeros(1)}, DEEP_NOTE), StopModel.load),
    ("config.json", DEEP, read_json),
    ("model.safetensors", HEADER, lambda path: open_model(path.parent)),
    ("model.safetensors.index.json", DEEP, lambda path: open_model(path.parent)),
    ("p.jsonl", DEEP, lambda path: read_prompts(str(path), lines=False)),
    ("o.jsonl", DEEP + "\n{}\n", lambda path: read_results(path, "jsonl")),
    ("schema", "", lambda _: json_schema_grammar(DEEP)),
)


@pytest.mark.parametrize(("name", "content", "read"), DEEP_FILES)
def test_lists_in_lists_without_end_are_one_error_of_each_reader(
    name: str, content: str | bytes, read: Callable[[Path], object], tmp_path: Path
) -> None:
    written(name, content)(tmp_path)
    with pytest.raises(EdgespecError) as caught:
        read(tmp_path / name)
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
    stored = json.loads(content[8 : 8 + length])
    stored["__metadata__"]["edgespec"] = json.dumps(json.loads(stored["__metadata__"]["edgespec"]) | {name: value})
    changed = json.dumps(stored).encode()
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
