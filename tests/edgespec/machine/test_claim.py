"""A card is claimed for a pair, limited, and left as it was found; CUDA here on a machine that has none."""

import os
import platform
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgespec.machine import claim, environment
from edgespec.machine.claim import claim_device
from edgespec.machine.environment import set_up_environment

GIB = 1 << 30
CARD = torch.device("cuda", 1)
WSL = "5.15.167.4-microsoft-standard-WSL2"


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done with CUDA, on a Linux of its own; the current card is the first."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=8 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: found.append(share))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("emptied"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(f"current: {device}"))
    monkeypatch.setattr(claim, "_set_allocator", found.append)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")
    return found


def claimed(*, limit_bytes: int | None = None, planned_bytes: int = 6 * GIB) -> None:
    claim_device(CARD, limit_bytes=limit_bytes, planned_bytes=planned_bytes)()


@pytest.mark.parametrize("had_cudnn", [True, False])
def test_cudnns_attention_is_left_out_while_a_pair_is_there(had_cudnn: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(had_cudnn)
    try:
        release = claim_device(CARD, limit_bytes=None, planned_bytes=GIB)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        release()
        assert torch.backends.cuda.cudnn_sdp_enabled() == had_cudnn
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_limit_is_the_allocators_too_until_the_pair_is_gone(calls: list[Any]) -> None:
    claimed(limit_bytes=2 * GIB)
    assert calls == ["current: cuda:1", "expandable_segments:True", 0.25, 1.0, "emptied", "current: 0"]
    claimed(limit_bytes=99 * GIB)
    assert calls[8] == 1.0


@pytest.mark.parametrize(("system", "release"), [("win32", "11"), ("linux", WSL)])
@pytest.mark.parametrize(("limit_bytes", "share"), [(None, 0.75), (2 * GIB, 0.25)])
def test_where_the_driver_spills_in_silence_the_plan_is_a_limit(
    limit_bytes: int | None, share: float, system: str, release: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would fail there, and trees would never become smaller; nor can segments grow."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "release", lambda: release)
    claimed(limit_bytes=limit_bytes)
    assert calls == ["current: cuda:1", share, 1.0, "emptied", "current: 0"]


@pytest.mark.parametrize("torch_version", ["2.9.1+cu128", "2.10.0", "2.11.0", "3.0"])
@pytest.mark.parametrize("own", [{}, {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_CUDA_ALLOC_CONF": "x"}])
@pytest.mark.parametrize("set_up", [set_up_environment, lambda: None], ids=["commands", "python"])
def test_segments_grow_unless_the_user_has_settings(
    set_up: Any, own: dict[str, str], torch_version: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a command or a program claims the card: by a call, and by a variable that older ones of torch heed."""
    monkeypatch.setattr(os, "environ", dict(own))
    monkeypatch.setattr(environment, "version", lambda _name: torch_version)
    set_up()
    claimed()
    is_old = torch_version.startswith(("2.9", "2.10"))
    found = {name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert found == (own or ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if is_old else {}))
    assert "expandable_segments:True" in (*calls, *found.values()) or own


def test_this_torch_has_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    claim._set_allocator("expandable_segments:False")


def test_on_a_cpu_nothing_changes(calls: list[Any]) -> None:
    claim_device(torch.device("cpu"), limit_bytes=GIB, planned_bytes=GIB)()
    assert calls == []
