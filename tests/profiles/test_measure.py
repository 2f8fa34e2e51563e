"""Facts and timings of this machine."""

from pathlib import Path

import torch

from profiles.measure import drop_page_cache, machine_facts, sequential_read_bytes_per_s


def test_facts_name_the_machine_and_its_software() -> None:
    facts = machine_facts()
    assert facts.memory_bytes > 1 << 28
    assert facts.num_cores >= 1
    assert facts.versions["torch"] == torch.__version__
    assert facts.processor


def test_sequential_read_counts_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * (20 << 20))
    drop_page_cache([path])
    assert 1e6 < sequential_read_bytes_per_s([path, path]) < 1e12
