"""Facts of this machine, and the rate of its disk."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiles.measure import drop_page_cache, machine_facts, read_sequentially


def test_facts_name_the_machine_and_its_software() -> None:
    facts = machine_facts()
    assert facts.memory_bytes > 1 << 28
    assert facts.num_cores >= 1
    assert torch.__version__.startswith(facts.versions["torch"])  # a build's own name, as in +cu130, may be missing
    assert facts.processor


def test_a_card_is_asked_about_by_its_own_name_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {1: SimpleNamespace(name="RTX 3060", total_memory=12 << 30, uuid="b"), 0: None}
    asked: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="580.1, 4, 8\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cards[device.index])
    monkeypatch.setattr(subprocess, "run", run)
    facts = machine_facts(torch.device("cuda", 1))
    assert (facts.accelerator, facts.accelerator_bytes) == ("RTX 3060", 12 << 30)
    assert (facts.driver, facts.link) == ("580.1", "PCIe 4.0 x8")
    assert "--id=GPU-b" in asked[0]
    assert machine_facts(torch.device("cpu")).accelerator is None
    assert len(asked) == 1


def test_sequential_read_counts_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * (20 << 20))
    drop_page_cache([path])
    assert 1e6 < read_sequentially([path, path]).bytes_per_s < 1e12
