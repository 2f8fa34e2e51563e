"""What every packed format of the list holds to, and that nobody else tells formats apart."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch

from edgespec.config import QUANT_NAMES
from edgespec.placement.number_formats import MULTIPLIED
from offload.formats import bitsandbytes_4bit, bitsandbytes_int8
from offload.formats.known import FORMATS
from offload.formats.storage import Quantizer, StorageFormat
from offload.layouts import int4, nf4_cpu
from offload.layouts.known import QUANTIZERS, quantizer

ROOT = Path(__file__).parents[3]
LARGEST_ERRORS = {
    "int8": 0.008,
    "nf4": 0.1,
    "nf4-cpu": 0.09,
    "int4": 0.085,
}  # root mean square, over weights of variance 1


def name_of(known: StorageFormat) -> str:
    return known.name


def test_users_words_stand_for_every_format_that_weights_are_packed_in_and_no_other() -> None:
    meant = {*QUANT_NAMES.values(), *itertools.chain(*MULTIPLIED.values())}
    assert meant - {"none", "auto"} == {known.name for known in QUANTIZERS}
    assert len({known.name for known in FORMATS}) == len(FORMATS)
    with pytest.raises(KeyError):
        quantizer("fp4")


def test_the_troubleshooting_page_names_every_format_that_is_read() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    words = set(re.findall(r"[\w-]+", page.partition("## E_QUANTIZED\n")[2].partition("\n## ")[0]))
    assert all({known.name, *known.methods} <= words for known in FORMATS)


@pytest.mark.parametrize("known", QUANTIZERS, ids=name_of)
def test_rounding_is_as_small_as_the_format_allows(known: Quantizer) -> None:
    weight = torch.randn(128, 192)
    packing, parts = known.pack(weight)
    assert (packing.unpack(parts, torch.empty(128, 192)) - weight).square().mean().sqrt() < LARGEST_ERRORS[known.name]


@pytest.mark.parametrize("shape", [(128, 96), (128, 192), (96, 24), (2, 8, 24), (2, 64, 32), (2, 32, 64)], ids=str)
@pytest.mark.parametrize("known", QUANTIZERS, ids=name_of)
def test_what_is_packed_has_the_layout_that_was_planned(known: Quantizer, shape: tuple[int, ...]) -> None:
    if not known.packs(shape):
        pytest.skip("weights of this shape stay as they are")
    packing, parts = known.pack(torch.randn(shape))
    assert {part: (tuple(found.shape), found.dtype) for part, found in parts.items()} == known.part_shapes(shape)
    assert packing.stored_names("a.weight") == known.stored_names("a.weight")
    assert packing.stored_names("a.weight").keys() == parts.keys()
    assert packing.states("a.weight", shape).keys() == known.states("a.weight", shape).keys()


@pytest.mark.parametrize("known", QUANTIZERS, ids=name_of)
def test_packing_in_slices_changes_nothing(known: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(128, 192)
    packing, whole = known.pack(weight)
    for module in (bitsandbytes_4bit, bitsandbytes_int8, int4, nf4_cpu):
        monkeypatch.setattr(module, "WEIGHTS_AT_ONCE", 1024)
    sliced_packing, sliced = known.pack(weight)
    assert sliced_packing == packing
    assert all(torch.equal(whole[part], value) for part, value in sliced.items())


def test_only_the_formats_own_modules_compare_names_of_formats() -> None:
    names = {known.name for known in FORMATS}
    for path in [path for room in ("edgespec", "offload", "profiles") for path in (ROOT / room).rglob("*.py")]:
        if path.parent.name in {"formats", "layouts"} and path.parent.parent.name == "offload":
            continue
        compares = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                    if isinstance(node, ast.Compare | ast.MatchValue)]  # fmt: skip
        named = {node.value for compare in compares for node in ast.walk(compare) if isinstance(node, ast.Constant)}
        assert not named & names, path


def test_how_a_weight_is_stored_knows_nothing_of_how_it_is_multiplied() -> None:
    """Nor does a container: a layout may be added without a look at either."""
    for path in [path for room in ("formats", "gguf") for path in (ROOT / "offload" / room).glob("*.py")]:
        assert "offload.layouts" not in path.read_text(encoding="utf-8"), path
