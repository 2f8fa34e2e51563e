"""`edgespec estimate` of a mixture: what a row asks for, where it comes from, and what would be elsewhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import run
from edgespec.estimate import speed
from tests.edgespec.estimate.test_experts import BIG

CARD = ["--hardware", "rtx-4060", "--max-gpu-mem", "3GiB", "-c", "256"]


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**BIG, "dtype": "bfloat16"}))
    return str(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(["estimate", *arguments]) == 0
    return capsys.readouterr().out


def plain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(said(capsys, *arguments, "--json"))["speed"]["plain"]
    return facts


def test_it_says_what_a_row_asks_for_and_where_it_comes_from(capsys: pytest.CaptureFixture[str], mixture: str) -> None:
    out = said(capsys, mixture, *CARD, "--max-cpu-mem", "5GiB")
    assert "a row asks for 4 of 64 in each of 12 layers, 12 MiB each, 9.0 GiB in all" in out
    assert "stay on the card" in out
    assert "the rest on disk" in out
    assert "n rows of a text ask for as many experts as n^0.75 independent ones (0.65 to 0.9)" in out
    assert "1 row asks for 48 experts: " in out
    assert "GiB from disk" in out
    tight = said(capsys, mixture, "--hardware", "rtx-4060", "--max-gpu-mem", "1GiB", "-c", "256")
    assert re.search(r"; at most \d+\.\d+ GiB move in each pass", tight)  # with those that no row asks for
    roomy = said(capsys, mixture, *CARD, "--max-cpu-mem", "16GiB")
    assert "disk" not in next(line for line in roomy.splitlines() if "row asks for 48" in line)


def test_the_seconds_of_experts_come_on_top_and_are_given_to_programs(
    capsys: pytest.CaptureFixture[str], mixture: str
) -> None:
    facts = plain(capsys, mixture, *CARD, "--max-cpu-mem", "16GiB")
    experts = facts["experts"]
    assert (experts["layers"], experts["experts_a_layer"], experts["chosen"]) == (12, 64, 4)
    assert experts["asked"] == 48
    assert experts["disk_bytes"] == 0
    assert 0 < experts["computed_on_cpu"] < 48
    assert experts["link_bytes"] == 0
    # RAM of 60 GB/s is faster than PCIe 4.0 x8.
    in_place_bytes = experts["computed_on_cpu"] * experts["expert_bytes"]
    assert experts["elsewhere_s"] == pytest.approx(in_place_bytes / 60e9, rel=1e-3)
    added_s = max(experts["elsewhere_s"], experts["compute_s"])
    assert facts["pass_s"]["likely"] >= max(facts["stream_s"]["likely"], facts["compute_s"]["likely"]) + added_s
    everything = plain(capsys, mixture, "--hardware", "h200", "-c", "256")["experts"]
    assert everything["link_bytes"] == everything["disk_bytes"] == 0
    assert everything["computed_on_cpu"] == 0
    packed = plain(capsys, mixture, *CARD, "--max-cpu-mem", "16GiB", "--max-gpu-mem", "2200MiB", "--quant", "nf4")
    assert packed["experts"]["elsewhere_s"] == pytest.approx(
        packed["experts"]["link_bytes"] / (0.8 * 15.754e9), rel=1e-3
    )


def test_what_the_cpu_computes_is_said_and_what_kernels_of_others_would_do(
    capsys: pytest.CaptureFixture[str], mixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [mixture, *CARD, "--max-cpu-mem", "16GiB"]
    out = said(capsys, *options)
    assert "row asks for 48 experts: " in out
    assert "computed on the CPU where they lie" in out
    assert "kernels" not in out
    monkeypatch.setattr(speed, "packed_kernels_tokens_per_s", lambda *_: 1000.0)
    assert "by kernels that multiply packed weights, it would be 1e+03 tokens/s; edgespec unpacks" in said(
        capsys, *options
    )


def test_all_experts_can_be_left_to_the_cpu(capsys: pytest.CaptureFixture[str], mixture: str) -> None:
    out = said(capsys, mixture, *CARD, "--max-cpu-mem", "16GiB", "--experts", "cpu", "-ngl", "all")
    assert "12 of 12 layers resident" in out
    assert "768 of 768 experts" in out
    assert "of a layer 64 stay in RAM, and the CPU computes them" in out
    assert "48 computed on the CPU where they lie" in out


def test_texts_together_ask_for_more_than_one_and_less_than_each_alone(
    capsys: pytest.CaptureFixture[str], mixture: str
) -> None:
    options = [mixture, "--hardware", "rtx-4060", "-c", "256", "--max-cpu-mem", "16GiB"]
    asked = [plain(capsys, *options, "-np", count)["experts"]["asked"] for count in ("1", "8")]
    assert asked[0] < asked[1] < 8 * asked[0]
    assert "8 rows ask for" in said(capsys, *options, "-np", "8")


def test_a_dense_model_says_nothing_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert "experts" not in said(capsys, "--hardware", "rtx-3060")
