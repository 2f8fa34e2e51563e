"""The layout is the architecture: who imports whom, what loads when, what every error code says."""

import ast
import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers

import edgespec
from edgespec.cli import COMMANDS

ROOT = Path(__file__).parent.parent

# Imports go down: a room may know those of the lines below its own, and none of its own line but itself.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"serve"},
    {"doctor"},
    {"distributed", "train"},
    {"engine"},
    {"chat"},
    {"text"},
    {"decode", "prefix_cache"},
    {"estimate"},
    {"placement"},
    {"tuning"},
    {"grow", "verify"},
    {"pair"},
    {"draft", "hub"},
    {"model"},
    {"machine", "sampling", "tree", "user_paths"},
    {"config"},
    {"validation"},
    {"errors", "to_device"},
)
# Rooms beside edgespec's own -> who may know them, beside themselves
OUTSIDE = {
    "offload": {
        "to_device",
        "errors",
        "model",
        "draft",
        "hub",
        "pair",
        "prefix_cache",
        "placement",
        "estimate",
        "doctor",
        "engine",
        "train",
    },
    "profiles": {"errors", "offload", "estimate", "placement", "tuning", "decode", "text", "engine", "doctor", "cli"},
}
MAX_OUTSIDE_A_ROOM = 10
MAX_PARAMETERS = 7  # of a function, its own object apart
# Functions that have more -> why
LONG_SIGNATURES = {
    "edgespec.engine.from_pretrained": "keywords of the Python API, which an editor shows",
    "offload.formats.four_bits_kernel.unpack": "a card's kernel takes tensors and numbers, no records",
    "offload.formats.gguf_triton.unpack": "another",
    "offload.formats.gguf_triton.multiply": "another",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Where a module stands: its room, or its own name outside of one; the bare package is the Python API's."""
    top, *below = module.split(".")
    return top if top != "edgespec" else below[0] if below else "__init__"


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The syntax tree of a module, which several tests walk through: its own node first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def our_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes_of(path):
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


def test_imports_go_down() -> None:
    levels = {name: level for level, names in enumerate(LAYERS) for name in names}
    for path, imported in [(source, name) for source in SOURCES for name in our_imports(source)]:
        room, other = room_of(module_name(path)), room_of(imported)
        if other == room or "__init__" in {room, other}:
            continue
        if other in OUTSIDE:
            assert room in OUTSIDE[other], f"{path} may not know {imported}"
        else:
            assert room in levels, f"{path} stands in no layer"
            assert levels[room] < levels[other], f"{path} may not know {imported}"


def test_scripts_know_of_tests_their_support_and_tests_know_no_script_but_one_that_they_test() -> None:
    """What both need stands in tests/support, which knows no script."""
    tested = {"tests.cli.test_cli_reference", "tests.test_selection", "tests.edgespec.serve.test_request_fields",
              "tests.edgespec.hub.test_published_drafts"}  # fmt: skip
    for path in [path for room in ("scripts", "tests") for path in (ROOT / room).rglob("*.py")]:
        module = module_name(path)
        named = re.findall(r"(?m)^\s*(?:from|import) ((?:scripts|tests)\b[\w.]*)", path.read_text(encoding="utf-8"))
        known = {name for name in named if name.split(".")[0] != module.split(".")[0]}
        of_support = {name for name in known if name.startswith("tests.support")}
        is_test_of_scripts = module.startswith("tests.scripts.") or module in tested
        assert known <= of_support or is_test_of_scripts, f"{path} may not know {sorted(known - of_support)}"


COMMAND_ROOMS = {"bench", "chat", "estimate", "generate", "models", "profile", "serve", "train"}


def test_commands_do_not_know_each_other() -> None:
    for path in (path for path in SOURCES if path.parent.name in COMMAND_ROOMS):
        known = {imported.split(".")[2] for imported in our_imports(path) if imported.startswith("edgespec.cli.")}
        assert known & COMMAND_ROOMS <= {path.parent.name}, path


def test_only_the_program_itself_uses_the_bare_package() -> None:
    users = {module_name(path) for path in SOURCES if "edgespec" in our_imports(path)}
    assert {room_of(user) for user in users} <= {"cli"}


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module_name(path))
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_few_modules_stand_outside_a_room_and_every_room_says_what_it_is_for() -> None:
    assert len(list((ROOT / "edgespec").glob("*.py"))) <= MAX_OUTSIDE_A_ROOM
    for path in (path for path in SOURCES if path.name == "__init__.py" and path.parent.name != "edgespec"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def foreign_names(node: ast.AST) -> list[str]:
    """What a node names in words, or takes from transformers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
        return [str(node.module), *(alias.name for alias in node.names)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_only_records_of_what_layers_keep_name_a_class_or_a_module_of_a_familys_code() -> None:
    """Tables of all families' names, `auto`, belong to none."""
    modeling = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    classes = {name for path in modeling for name in re.findall(r"(?m)^class (\w+)", path.read_text("utf-8"))}
    classes = {name for name in classes if not name.startswith("Auto")}
    for path in (path for path in SOURCES if path.parent.name != "mechanisms"):
        named = {name for node in nodes_of(path) for name in foreign_names(node)}
        assert not named & classes, path
        assert not [name for name in named if re.match(r"transformers\.models\.(?!auto\b)\w", name)], path


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in named if argument.arg not in {"self", "cls"}]


def test_few_functions_have_more_parameters_than_one_remembers() -> None:
    found = {
        f"{module_name(path)}.{node.name}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(parameters_of(node)) > MAX_PARAMETERS
    }
    assert found == set(LONG_SIGNATURES), "make a record of what belongs together; take out of the list what is short"


def test_the_page_lists_the_rooms_in_this_order() -> None:
    rooms = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    listed = [set(re.findall(r"`(\w+)/?`", line)) for row in rooms for line in row.split(";")]
    assert listed == [*LAYERS[1:], set(OUTSIDE)]


def test_every_error_code_has_an_entry_in_the_troubleshooting_page() -> None:
    used = {code for path in SOURCES for code in re.findall(r'"(E_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    assert used == set(re.findall(r"^## (E_[A-Z_]+)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE))


def run_python(code: str) -> float:
    """Run a program that must succeed.

    Returns the processor's seconds where the system tells them of children: other programs must not decide on a test.
    """
    # As a user's, they find modules that earlier ones have compiled.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started, before = time.perf_counter(), os.times()
    command = [sys.executable, "-c", code]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    waited, after = time.perf_counter() - started, os.times()
    assert outcome.returncode == 0, outcome.stderr
    worked = after.children_user + after.children_system - before.children_user - before.children_system
    return worked or waited


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in sorted(COMMANDS))], ids=" ".join
)
def test_help_loads_no_torch_and_is_quick(arguments: list[str]) -> None:
    program = (
        "import sys, edgespec.cli\n"
        f"code = edgespec.cli.run({arguments!r})\n"
        "assert code == 0\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)\n"
    )
    # Against what it takes at least on this machine, measured just then: a busy one is slow by turns
    assert any(run_python(program) < 0.3 or run_python(program) < 15 * run_python("import click") for _ in range(4))


def test_the_package_offers_its_names_lazily() -> None:
    run_python("import sys, edgespec; assert 'torch' not in sys.modules")
    for name in edgespec.__all__:
        assert getattr(edgespec, name), name
