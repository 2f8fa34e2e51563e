"""The checks of a CUDA device, as far as a machine without one can try them: each end has its verdict, and the file."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from edgespec.model import cuda_graphs
from edgespec.model.cuda_graphs import WORKSPACE_BYTES
from offload.experts import mixture
from offload.formats.four_bits_kernel import works_on
from offload.layouts import gguf_on_card
from scripts import gpu_check
from scripts.gpu import card, child, experts, graphs, greedy, packed, sampled, small, tests, together, waiting
from scripts.gpu.finding import Finding
from scripts.gpu.parts import PARTS, Part
from scripts.gpu.processes import Outcome
from scripts.gpu.slow import differing_when_slow
from scripts.gpu.streaming import check_streaming, faults_of
from tests.offload.layouts.test_gguf_on_card import right, rounded_twice
from tests.support.pretend_cuda import PretendCudaDevice, pretend_cuda

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.5
WRITE = "import json, os, sys, time; from pathlib import Path; write = lambda verdict, reason='': Path(sys.argv[-1])"
WRITE += ".write_text(json.dumps({'verdict': verdict, 'reason': reason, 'found': [7]}));"
FAULTS = {  # programs that do what a part may do -> the verdict, and words of its reason
    "machine": ("write('PASS')", "PASS", ""),
    "greedy": ("write('FAIL', 'texts differ')", "FAIL", "texts differ"),
    "locked": ("write('SKIPPED', 'no Triton')", "SKIPPED", "no Triton"),
    "graphs": ("os.abort()", "CRASHED", "SIGABRT" if sys.platform != "win32" else "exit code"),
    "packed": ("write('PASS'); print('device-side assert', flush=True); os._exit(3)", "CRASHED", "exit code 3"),
    "small": ("pass", "CRASHED", "without a finding"),
    "slow": ("Path(sys.argv[-1]).write_text('{\"verd')", "CRASHED", "without a finding"),
    "streaming": (  # and what it started hangs as well
        "import subprocess; print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']).pid, "
        "flush=True); time.sleep(60)",
        "HUNG",
        "0.5 s",
    ),
    "tests": ("write('PASS')", "PASS", ""),
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Parts with faults; the place of the report."""

    def command(name: str, **_settings: Any) -> list[str]:
        return [sys.executable, "-S", "-E", "-c", WRITE + FAULTS[name][0]]

    parts = {name: Part(about="", limit_s=LIMIT_S if name == "streaming" else 30) for name in FAULTS}
    monkeypatch.setattr(gpu_check, "command_of", command)
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--output", str(tmp_path / "found.json")])
    return tmp_path / "found.json"


def test_each_end_of_a_part_has_its_verdict_and_takes_no_other_with_it(
    planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main() == 1
    parts = json.loads(planted.read_text(encoding="utf-8"))["parts"]
    assert {name: part["verdict"] for name, part in parts.items()} == {name: of[1] for name, of in FAULTS.items()}
    for name, (_, _, reason) in FAULTS.items():
        assert reason in parts[name]["reason"]
    assert parts["greedy"]["found"] == [7]
    assert "device-side assert" in parts["packed"]["output"]
    assert parts["streaming"]["seconds"] < 5
    if sys.platform != "win32":
        started = int(parts["streaming"]["output"])
        deadline = time.monotonic() + 5
        while is_alive(started):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 PASS, 1 FAIL, 4 CRASHED, 1 HUNG, 1 SKIPPED. Send ")


def is_alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_is_skipped_is_no_failure(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--only", "locked", "tests", "--output", str(planted)])
    assert gpu_check.main() == 0
    assert [*json.loads(planted.read_text(encoding="utf-8"))["parts"]] == ["machine", "locked", "tests"]


def test_who_stops_it_keeps_what_was_found(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_part = gpu_check.run_part

    def stopped(name: str, **settings: Any) -> Any:
        if name == "greedy":
            raise KeyboardInterrupt
        return run_part(name, **settings)

    monkeypatch.setattr(gpu_check, "run_part", stopped)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main()
    assert json.loads(planted.read_text(encoding="utf-8"))["parts"]["machine"]["found"] == [7]


def test_without_a_card_nothing_else_is_started(
    planted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FAULTS, "machine", ("write('SKIPPED', 'no device')", "SKIPPED", ""))
    assert gpu_check.main() == 0
    parts = json.loads(planted.read_text(encoding="utf-8"))["parts"]
    assert {part["verdict"] for part in parts.values()} == {"SKIPPED"}
    assert capsys.readouterr().out.splitlines()[-1] == "no CUDA device: nothing was checked"


@pytest.mark.parametrize(
    ("options", "are_run", "are_not"),
    [
        ([], {"packed"}, {"slow", "tests"}),
        (["--full"], {"packed", "slow"}, set()),
        (["--only", "slow"], {"slow"}, {"packed"}),
    ],
)
def test_some_parts_run_where_all_are_wanted_or_they_are_named(
    options: list[str], are_run: set[str], are_not: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_check, "run_part", lambda _name, **_settings: Outcome(verdict="PASS", seconds=1.0, reason="")
    )
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--output", str(tmp_path / "found.json"), *options])
    assert gpu_check.main() == 0
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["parts"].keys()
    assert found >= {"machine", *are_run}
    assert not found & are_not


def test_each_part_is_a_file_with_a_limit_of_minutes() -> None:
    found = {path.stem for path in (ROOT / "scripts" / "gpu").glob("*.py") if "\ndef check(" in path.read_text("utf-8")}
    assert found == {*PARTS}
    assert all(60 <= part.limit_s <= 180 for part in PARTS.values())


@pytest.fixture
def child_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Do what a part's process does, and return its finding."""
    monkeypatch.setattr(child, "set_up_environment", lambda: None)
    monkeypatch.setattr(
        child, "faulthandler", SimpleNamespace(enable=lambda: None, dump_traceback_later=lambda _s: None)
    )

    def run(name: str) -> dict[str, Any]:
        command = gpu_check.command_of(name, limit_s=60, is_full=False)
        module = command.index("-m") + 1
        assert command[module] == child.__name__
        monkeypatch.setattr("sys.argv", [*command[module:], str(tmp_path / "finding.json")])
        child.main()
        found: dict[str, Any] = json.loads((tmp_path / "finding.json").read_text(encoding="utf-8"))
        return found

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_part_without_a_card_is_skipped(child_of: Callable[[str], dict[str, Any]]) -> None:
    assert child_of("small")["verdict"] == "SKIPPED"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.usefixtures("pretended")
def test_an_error_of_python_or_of_a_last_kernel_fails_the_part(
    child_of: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def fail(**_settings: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(small, "check", judged_well if late else fail)
    if late:
        monkeypatch.setattr(torch.cuda, "synchronize", fail)
    finding = child_of("small")
    assert finding["verdict"] == "FAIL"
    assert "illegal memory access" in finding["reason"]
    assert "Traceback" in finding["found"]


def judged_well(**_settings: Any) -> Finding:
    return Finding(verdict="PASS")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card that computes as the host does, on which other programs have almost all memory but 8 GiB."""
    for name in ("synchronize", "reset_peak_memory_stats", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *_arguments: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_arguments: (8 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"segment.all.allocated": 0})
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with pretend_cuda():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(card, "SHAPES", {"7B-like": (256, 128, 6)})
        yield


@pytest.mark.usefixtures("pretended")
def test_streamed_passes_and_slow_ones_run_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with card.written_shape("7B-like") as pair:
        row = check_streaming(pair, 3, "none", 1.0)
        assert row["faults"] == []  # among them: from files comes every layer
        assert row["pass_gib"] > 0
        assert differing_when_slow(pair) == []
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: int(max(row["planned_gib"]) * card.GIB) + 1)
        facts = card.run_passes(pair, 3)
    logits = torch.full_like(facts.logits, torch.nan)
    assert faults_of([facts, replace(facts, logits=logits, num_allocations=1)]) == [
        "logits differ",
        "memory is allocated after the first pass",
        "the plan's memory is exceeded",
        "layers that were to come from files do not",
    ]
    in_allocator = [used for label, used in facts.placement.device_bytes.items() if label != "CUDA context"]
    assert facts.planned_bytes == sum(in_allocator) + WORKSPACE_BYTES


@pytest.mark.usefixtures("pretended")
def test_texts_run_through(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = greedy.read_prompts(str(card.PROMPTS), lines=False)[:1]
    monkeypatch.setattr(greedy, "read_prompts", lambda *_arguments, **_named: rows)
    assert greedy.check(is_full=False, new_tokens=3).verdict == "PASS"
    assert together.check(is_full=False, num_texts=2, new_tokens=3).verdict == "PASS"


@pytest.mark.usefixtures("pretended")
def test_texts_whose_keys_wait_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"is_full": False, "hidden": 64, "prompt_tokens": 150, "new_tokens": 6}
    found = waiting.check(**options)
    assert found.verdict == "PASS", found
    assert 0 < found.found["waiting"] < found.found["layers"]
    monkeypatch.setattr(PretendCudaDevice, "copy_back", lambda *_: None)
    assert waiting.check(**options).reason == "texts differ"


@pytest.mark.usefixtures("pretended")
def test_kernels_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SHAPE", (64, 256))
    monkeypatch.setattr(packed, "find_spec", lambda _name: "found")
    monkeypatch.setattr(gguf_on_card, "launch", right)
    monkeypatch.setattr(small, "SHAPE", (16, 16))
    found = packed.check(is_full=False)
    assert found.verdict == "PASS", found
    assert found.found["Q6_K_packed_up_to_rows"] == gguf_on_card.FEW_ROWS[0]
    monkeypatch.setattr(gguf_on_card, "launch", rounded_twice)
    works_on.cache_clear()
    assert packed.check(is_full=False).verdict == "FAIL"
    monkeypatch.setattr(graphs, "SHAPE", (128, 128, 2))
    monkeypatch.setattr(graphs, "CONTEXT", 20)
    assert small.check(is_full=False).found["copy_ms"] > 0
    assert graphs.check(is_full=False).verdict == "PASS"
    assert not {*graphs.ROWS} & {*cuda_graphs.ROWS}  # so that passes are padded


@pytest.mark.usefixtures("pretended")
def test_experts_that_come_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, more in (("gpt-oss", {"head_dim": 16}), ("qwen3-30b", {"head_dim": 16, "moe_intermediate_size": 32})):
        monkeypatch.setitem(experts.SIZES, name, {**experts.SIZES[name], **small, **more})
    monkeypatch.setattr(experts, "ROWS", (1, 9))
    found = experts.check(is_full=False)
    assert found.verdict == "PASS", found
    products = mixture.products
    monkeypatch.delitem(experts.SIZES, "gpt-oss")
    monkeypatch.setattr(mixture, "products", lambda weight, inputs: products(weight, inputs) * 1.1)
    assert experts.check(is_full=False).reason == "hidden states differ"


@pytest.mark.usefixtures("pretended")
def test_tokens_are_drawn_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, found = sampled.compared, []

    def both(*arguments: Any, **named: Any) -> Finding:
        found.extend(compared(*arguments, **named, temperature=of) for of in (sampled.TEMPERATURE, 1.0))
        return found[0]

    monkeypatch.setattr(sampled, "compared", both)
    assert sampled.check(is_full=False, texts=40).verdict == "PASS"
    assert found[1].verdict == "FAIL", found


def test_every_file_with_tests_of_a_device_is_run() -> None:
    marked = {
        str(path.relative_to(ROOT)).replace("\\", "/")
        for path in (ROOT / "tests").rglob("*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8") and path != Path(__file__)
    }
    assert marked == {*tests.FILES}
