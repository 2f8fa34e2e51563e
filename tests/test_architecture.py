"""The layout is the architecture: who imports whom, what loads when, what every error code says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgespec.cli import COMMANDS

ROOT = Path(__file__).parent.parent
MAX_LINES = 300

# module -> the modules of ours that it may import; a package stands for all below it
ALLOWED = {
    "offload": {"offload", "profiles.schema"},
    "profiles": {"profiles"},
    "edgespec.errors": set(),
    "edgespec.config": {"edgespec.errors"},
    "edgespec.tree": set(),
    "edgespec.sampling": {"edgespec.config"},
    "edgespec.cache": set(),
    "edgespec.masks": set(),
    "edgespec.layer_major": {"edgespec.errors", "edgespec.masks"},
    "edgespec.hidden_rows": set(),
    "edgespec.whole_file": set(),
    "edgespec.family_logits": {"offload.skeleton"},
    "edgespec.causal_model": {
        "edgespec.cache",
        "edgespec.errors",
        "edgespec.family_logits",
        "edgespec.hidden_rows",
        "edgespec.layer_major",
        "edgespec.masks",
        "offload.skeleton",
    },
    "edgespec.self_check": {"edgespec.causal_model", "edgespec.errors", "edgespec.target", "edgespec.tree"},
    "edgespec.context": {"edgespec.errors"},
    "edgespec.places": set(),
    "edgespec.names": {"edgespec.errors"},
    "edgespec.user_config": {"edgespec.errors", "edgespec.names"},
    "edgespec.named_pair": {"edgespec.errors", "edgespec.names", "edgespec.places", "edgespec.user_config"},
    "edgespec.checks": {"edgespec.places"},
    "edgespec.machine_checks": {"edgespec.checks", "edgespec.places", "offload.pinned", "profiles"},
    "edgespec.disk_speed": {"profiles.measure"},
    "edgespec.inventory": {
        "edgespec.errors",
        "edgespec.model_folder",
        "edgespec.names",
        "edgespec.pair",
        "edgespec.self_check",
        "edgespec.target",
        "edgespec.weights",
    },
    "edgespec.lossless": {"edgespec.causal_model", "edgespec.head", "edgespec.target", "edgespec.tree_settings"},
    "edgespec.planning": {
        "edgespec.config",
        "edgespec.device",
        "edgespec.model_folder",
        "edgespec.named_pair",
        "edgespec.pair",
        "edgespec.plan",
        "edgespec.target",
        "edgespec.tree_settings",
        "offload.placement",
    },
    "edgespec.benchmark": {"edgespec.config", "edgespec.engine", "edgespec.tree_settings"},
    "edgespec.draft": {
        "edgespec.causal_model",
        "edgespec.config",
        "edgespec.draft",
        "edgespec.errors",
        "edgespec.head",
        "edgespec.sampling",
        "edgespec.tree",
        "offload.skeleton",
    },
    "edgespec.shapes": {"edgespec.config", "edgespec.errors"},
    "edgespec.tree_settings": {"edgespec.config", "edgespec.errors", "edgespec.shapes"},
    "edgespec.grow": {
        "edgespec.config",
        "edgespec.draft",
        "edgespec.errors",
        "edgespec.grow",
        "edgespec.sampling",
        "edgespec.shapes",
        "edgespec.tree",
        "edgespec.tree_settings",
        "edgespec.whole_file",
    },
    "edgespec.verify": {
        "edgespec.config",
        "edgespec.errors",
        "edgespec.head",
        "edgespec.sampling",
        "edgespec.tree",
        "edgespec.verify",
    },
    "edgespec.train": {"edgespec", "offload"},
    "edgespec.tune": {"edgespec", "profiles"},
    "edgespec.load": {"edgespec.head", "edgespec.memory", "edgespec.weights", "offload", "profiles"},
    "edgespec.speed": {
        "edgespec.config",
        "edgespec.errors",
        "edgespec.grow",
        "edgespec.load",
        "edgespec.plan",
        "edgespec.shapes",
        "edgespec.tree_settings",
        "edgespec.weights",
        "profiles",
    },
    "edgespec.planned": {
        "edgespec.config",
        "edgespec.device",
        "edgespec.errors",
        "edgespec.grow",
        "edgespec.model_folder",
        "edgespec.pair",
        "edgespec.places",
        "edgespec.plan",
        "edgespec.target",
        "edgespec.tree_settings",
        "offload.placement",
        "profiles",
    },
    "edgespec.loops": {
        "edgespec.config",
        "edgespec.decode",
        "edgespec.follow",
        "edgespec.grow",
        "edgespec.target_initialized",
        "edgespec.verify",
        "profiles",
    },
    "edgespec.follow": {
        "edgespec.decode",
        "edgespec.grow",
        "edgespec.planned",
        "edgespec.tree",
        "edgespec.tree_settings",
        "profiles",
    },
    "edgespec.target": {"edgespec.causal_model", "edgespec.errors", "edgespec.tree", "offload.errors"},
    "edgespec.decode": {
        "edgespec.config",
        "edgespec.draft",
        "edgespec.errors",
        "edgespec.sampling",
        "edgespec.target",
        "edgespec.tree",
        "edgespec.verify",
    },
    "edgespec.head": set(),
    "edgespec.target_initialized": {
        "edgespec.config",
        "edgespec.decode",
        "edgespec.sampling",
        "edgespec.tree",
        "edgespec.verify",
    },
    "edgespec.memory": {
        "edgespec.causal_model",
        "edgespec.config",
        "edgespec.head",
        "edgespec.tree_settings",
        "offload",
    },
    "edgespec.weights": {"edgespec.model_folder", "edgespec.places", "offload"},
    "edgespec.plan": {
        "edgespec.config",
        "edgespec.errors",
        "edgespec.memory",
        "edgespec.model_folder",
        "edgespec.tree_settings",
        "edgespec.weights",
        "offload",
    },
    "edgespec.model_folder": {
        "edgespec.causal_model",
        "edgespec.draft",
        "edgespec.errors",
        "edgespec.target",
        "offload.architecture",
        "offload.checkpoint",
        "offload.skeleton",
    },
    "edgespec.pair": {"edgespec.config", "edgespec.errors", "edgespec.model_folder"},
    "edgespec.device": {"edgespec.errors"},
    "edgespec.results": {"edgespec.config", "edgespec.decode"},
    "edgespec.running": {"edgespec.errors"},
    "edgespec.streamer": {"edgespec.results"},
    "edgespec.loaded": {
        "edgespec.causal_model",
        "edgespec.draft",
        "edgespec.plan",
        "edgespec.self_check",
        "edgespec.weights",
        "offload",
    },
    "edgespec.chat_template": {"edgespec.errors"},
    "edgespec.session_file": {"edgespec.chat_template", "edgespec.errors", "edgespec.whole_file"},
    "edgespec.text_request": {"edgespec.config", "edgespec.context", "edgespec.errors", "edgespec.stops"},
    "edgespec.text_run": {
        "edgespec.causal_model",
        "edgespec.decode",
        "edgespec.device",
        "edgespec.draft",
        "edgespec.errors",
        "edgespec.grow",
        "edgespec.layer_major",
        "edgespec.loops",
        "edgespec.memory",
        "edgespec.pair",
        "edgespec.results",
        "edgespec.running",
        "edgespec.stops",
        "edgespec.target",
        "edgespec.text_request",
        "edgespec.tree_settings",
        "profiles",
    },
    "edgespec.conversation": {
        "edgespec.chat_template",
        "edgespec.config",
        "edgespec.errors",
        "edgespec.pair",
        "edgespec.results",
        "edgespec.session_file",
        "edgespec.text_request",
        "edgespec.text_run",
    },
    "edgespec.stops": {"edgespec.config", "edgespec.decode", "edgespec.results"},
    "edgespec.engine": {"edgespec", "offload", "profiles"},
    "edgespec.cli": {"edgespec", "profiles"},
    "edgespec.__main__": {"edgespec.cli"},
    "edgespec": {
        "edgespec.config",
        "edgespec.conversation",
        "edgespec.engine",
        "edgespec.errors",
        "edgespec.tree_settings",
    },
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def our_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import, which this test does not follow"
            # `from edgespec.grow import dyspec` imports a module, `from edgespec import __version__` a name.
            found |= {f"{node.module}.{alias.name}" if is_module(f"{node.module}.{alias.name}") else str(node.module)
                      for alias in node.names if alias.name != "__version__"}  # fmt: skip
    return {name for name in found if name.split(".")[0] in {"edgespec", "offload", "profiles"}}


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


SOURCES = [path for room in ("edgespec", "offload", "profiles") for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    module = module_name(path)
    rule = max((name for name in ALLOWED if is_within(module, name)), key=len)
    if module != "edgespec" and rule == "edgespec":
        pytest.fail(f"{module} is not in the table of imports")
    for imported in our_imports(path):
        # The bare package offers the engine: only what stands above the engine may use it.
        allowed = {
            name
            for name in ALLOWED[rule]
            if name != "edgespec" or rule in {"edgespec.cli", "edgespec.engine", "edgespec.train", "edgespec.tune"}
        }
        assert any(is_within(imported, package) for package in allowed), f"{module} imports {imported}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_files_stay_short_and_only_the_command_line_prints_or_exits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    if "cli" not in path.parts:
        assert not calls & {"print", "exit", "sys.exit", "signal.signal"}


def test_every_error_code_has_an_entry_in_the_troubleshooting_page() -> None:
    used = {code for path in SOURCES for code in re.findall(r'"(E_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    explained = set(re.findall(r"^## (E_[A-Z_]+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE))
    assert used == explained


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in sorted(COMMANDS))], ids=" ".join
)
def test_help_loads_no_torch_and_is_quick(arguments: list[str]) -> None:
    outcome = run_python(
        "import sys, edgespec.cli\n"
        f"code = edgespec.cli.run({arguments!r})\n"
        "assert code == 0\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)\n"
    )
    assert outcome.returncode == 0, outcome.stderr
    assert any(timed(arguments) < 0.3 for _ in range(5))


def timed(arguments: list[str]) -> float:
    """Seconds of the processor's where the system tells them of children: other programs must not decide on a test."""
    started, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-m", "edgespec", *arguments], capture_output=True, check=True, cwd=ROOT)
    waited, after = time.perf_counter() - started, os.times()
    worked = after.children_user + after.children_system - before.children_user - before.children_system
    return worked or waited


def test_the_package_offers_its_names_lazily() -> None:
    outcome = run_python(
        "import sys, edgespec\n"
        "assert 'torch' not in sys.modules\n"
        "for name in edgespec.__all__: getattr(edgespec, name)\n"
        "assert 'torch' in sys.modules\n"
    )
    assert outcome.returncode == 0, outcome.stderr
