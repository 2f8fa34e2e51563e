"""Every script imports, answers --help, and names commands that there are."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "tests/fuzz").glob("*.py")]
PATHS = [path for path in sorted(PROGRAMS) if path.name != "__init__.py" and not path.name.startswith("test_")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
NAMED = re.compile(r"(?:-m |\")((?:scripts|tests\.fuzz)(?:\.[a-z_]\w*)+)")


@pytest.mark.parametrize("name", MODULES)
def test_a_script_imports_and_answers_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    if '__name__ == "__main__"' in MODULES[name].read_text(encoding="utf-8"):
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert not ended.value.code
        assert capsys.readouterr().out.startswith("usage: ")


def test_commands_that_scripts_name_are_there() -> None:
    named = {(path.name, name) for path in PATHS for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > len(PATHS) / 3
    assert not {(file, name) for file, name in named if name not in MODULES}
