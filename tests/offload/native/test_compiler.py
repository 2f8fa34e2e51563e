"""Text becomes code, which the cache keeps."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from offload.native import compiler
from offload.native.compiler import compiled, is_available, keep_in

needs_kernels = pytest.mark.skipif(not is_available(), reason="no kernels can be compiled here")


def doubling(factor: float) -> str:
    from llvmlite import ir

    from offload.native.code import FLOAT, I64, POINTER, Code, function

    module = ir.Module("doubling")
    given = function(module, "times", {"numbers": POINTER, "count": I64})
    code = Code(given["function"])
    with code.loop(0, given["count"]) as index:
        place = code.mul(index, code.number(4))
        number = code.read(FLOAT, given["numbers"], place)
        code.write(code.fmul(number, ir.Constant(FLOAT, factor)), given["numbers"], place)
    code.ret_void()
    return str(module)


def times(text: str) -> list[float]:
    numbers = torch.arange(3.0)
    function = compiled(text).function("times", ctypes.c_void_p, ctypes.c_int64)
    function(numbers.data_ptr(), 2)
    return numbers.tolist()


@needs_kernels
def test_code_is_kept_and_is_found_for_its_own_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setattr(compiler, "_kept", [])
    keep_in(lambda: folder)
    assert times(doubling(2.0)) == [0.0, 2.0, 2.0]
    assert times(doubling(3.0)) == [0.0, 3.0, 2.0]
    kept = sorted(folder.iterdir())
    assert len(kept) == 2
    monkeypatch.setattr(compiler, "_optimise", None)
    assert times(doubling(2.0)) == [0.0, 2.0, 2.0]
    assert sorted(folder.iterdir()) == kept


@needs_kernels
def test_a_kept_file_that_is_broken_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_kept", [lambda: tmp_path])
    times(doubling(2.0))
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100])
    assert times(doubling(2.0)) == [0.0, 2.0, 2.0]
    assert kept.read_bytes() == whole


@needs_kernels
def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiler, "_kept", [lambda: tmp_path / "file" / "below"])
    assert times(doubling(2.0)) == [0.0, 2.0, 2.0]


def test_it_says_why_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setattr(compiler.platform, "machine", lambda: "s390x")
        compiler.why_unavailable.cache_clear()
        assert "s390x" in str(compiler.why_unavailable())
        monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
        monkeypatch.setitem(sys.modules, "llvmlite", None)
        compiler.why_unavailable.cache_clear()
        assert compiler.why_unavailable() == compiler.MISSING
    finally:
        compiler.why_unavailable.cache_clear()
