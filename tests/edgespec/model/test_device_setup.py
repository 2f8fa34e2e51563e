"""A device is set up for trees, limited, and left as it was found; CUDA here on a machine that has none."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgespec.model.device import set_up_device
from edgespec.model.environment import set_up_environment

GIB = 1 << 30


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=8 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: found.append(share))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("emptied"))
    return found


@pytest.mark.parametrize("had_cudnn", [True, False])
def test_cudnns_attention_is_left_out_while_a_pair_is_there(had_cudnn: bool, calls: list[Any]) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(had_cudnn)
    try:
        release = set_up_device(torch.device("cuda", 0), most_bytes=None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        release()
        assert torch.backends.cuda.cudnn_sdp_enabled() == had_cudnn
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert calls == ["emptied"]


def test_a_limit_is_the_allocators_too_until_the_pair_is_gone(calls: list[Any]) -> None:
    release = set_up_device(torch.device("cuda", 0), most_bytes=2 * GIB)
    assert calls == [0.25]
    release()
    assert calls == [0.25, 1.0, "emptied"]
    set_up_device(torch.device("cuda", 0), most_bytes=99 * GIB)()
    assert calls[3] == 1.0


@pytest.mark.skipif(sys.platform == "win32", reason="CUDA has no such memory there")
@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}])
def test_memory_that_grows_leaves_no_holes_unless_the_user_has_settings(
    own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(own))
    set_up_environment()
    found = {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert found == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_on_a_cpu_nothing_changes(calls: list[Any]) -> None:
    set_up_device(torch.device("cpu"), most_bytes=GIB)()
    assert calls == []
